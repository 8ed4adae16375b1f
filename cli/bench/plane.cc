// The source's side of `kvferry bench plane`.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>

#include "cli/bench/bench.h"
#include "cli/bench/plane_shape.h"
#include "cli/process.h"
#include "kvferry/memory.h"
#include "src/base/random.h"
#include "src/data/shm/shm_plane.h"
#include "src/data/tcp/tcp_plane.h"
#include "src/plan/planner.h"

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kRawSend = 1 << 20;
constexpr std::size_t kSendBuffer = 256 << 10;  // of the floor: gathered, then sent

void send_all(int fd, const char* at, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = send_some(fd, at, std::min<std::uint64_t>(kRawSend, bytes));
    if (n <= 0) throw std::runtime_error("floor: send failed");
    at += n;
    bytes -= static_cast<std::uint64_t>(n);
  }
}

// A descriptor that the child inherits.
int inheritable(int fd) {
  const int copy = dup(fd);
  if (copy < 0) throw std::runtime_error("no descriptor");
  return copy;
}

// Both processes of one shape, from the source's side.
class PlaneRun {
 public:
  PlaneRun(const Shape& shape, const Settings& settings) : shape_(shape), settings_(settings) {
    auto source = SharedMemory::create(shape.bytes());
    auto ring = SharedMemory::create(FloorRing::kBytes);
    if (!source.ok() || !ring.ok()) throw std::runtime_error("no shared memory for the bench");
    shared_.emplace(std::move(*source));
    ring_memory_.emplace(std::move(*ring));
    ring_ = static_cast<FloorRing*>(ring_memory_->data());
    const int memory_fd = inheritable(shared_->region().file);
    const int ring_fd = inheritable(ring_memory_->region().file);
    target_.emplace(std::vector<std::string>{"bench-target"});
    close(memory_fd);
    close(ring_fd);
    // The ring and the tcp plane move private memory; only the mapped way needs the other kind.
    memory_ = shape.way == Way::kShmMapped ? static_cast<std::uint8_t*>(shared_->data())
                                           : big_memory(shape.bytes());
    const Json info = ask({{"plane", shape.to_json()},
                           {"memory_fd", memory_fd},
                           {"ring_fd", ring_fd},
                           {"threads", settings.copier_threads}});
    address_ = info["plane"];
    target_base_ = info["base"];
    raw_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(info["raw_port"].get<std::uint16_t>());
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    tune_floor_socket(raw_);
    if (connect(raw_, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0)
      throw std::runtime_error("raw stream: connect failed");
    KernelEntropy entropy;
    auto plane = shape.way == Way::kTcp ? data::create_tcp_plane({}, settings_, entropy)
                                        : data::create_shm_plane("/dev/shm", settings_, entropy);
    if (!plane.ok()) throw std::runtime_error(plane.status().to_string());
    plane_ = std::move(*plane);
    if (shape.way == Way::kShmMapped) {
      const std::vector<Region> regions{shared_->region()};
      if (const auto region = plane_->register_memory(regions); !region.ok())
        throw std::runtime_error(region.status().to_string());
    }
  }
  ~PlaneRun() {
    plane_.reset();
    if (raw_ >= 0) close(raw_);
    if (shape_.way != Way::kShmMapped) munmap(memory_, shape_.bytes());
  }

  void fill(std::uint64_t round) {
    const auto order = shape_.source_order();
    for (std::uint32_t i = 0; i < shape_.pages; ++i) {
      for (std::uint32_t r = 0; r < kRowsPerPage; ++r)
        fill_pattern(memory_ + static_cast<std::uint64_t>(order[i]) * shape_.page_bytes() +
                         std::uint64_t{r} * shape_.row,
                     shape_.row, row_place(i, r, round));
    }
  }

  // GB/s of the limit: one raw stream for tcp, one memcpy of the whole otherwise.
  double limit() {
    if (shape_.way == Way::kTcp) {
      ask({{"raw", true}});
      const auto begin = Clock::now();
      send_all(raw_, reinterpret_cast<const char*>(memory_), shape_.bytes());
      wait_byte();
      return speed(begin);
    }
    if (copy_.empty()) copy_.resize(shape_.bytes());
    const auto begin = Clock::now();
    std::memcpy(copy_.data(), memory_, shape_.bytes());
    return speed(begin);
  }

  double floor() {
    Rows rows(reinterpret_cast<char*>(memory_), shape_.source_order(), shape_.page_bytes(),
              shape_.row);
    ring_->written = ring_->taken = ring_->done = 0;
    ask({{"floor", true}});
    const auto begin = Clock::now();
    if (shape_.way == Way::kTcp) {
      floor_tcp(rows);
    } else if (shape_.way == Way::kShmRing) {
      floor_ring(rows);
    } else {
      ring_->go.fetch_add(1, std::memory_order_release);
    }
    if (shape_.way == Way::kTcp) {
      wait_byte();
    } else {
      while (ring_->done.load(std::memory_order_acquire) == 0) {
      }
    }
    return speed(begin);
  }

  double ours(std::uint64_t round) {
    const Lane lane{.source = reinterpret_cast<std::uint64_t>(memory_),
                    .target = target_base_,
                    .source_item = shape_.page_bytes(),
                    .target_item = shape_.target_page(),
                    .rows = kRowsPerPage,
                    .bytes = shape_.row,
                    .source_row = shape_.row,
                    .target_row = shape_.row * kTargetSpread};
    const auto source = shape_.source_order(), target = shape_.target_order();
    const double cpu_before = process_cpu_seconds() + ask({{"cpu", true}})["cpu"].get<double>();
    const auto begin = Clock::now();
    auto runs = plan::make_runs(source, target);
    plane_->write({WriteId{round + 1},
                   address_,
                   {Token{1, 1}, false},
                   1,
                   {CopyGroup{{lane}, std::move(*runs)}}});
    std::vector<Completion> completions;
    while (completions.empty()) {
      pollfd fd{plane_->ready_fd(), POLLIN, 0};
      if (::poll(&fd, 1, kTimeoutMs) == 0) throw std::runtime_error("the write did not complete");
      plane_->poll(completions);
    }
    const double result = speed(begin);
    cpu_ = process_cpu_seconds() + ask({{"cpu", true}})["cpu"].get<double>() - cpu_before;
    if (!completions[0].status.ok()) throw std::runtime_error(completions[0].status.to_string());
    return result;
  }

  // Of the last ours().
  [[nodiscard]] double cpu_seconds_per_gigabyte() const {
    return cpu_ / static_cast<double>(shape_.bytes()) * 1e9;
  }

  void verify(std::uint64_t round, const char* what) {
    const Json verdict = ask({{"verify", round}});
    if (verdict["wrong"] != 0)
      throw std::runtime_error(fmt::format("{}: wrong bytes: {}", what, verdict.dump()));
  }

 private:
  Json ask(const Json& question) {
    target_->send(question.dump());
    const auto answer = target_->wait_line(kTimeoutMs);
    if (!answer) throw std::runtime_error("the receiving process gave no answer");
    return Json::parse(*answer);
  }
  double speed(Clock::time_point begin) const {
    return static_cast<double>(shape_.bytes()) / seconds_since(begin) / 1e9;
  }
  void wait_byte() const {
    char byte = 0;
    if (recv(raw_, &byte, 1, 0) != 1) throw std::runtime_error("raw stream: no answer");
  }

  void floor_tcp(Rows& rows) {
    const std::uint64_t piece = piece_bytes(shape_.row);
    LineBuffer buffer(kSendBuffer);
    Batch batch(data::CopyKind::kGather, shape_.row);
    std::size_t filled = 0;
    for (std::uint64_t done = 0; done < shape_.bytes(); done += shape_.row) {
      const char* row = rows.next();
      for (std::uint64_t at = 0; at < shape_.row; at += piece) {
        const std::uint64_t n = std::min<std::uint64_t>(piece, shape_.row - at);
        if (filled + n > buffer.size()) {
          batch.flush();
          send_all(raw_, buffer.data(), filled);
          filled = 0;
        }
        batch.add(buffer.data() + filled, row + at, n);
        filled += n;
      }
    }
    batch.flush();
    send_all(raw_, buffer.data(), filled);
  }

  void floor_ring(Rows& rows) {
    const std::uint64_t piece = piece_bytes(shape_.row);
    Batch batch(data::CopyKind::kGather, shape_.row);
    std::uint64_t slot = 0;
    std::size_t filled = 0;
    const auto publish = [&] {
      batch.flush();
      ring_->written.store(++slot, std::memory_order_release);
      filled = 0;
      while (slot - ring_->taken.load(std::memory_order_acquire) >= FloorRing::kSlots) {
      }
    };
    for (std::uint64_t done = 0; done < shape_.bytes(); done += shape_.row) {
      const char* row = rows.next();
      for (std::uint64_t at = 0; at < shape_.row; at += piece) {
        const std::uint64_t n = std::min<std::uint64_t>(piece, shape_.row - at);
        if (filled + n > FloorRing::kSlot) publish();
        batch.add(ring_->slot(slot) + filled, row + at, n);
        filled += n;
      }
    }
    publish();
  }

  const Shape shape_;
  const Settings settings_;
  std::optional<SharedMemory> shared_, ring_memory_;
  FloorRing* ring_ = nullptr;
  std::optional<Child> target_;
  std::uint8_t* memory_ = nullptr;
  std::vector<char> copy_;
  PlaneAddress address_;
  std::uint64_t target_base_ = 0;
  int raw_ = -1;
  double cpu_ = 0;
  std::unique_ptr<data::StreamPlane> plane_;
};

}  // namespace

void bench_plane(const BenchOptions& options, std::vector<Figure>& figures) {
  Settings settings = settings_here();
  if (options.threads > 0) settings.copier_threads = options.threads;
  fmt::print(
      "plane: {} MiB a round, {} rows to a page, packed at the source and at {} times their size "
      "at "
      "the target, pages {}\n{:<20}{:>8}{:>10}{:>8}{:>12}{:>10}{:>12}\n",
      options.mebibytes, kRowsPerPage, kTargetSpread,
      options.pattern == "random" ? "in random order" : "in order", "way and row", "GB/s", "floor",
      "share", "limit", "share", "CPU s/GB");
  const double seconds =
      options.seconds / static_cast<double>(options.planes.size() * options.rows.size());
  for (const std::string& way : options.planes) {
    for (const std::uint32_t row : options.rows) {
      const Shape shape{way_of(way), row,
                        static_cast<std::uint32_t>((std::uint64_t{options.mebibytes} << 20) /
                                                   (std::uint64_t{row} * kRowsPerPage)),
                        options.pattern == "random"};
      if (shape.pages == 0) throw std::runtime_error("a round is smaller than a page");
      PlaneRun run(shape, settings);
      std::vector<double> ours, floors, limits, cpu;
      const auto begin = Clock::now();
      for (std::uint64_t round = 0; round <= options.pairs || seconds_since(begin) < seconds;
           ++round) {
        run.fill(round);
        const double limit = run.limit();
        // Which of the two goes first alternates: the machine is not quiet, and its noise has
        // trends.
        double floor = 0, our = 0;
        for (int half = 0; half < 2; ++half) {
          if ((half == 0) == (round % 2 == 0)) {
            floor = run.floor();
            run.verify(round, "floor");
          } else {
            our = run.ours(round);
            run.verify(round, "kvferry");
          }
        }
        if (round == 0) continue;  // the first pair warms up
        ours.push_back(our);
        cpu.push_back(run.cpu_seconds_per_gigabyte());
        floors.push_back(floor);
        limits.push_back(limit);
      }
      const Figure f{"plane." + way + "." + row_name(row),
                     median(ours),
                     "GB/s",
                     median(floors),
                     median(limits),
                     median(cpu)};
      fmt::print("{:<20}{:>8.2f}{:>10.2f}{:>7.0f}%{:>12.2f}{:>9.0f}%{:>12.2f}\n",
                 way + " " + row_name(row), f.value, f.baseline, f.value / f.baseline * 100,
                 f.limit, f.value / f.limit * 100, f.cpu_seconds_per_gigabyte);
      std::fflush(stdout);
      figures.push_back(f);
    }
  }
  fmt::print(
      "limit: tcp one raw stream with 1 MiB sends, shm one memcpy of the whole by one thread\n");
}

}  // namespace kvferry::cli
