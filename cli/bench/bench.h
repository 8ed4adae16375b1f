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
  std::vector<std::string> what;  // planner, copier, plane, rooms; empty: all
  std::vector<std::string> planes{"tcp", "shm_ring", "shm_mapped"};
  std::vector<std::uint32_t> rows{256, 1024, 4096, 65536};
  std::string pattern = "random";
  std::uint32_t pairs = 5, mebibytes = 256, threads = 0;
  double seconds = 0;  // 0: `pairs` decides
  std::string json, svg;
};

// One line of the JSON file. `limit`: what no program could beat, in the same unit; 0: none.
struct Figure {
  std::string name;
  double value = 0;
  std::string unit;
  double baseline = 0, limit = 0;
  double cpu_seconds_per_gigabyte = 0;  // of both processes; planes only
};

void add_bench_options(CLI::App& app, BenchOptions& options);
int run_bench(const BenchOptions& options);
// The other process of the plane and the rooms bench.
int run_bench_target();

// The parts. Each prints what it finds and throws std::runtime_error when something is wrong.
void bench_planner(const BenchOptions& options, std::vector<Figure>& figures);
void bench_copier(const BenchOptions& options);
void bench_rooms(const BenchOptions& options, std::vector<Figure>& figures);
void bench_plane(const BenchOptions& options, std::vector<Figure>& figures);

}  // namespace kvferry::cli
