// `kvferry bench`: figures beside a baseline of the same run; bytes verified.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace kvferry::cli {

struct BenchOptions {
  std::vector<std::string> what;  // planner, plane; empty: all
  std::vector<std::uint32_t> rows{256, 65536};
  std::uint32_t pairs = 7;
  std::uint32_t mebibytes = 256;
  std::string json;
};

void add_bench_options(CLI::App& app, BenchOptions& options);
int run_bench(const BenchOptions& options);
int run_bench_target();

}  // namespace kvferry::cli
