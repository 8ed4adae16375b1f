#include "cli/bench/bench.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <thread>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/bench/common.h"
#include "cli/bench/svg.h"
#include "src/base/random.h"

namespace kvferry::cli {

double percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(p * static_cast<double>(values.size() - 1) + 0.5)];
}
double median(std::vector<double> values) {
  return percentile(std::move(values), 0.5);
}

Settings settings_here() {
  Settings settings;
  const Status status = apply_environment(
      settings, [](const char* name) -> const char* { return std::getenv(name); });
  if (!status.ok()) throw std::runtime_error(status.message());
  return settings;
}

std::uint8_t* big_memory(std::size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::runtime_error(fmt::format("no memory for {} bytes", bytes));
  madvise(at, bytes, MADV_HUGEPAGE);
  std::memset(at, kPoison, bytes);
  return static_cast<std::uint8_t*>(at);
}

std::vector<PageIndex> page_order(std::uint32_t pages, std::uint64_t seed, bool random) {
  std::vector<PageIndex> order(pages);
  for (std::uint32_t i = 0; i < pages; ++i) order[i] = static_cast<PageIndex>(i);
  if (!random) return order;
  Random draws(seed);
  for (std::size_t i = pages; i > 1; --i) std::swap(order[i - 1], order[draws.below(i)]);
  return order;
}

double process_cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::string row_name(std::uint32_t row) {
  return row >= 1024 ? fmt::format("{}k", row / 1024) : fmt::format("{}", row);
}

void add_bench_options(CLI::App& app, BenchOptions& options) {
  app.add_option("what", options.what, "planner, copier, rooms, plane; nothing: all")
      ->check(CLI::IsMember({"planner", "copier", "rooms", "plane"}));
  app.add_option("--plane", options.planes, "ways of the plane bench: tcp, shm_ring, shm_mapped")
      ->check(CLI::IsMember({"tcp", "shm_ring", "shm_mapped"}));
  app.add_option("--rows", options.rows, "row sizes of the plane bench, bytes")
      ->check(CLI::Range(1U, 1U << 24))
      ->capture_default_str();
  app.add_option("--pattern", options.pattern, "order of the pages on both sides")
      ->check(CLI::IsMember({"random", "sequential"}))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "copier threads of each side; 0: as configured")
      ->check(CLI::Range(0U, 256U));
  app.add_option("--pairs", options.pairs, "alternating pairs that are measured")
      ->check(CLI::Range(1U, 1000U))
      ->capture_default_str();
  app.add_option("--seconds", options.seconds,
                 "how long plane takes in all, where --pairs take less")
      ->check(CLI::Range(0.0, 3600.0));
  app.add_option("--mebibytes", options.mebibytes, "payload of one round")
      ->check(CLI::Range(16U, 4096U))
      ->capture_default_str();
  app.add_option("--json", options.json, "write the figures to this file");
  app.add_option("--svg", options.svg, "draw throughput over row size to this file");
}

int run_bench(const BenchOptions& options) {
  const auto wanted = [&](const char* name) {
    return options.what.empty() ||
           std::find(options.what.begin(), options.what.end(), name) != options.what.end();
  };
  utsname machine{};
  uname(&machine);
  std::string cpu = "unknown processor";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string text; std::getline(cpuinfo, text);) {
    if (text.starts_with("model name")) {
      cpu = text.substr(text.find(':') + 2);
      break;
    }
  }
  fmt::print("machine: {}, {} cores, {} {}\n", cpu, std::thread::hardware_concurrency(),
             machine.sysname, machine.release);
  std::vector<Figure> figures;
  try {
    if (wanted("planner")) bench_planner(options, figures);
    if (wanted("copier")) bench_copier(options);
    if (wanted("rooms")) bench_rooms(options, figures);
    if (wanted("plane")) bench_plane(options, figures);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kvferry bench: {}\n", error.what());
    return 1;
  }
  const auto write_file = [](const std::string& name, const std::string& text) {
    std::ofstream file(name);
    file << text << "\n";
    if (file) return true;
    fmt::print(stderr, "kvferry bench: cannot write {}\n", name);
    return false;
  };
  if (!options.json.empty()) {
    auto list = nlohmann::json::array();
    for (const Figure& f : figures) {
      list.push_back({{"name", f.name},
                      {"value", f.value},
                      {"unit", f.unit},
                      {"baseline", f.baseline},
                      {"ratio", f.value / f.baseline}});
      if (f.cpu_seconds_per_gigabyte > 0)
        list.back()["cpu_seconds_per_gigabyte"] = f.cpu_seconds_per_gigabyte;
    }
    if (!write_file(options.json, list.dump(2))) return 2;
  }
  if (!options.svg.empty() && !write_file(options.svg, draw_planes(figures, cpu))) return 2;
  return 0;
}

}  // namespace kvferry::cli
