// What the parts of the bench share: memory, page orders, clocks, settings.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/pattern.h"
#include "kvferry/config.h"
#include "kvferry/types.h"

namespace kvferry::cli {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kRowsPerPage = 16;
// Rows are packed at the source and at this multiple of their size at the target.
constexpr std::uint32_t kTargetSpread = 4;
constexpr int kTimeoutMs = 60000;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}
double median(std::vector<double> values);
// `p` from 0 to 1.
double percentile(std::vector<double> values, double p);
// From the environment, as an endpoint's user would.
Settings settings_here();
// Huge pages where the kernel gives them; touched.
std::uint8_t* big_memory(std::size_t bytes);
// A page order that both processes derive on their own.
std::vector<PageIndex> page_order(std::uint32_t pages, std::uint64_t seed, bool random);
inline PatternPlace row_place(std::uint64_t position, std::uint32_t row, std::uint64_t round) {
  return {round, 1, 0, row, position};
}
std::string row_name(std::uint32_t row);
// User and kernel, all threads.
double process_cpu_seconds();

}  // namespace kvferry::cli
