// kvferry-sim: runs seeds of the simulated cluster on all cores.
#include <atomic>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>

#include "src/base/parse.h"
#include "src/sim/required_marks.h"
#include "src/sim/world.h"

namespace kvferry::sim {
namespace {

constexpr std::uint64_t kSeedsForMarks = 500;

int run(std::uint64_t first, std::uint64_t last, bool print, bool digest, unsigned threads,
        bool show_marks) {
  std::atomic<std::uint64_t> next{first};
  std::mutex mutex;
  std::uint64_t seeds = 0, rooms = 0, succeeded = 0, bytes = 0, violations = 0, combined = 0;
  Marks marks;
  const auto work = [&] {
    for (;;) {
      const std::uint64_t seed = next.fetch_add(1);
      if (seed > last) return;
      Report report = World(seed, print).run();
      const std::lock_guard lock(mutex);
      ++seeds;
      rooms += report.rooms;
      succeeded += report.succeeded;
      bytes += report.bytes;
      violations += report.violations.size();
      Fnv one;
      one.add(seed);
      one.add(report.digest);
      combined ^= one.value();  // seeds end in any order
      for (const std::string& text : report.violations) std::printf("%s\n", text.c_str());
      if (!report.violations.empty())
        std::printf("  again with the event log: kvferry-sim --seed %llu\n",
                    static_cast<unsigned long long>(seed));
      for (const auto& [mark, count] : report.marks) marks[mark] += count;
    }
  };
  std::vector<std::thread> pool;
  for (unsigned i = 1; i < threads; ++i) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
  std::uint64_t missing = 0;
  if (seeds >= kSeedsForMarks) {
    for (const char* mark : kRequiredMarks) {
      if (marks[mark] > 0) continue;
      ++missing;
      std::printf("mark never reached: %s\n", mark);
    }
  }
  if (show_marks) {
    for (const auto& [mark, count] : marks)
      std::printf("%10llu  %s\n", static_cast<unsigned long long>(count), mark.c_str());
  }
  if (digest) std::printf("digest=%016llx\n", static_cast<unsigned long long>(combined));
  std::printf(
      "seeds=%llu rooms=%llu succeeded=%llu bytes=%llu violations=%llu marks_missing=%llu\n",
      static_cast<unsigned long long>(seeds), static_cast<unsigned long long>(rooms),
      static_cast<unsigned long long>(succeeded), static_cast<unsigned long long>(bytes),
      static_cast<unsigned long long>(violations), static_cast<unsigned long long>(missing));
  return violations == 0 && missing == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvferry::sim

int main(int argc, char** argv) {
  CLI::App app{
      "Runs the protocol core in a simulated cluster: faults, then heal; every byte checked."};
  std::string range = "1..100";
  std::uint64_t seed = 0;
  bool digest = false, marks = false;
  unsigned threads = std::max(1U, std::thread::hardware_concurrency());
  app.add_option("--seeds", range, "seeds A..B, both included")->capture_default_str();
  auto* one = app.add_option("--seed", seed, "one seed, with its event log");
  app.add_flag("--digest", digest, "print a digest of all event logs; the same on every machine");
  app.add_flag("--marks", marks, "print how often each mark was reached");
  app.add_option("--threads", threads, "threads; default: one for each core")
      ->check(CLI::Range(1U, 1024U));
  CLI11_PARSE(app, argc, argv);
  if (one->count() > 0) return kvferry::sim::run(seed, seed, true, digest, 1, marks);
  const auto dots = range.find("..");
  const auto first = kvferry::parse_int<std::uint64_t>(range.substr(0, dots));
  const auto last =
      dots == std::string::npos ? first : kvferry::parse_int<std::uint64_t>(range.substr(dots + 2));
  if (!first || !last || *last < *first) {
    std::fprintf(stderr, "--seeds: '%s' is no range A..B\n", range.c_str());
    return 2;
  }
  return kvferry::sim::run(*first, *last, false, digest, threads, marks);
}
