#include "cli/bench.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <thread>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/pattern.h"
#include "cli/process.h"
#include "kvferry/data_plane.h"
#include "src/base/random.h"
#include "src/data/tcp/tcp_plane.h"
#include "src/plan/geometry.h"
#include "src/plan/planner.h"

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kRowsPerPage = 16;
constexpr std::uint32_t kTargetSpread =
    4;  // rows are packed at the source and at this multiple of their size at the target
constexpr std::size_t kRawSend = 1 << 20;
constexpr int kTimeoutMs = 60000;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Settings settings_here() {
  Settings settings;
  const Status status = apply_environment(
      settings, [](const char* name) -> const char* { return std::getenv(name); });
  if (!status.ok()) throw std::runtime_error(status.message());
  return settings;
}

struct Figure {
  std::string name;
  double value = 0;
  std::string unit;
  double baseline = 0;
};

std::uint8_t* big_memory(std::size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::runtime_error(fmt::format("no memory for {} bytes", bytes));
  madvise(at, bytes, MADV_HUGEPAGE);
  return static_cast<std::uint8_t*>(at);
}

// A page order that both processes derive on their own.
std::vector<PageIndex> shuffled(std::uint32_t pages, std::uint64_t seed) {
  std::vector<PageIndex> order(pages);
  for (std::uint32_t i = 0; i < pages; ++i) order[i] = static_cast<PageIndex>(i);
  Random random(seed);
  for (std::size_t i = pages; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

PatternPlace row_place(std::uint64_t position, std::uint32_t row, std::uint64_t round) {
  return {round, 1, 0, row, position};
}

bool read_all(int fd, void* to, std::size_t bytes) {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = recv(fd, at, bytes, 0);
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
  return true;
}

// --- planner
// ------------------------------------------------------------------------------------------------------

void bench_planner(const BenchOptions& options, std::vector<Figure>& figures) {
  const plan::Geometry geometry{.name = "llama-3.1-8b",
                                .layers = 32,
                                .attention = {},
                                .kv_heads = 8,
                                .key_head_bytes = 256,
                                .value_head_bytes = 256,
                                .dtype = DType::kBFloat16,
                                .aux_bytes = {}};
  Layout layout = plan::layout_of_rank(geometry, {}, 1, 16384, 0);
  plan::place_slabs(layout, 1 << 20, 4096);
  const auto lanes = plan::pair_lanes(layout, layout, "source", "target");
  const auto source = shuffled(16384, 1), target = shuffled(16384, 2);
  const std::span<const PageIndex> s(source.data(), 8192), t(target.data(), 8192);
  std::vector<double> plan_ms, list_ms;
  std::uint64_t check = 0;
  for (std::uint32_t i = 0; i < options.pairs * 3; ++i) {
    auto begin = Clock::now();
    auto runs = plan::make_runs(s, t);
    const CopyPlan plan{CopyGroup{lanes->kv, std::move(*runs)}};
    plan_ms.push_back(seconds_since(begin) * 1e3);
    begin = Clock::now();
    const auto list = plan::expand(plan);  // what an engine that moves lists must be handed
    list_ms.push_back(seconds_since(begin) * 1e3);
    check += list.size() == 8192ULL * 64 && bytes_of(plan) == 8192ULL * 64 * 2048 ? 1 : 0;
  }
  if (check != options.pairs * 3) throw std::runtime_error("the plan is wrong");
  figures.push_back({"planner.fragmented_8k_ms", median(plan_ms), "ms", median(list_ms)});
  fmt::print(
      "planner, 8192 tokens, page size 1, all fragmented, 32 layers K and V: {:.3f} ms (the same "
      "as a flat list of 524288 blocks: {:.1f} ms)\n",
      figures.back().value, figures.back().baseline);
}

// --- plane
// --------------------------------------------------------------------------------------------------------

std::string row_name(std::uint32_t row) {
  return row >= 1024 ? fmt::format("{}k", row / 1024) : fmt::format("{}", row);
}

void bench_plane(const BenchOptions& options, std::vector<Figure>& figures) {
  for (const std::uint32_t row : options.rows) {
    const std::uint32_t page_bytes = row * kRowsPerPage;
    const auto pages =
        static_cast<std::uint32_t>((std::uint64_t{options.mebibytes} << 20) / page_bytes);
    const std::uint64_t bytes = std::uint64_t{pages} * page_bytes;
    Child target({"bench-target"});
    target.send(Json{{"row", row}, {"pages", pages}}.dump());
    const auto hello = target.wait_line(kTimeoutMs);
    if (!hello) throw std::runtime_error("the receiving process did not start");
    const Json info = Json::parse(*hello);
    const std::string address = info["plane"];

    const Settings settings = settings_here();
    KernelEntropy entropy;
    auto plane = data::create_tcp_plane({}, settings, entropy);
    if (!plane.ok()) throw std::runtime_error(plane.status().to_string());
    std::uint8_t* memory = big_memory(bytes);
    const auto source_order = shuffled(pages, 11), target_order = shuffled(pages, 12);
    const auto fill = [&](std::uint64_t round) {
      for (std::uint32_t i = 0; i < pages; ++i) {
        for (std::uint32_t r = 0; r < kRowsPerPage; ++r)
          fill_pattern(memory + static_cast<std::uint64_t>(source_order[i]) * page_bytes +
                           std::uint64_t{r} * row,
                       row, row_place(i, r, round));
      }
    };
    const int raw = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(info["raw_port"].get<std::uint16_t>());
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(raw, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0)
      throw std::runtime_error("raw stream: connect failed");

    const Lane lane{.source = reinterpret_cast<std::uint64_t>(memory),
                    .target = info["base"].get<std::uint64_t>(),
                    .source_item = page_bytes,
                    .target_item = std::uint64_t{page_bytes} * kTargetSpread,
                    .rows = kRowsPerPage,
                    .bytes = row,
                    .source_row = row,
                    .target_row = row * kTargetSpread};
    std::vector<double> ours, theirs;
    for (std::uint32_t round = 0; round <= options.pairs; ++round) {  // the first pair warms up
      fill(round);
      auto begin = Clock::now();
      for (std::uint64_t done = 0; done < bytes;) {
        const ssize_t n = ::send(raw, memory + done,
                                 std::min<std::uint64_t>(kRawSend, bytes - done), MSG_NOSIGNAL);
        if (n <= 0) throw std::runtime_error("raw stream: send failed");
        done += static_cast<std::uint64_t>(n);
      }
      char ack = 0;
      if (!read_all(raw, &ack, 1)) throw std::runtime_error("raw stream: no answer");
      const double raw_speed = static_cast<double>(bytes) / seconds_since(begin) / 1e9;

      begin = Clock::now();
      auto runs = plan::make_runs(source_order, target_order);
      (*plane)->write({WriteId{round + 1},
                       address,
                       {Token{1, 1}, false},
                       1,
                       {CopyGroup{{lane}, std::move(*runs)}}});
      std::vector<Completion> completions;
      while (completions.empty()) {
        pollfd fd{(*plane)->ready_fd(), POLLIN, 0};
        ::poll(&fd, 1, kTimeoutMs);
        (*plane)->poll(completions);
      }
      const double our_speed = static_cast<double>(bytes) / seconds_since(begin) / 1e9;
      if (!completions[0].status.ok()) throw std::runtime_error(completions[0].status.to_string());
      target.send(Json{{"verify", round}}.dump());
      const auto verdict = target.wait_line(kTimeoutMs);
      if (!verdict || Json::parse(*verdict)["wrong"] != 0)
        throw std::runtime_error("wrong bytes: " + verdict.value_or("no answer"));
      if (round == 0) continue;
      ours.push_back(our_speed);
      theirs.push_back(raw_speed);
    }
    close(raw);
    munmap(memory, bytes);
    figures.push_back({"plane.tcp." + row_name(row), median(ours), "GB/s", median(theirs)});
    fmt::print("plane tcp, rows of {}: {:.2f} GB/s; one raw stream {:.2f} GB/s; {:.0f} %\n", row,
               figures.back().value, figures.back().baseline,
               figures.back().value / figures.back().baseline * 100);
    std::fflush(stdout);
  }
}

}  // namespace

int run_bench_target() {
  std::string line;
  const auto read_line = [&line] {
    line.clear();
    char c = 0;
    while (read(0, &c, 1) == 1) {
      if (c == '\n') return true;
      line += c;
    }
    return false;
  };
  if (!read_line()) return 1;
  const Json config = Json::parse(line);
  const std::uint32_t row = config["row"], pages = config["pages"];
  const std::uint64_t item = std::uint64_t{row} * kRowsPerPage * kTargetSpread;
  std::uint8_t* memory = big_memory(item * pages);
  std::memset(memory, kPoison, item * pages);
  const Settings settings = settings_here();
  KernelEntropy entropy;
  auto plane = data::create_tcp_plane({}, settings, entropy);
  if (!plane.ok()) return 1;
  GrantGroup group{std::make_shared<const std::vector<GrantSlab>>(std::vector<GrantSlab>{
                       {reinterpret_cast<std::uint64_t>(memory), item, item, pages}}),
                   {}};
  for (std::uint32_t i = 0; i < pages; ++i) group.items.push_back(i);
  if (!(*plane)->grant({GrantId{1}, Token{1, 1}, false, {group}}).ok()) return 1;

  // The raw stream: read into a cache-sized buffer and dropped; one byte back when a whole round is
  // there.
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  if (bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0 ||
      listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size) != 0)
    return 1;
  std::thread raw([&] {
    const int fd = accept(listener, nullptr, nullptr);
    std::vector<char> buffer(kRawSend);
    const std::uint64_t round = std::uint64_t{row} * kRowsPerPage * pages;
    std::uint64_t got = 0;
    for (ssize_t n = 0; (n = recv(fd, buffer.data(), buffer.size(), 0)) > 0;) {
      got += static_cast<std::uint64_t>(n);
      if (got < round) continue;
      got -= round;
      const char ack = 1;
      if (send(fd, &ack, 1, MSG_NOSIGNAL) != 1) break;
    }
    close(fd);
  });
  const auto say = [](const Json& json) {
    const std::string text = json.dump() + "\n";
    (void)!write(1, text.data(), text.size());
  };
  say({{"plane", (*plane)->address()},
       {"base", reinterpret_cast<std::uint64_t>(memory)},
       {"raw_port", ntohs(at.sin_port)}});
  const auto order = shuffled(pages, 12);
  while (read_line()) {
    const std::uint64_t round = Json::parse(line)["verify"];
    std::uint64_t wrong = 0;
    for (std::uint32_t i = 0; i < pages; ++i) {
      std::uint8_t* page = memory + static_cast<std::uint64_t>(order[i]) * item;
      for (std::uint32_t r = 0; r < kRowsPerPage; ++r) {
        std::uint8_t* begin = page + std::uint64_t{r} * row * kTargetSpread;
        wrong += count_wrong(begin, row, row_place(i, r, round));
        for (std::uint64_t b = row; b < std::uint64_t{row} * kTargetSpread; ++b)
          wrong += begin[b] != kPoison ? 1 : 0;
        std::memset(begin, kPoison, row);
      }
    }
    say({{"wrong", wrong}});
  }
  shutdown(listener, SHUT_RDWR);
  raw.join();
  close(listener);
  return 0;
}

void add_bench_options(CLI::App& app, BenchOptions& options) {
  app.add_option("what", options.what, "planner, plane; nothing: both")
      ->check(CLI::IsMember({"planner", "plane"}));
  app.add_option("--rows", options.rows, "row sizes of the plane bench, bytes")
      ->check(CLI::Range(1U, 1U << 24))
      ->capture_default_str();
  app.add_option("--pairs", options.pairs, "alternating pairs that are measured")
      ->check(CLI::Range(1U, 1000U))
      ->capture_default_str();
  app.add_option("--mebibytes", options.mebibytes, "payload of one round")
      ->check(CLI::Range(16U, 4096U))
      ->capture_default_str();
  app.add_option("--json", options.json, "write the figures to this file");
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
    if (wanted("plane")) bench_plane(options, figures);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kvferry bench: {}\n", error.what());
    return 1;
  }
  if (!options.json.empty()) {
    Json list = Json::array();
    for (const Figure& f : figures)
      list.push_back({{"name", f.name},
                      {"value", f.value},
                      {"unit", f.unit},
                      {"baseline", f.baseline},
                      {"ratio", f.value / f.baseline}});
    std::ofstream file(options.json);
    file << list.dump(2) << "\n";
    if (!file) {
      fmt::print(stderr, "kvferry bench: cannot write {}\n", options.json);
      return 2;
    }
  }
  return 0;
}

}  // namespace kvferry::cli
