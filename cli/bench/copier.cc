#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include "cli/bench/bench.h"
#include "cli/bench/common.h"
#include "src/data/copier/copier.h"

namespace kvferry::cli {
namespace {

constexpr std::size_t kSide = 256ULL << 20;
constexpr std::size_t kBuffer = 128 << 10;
constexpr std::array<std::size_t, 5> kRows{64, 256, 1024, 4096, 65536};
constexpr std::array<const char*, data::kCopyKinds> kKindNames{
    "gather (pages to buffer)", "scatter (buffer to pages)", "direct (pages to pages)"};

}  // namespace

// Every kernel at every size on memory that no cache holds, and what the start-up measurement made
// of it in its few milliseconds.
void bench_copier(const BenchOptions&) {
  auto begin = Clock::now();
  const data::KernelChoice choice = data::measure_kernels();
  const Settings settings = settings_here();
  fmt::print("copier: the measurement at start took {:.1f} ms; {} threads copy for an endpoint\n",
             seconds_since(begin) * 1e3,
             data::copier_threads(settings, std::thread::hardware_concurrency()));
  std::uint8_t *source = big_memory(kSide), *target = big_memory(kSide),
               *buffer = big_memory(kBuffer);
  begin = Clock::now();
  std::memcpy(target, source, kSide);
  fmt::print("one memcpy of {} MiB: {:.1f} GB/s\n", kSide >> 20,
             static_cast<double>(kSide) / seconds_since(begin) / 1e9);
  for (std::size_t k = 0; k < data::kCopyKinds; ++k) {
    const auto kind = static_cast<data::CopyKind>(k);
    fmt::print("\n{:<32}", kKindNames[k]);
    for (const std::size_t row : kRows)
      fmt::print("{:>9}", row_name(static_cast<std::uint32_t>(row)));
    fmt::print("   GB/s; * is what kvferry takes\n");
    std::array<std::vector<data::Piece>, kRows.size()> pieces;
    for (std::size_t r = 0; r < kRows.size(); ++r) {
      const auto count = static_cast<std::uint32_t>(kSide / kRows[r]);
      const auto from = page_order(count, 3, true), to = page_order(count, 4, true);
      for (std::uint32_t i = 0; i < count; ++i) {
        auto* small = reinterpret_cast<char*>(buffer) + i * kRows[r] % kBuffer;
        pieces[r].push_back(
            {kind == data::CopyKind::kGather
                 ? small
                 : reinterpret_cast<char*>(target) + static_cast<std::size_t>(to[i]) * kRows[r],
             kind == data::CopyKind::kScatter
                 ? small
                 : reinterpret_cast<char*>(source) + static_cast<std::size_t>(from[i]) * kRows[r],
             kRows[r]});
      }
    }
    std::size_t number = 0;
    for (const data::Kernel& kernel : data::kernels()) {
      fmt::print("{:>3} {:<28}", ++number, kernel.name);
      for (std::size_t r = 0; r < kRows.size(); ++r) {
        double best = 1e9;
        for (int run = 0; run < 2; ++run) {
          begin = Clock::now();
          for (std::size_t at = 0; at < pieces[r].size(); at += 256)
            kernel.copy(std::span(pieces[r]).subspan(
                at, std::min<std::size_t>(256, pieces[r].size() - at)));
          data::landing_fence();
          best = std::min(best, seconds_since(begin));
        }
        const bool chosen = &choice.at(kind, kRows[r]) == &kernel;
        fmt::print("{:>8.1f}{}", static_cast<double>(kSide) / best / 1e9, chosen ? "*" : " ");
      }
      fmt::print("\n");
      std::fflush(stdout);
    }
  }
  munmap(source, kSide);
  munmap(target, kSide);
  munmap(buffer, kBuffer);
}

}  // namespace kvferry::cli
