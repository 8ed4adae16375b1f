// A drawing of the plane bench.
#pragma once

#include <string>
#include <vector>

#include "cli/bench/bench.h"

namespace kvferry::cli {

// Throughput over row size for every way that `figures` hold ("plane.<way>.<row>"): ours, the
// floor, the limit.
std::string draw_planes(const std::vector<Figure>& figures, const std::string& machine);

}  // namespace kvferry::cli
