// The receiving process of the benches.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "cli/bench/bench.h"
#include "cli/bench/plane_shape.h"
#include "cli/bench/rooms.h"
#include "src/base/random.h"
#include "src/data/shm/shm_plane.h"
#include "src/data/stream/memory_file.h"
#include "src/data/tcp/tcp_plane.h"

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kRawReceive = 1 << 20;
constexpr std::size_t kReceiveBuffer = 64 << 10;  // of the floor: received, then scattered

class PlaneTarget {
 public:
  explicit PlaneTarget(const Json& config)
      : shape_(Shape::from_json(config["plane"])), settings_(settings_here()) {
    settings_.copier_threads = config["threads"];
    bytes_ = shape_.target_page() * shape_.pages;
    memory_ = big_memory(bytes_);
    auto source = data::Mapping::of(config["memory_fd"], shape_.bytes(), false);
    auto ring = data::Mapping::of(config["ring_fd"], FloorRing::kBytes, true);
    KernelEntropy entropy;
    auto plane = shape_.way == Way::kTcp ? data::create_tcp_plane({}, settings_, entropy)
                                         : data::create_shm_plane("/dev/shm", settings_, entropy);
    if (!source.ok() || !ring.ok() || !plane.ok()) _exit(1);
    source_ = std::move(*source);
    ring_memory_ = std::move(*ring);
    ring_ = reinterpret_cast<FloorRing*>(ring_memory_.data());
    plane_ = std::move(*plane);
    const std::uint64_t item = shape_.target_page();
    GrantGroup group{std::make_shared<const std::vector<GrantSlab>>(std::vector<GrantSlab>{
                         {reinterpret_cast<std::uint64_t>(memory_), item, item, shape_.pages}}),
                     {}};
    for (std::uint32_t i = 0; i < shape_.pages; ++i) group.items.push_back(i);
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    if (!plane_->grant({GrantId{1}, Token{1, 1}, false, {group}}).ok() ||
        bind(listener_, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0 ||
        listen(listener_, 1) != 0 ||
        getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size) != 0)
      _exit(1);
    port_ = ntohs(at.sin_port);
  }

  [[nodiscard]] Json hello() const {
    return {{"plane", plane_->address()},
            {"base", reinterpret_cast<std::uint64_t>(memory_)},
            {"raw_port", port_}};
  }

  // Reads as much as a round has and drops it.
  void raw() {
    connect();
    std::vector<char> buffer(kRawReceive);
    for (std::uint64_t got = 0; got < shape_.bytes();) {
      const ssize_t n = receive_some(raw_, buffer.data(), buffer.size());
      if (n <= 0) _exit(1);
      got += static_cast<std::uint64_t>(n);
    }
    say_byte();
  }

  void floor() {
    Rows rows(reinterpret_cast<char*>(memory_), shape_.target_order(), shape_.target_page(),
              std::uint64_t{shape_.row} * kTargetSpread);
    if (shape_.way == Way::kTcp) {
      floor_tcp(rows);
    } else if (shape_.way == Way::kShmRing) {
      floor_ring(rows);
    } else {
      floor_mapped(rows);
    }
  }

  Json verify(std::uint64_t round) {
    const auto order = shape_.target_order();
    const std::uint64_t spread = std::uint64_t{shape_.row} * kTargetSpread;
    const std::vector<std::uint8_t> poison(spread, kPoison);
    std::uint64_t wrong = 0;
    for (std::uint32_t i = 0; i < shape_.pages; ++i) {
      std::uint8_t* page = memory_ + static_cast<std::uint64_t>(order[i]) * shape_.target_page();
      for (std::uint32_t r = 0; r < kRowsPerPage; ++r) {
        std::uint8_t* begin = page + r * spread;
        wrong += count_wrong(begin, shape_.row, row_place(i, r, round));
        wrong += std::memcmp(begin + shape_.row, poison.data(), spread - shape_.row) != 0 ? 1 : 0;
        std::memset(begin, kPoison, shape_.row);
      }
    }
    return {{"wrong", wrong}};
  }

 private:
  void connect() {
    if (raw_ >= 0) return;
    raw_ = accept(listener_, nullptr, nullptr);
    tune_floor_socket(raw_);
  }
  void say_byte() const {
    const char ack = 1;
    if (send(raw_, &ack, 1, MSG_NOSIGNAL) != 1) _exit(1);
  }

  void floor_tcp(Rows& rows) {
    connect();
    LineBuffer buffer(kReceiveBuffer);
    Batch batch(data::CopyKind::kScatter, shape_.row);
    std::uint64_t in_row = 0;
    char* row = rows.next();
    for (std::uint64_t got = 0; got < shape_.bytes();) {
      const ssize_t received = receive_some(raw_, buffer.data(), buffer.size());
      if (received <= 0) _exit(1);
      const auto n = static_cast<std::uint64_t>(received);
      for (std::uint64_t at = 0; at < n;) {
        const std::uint64_t part = std::min(n - at, shape_.row - in_row);
        batch.add(row + in_row, buffer.data() + at, part);
        at += part;
        in_row += part;
        if (in_row == shape_.row && got + at < shape_.bytes()) {
          row = rows.next();
          in_row = 0;
        }
      }
      batch.flush();
      got += n;
    }
    say_byte();
  }

  void floor_ring(Rows& rows) {
    const std::uint64_t piece = piece_bytes(shape_.row);
    Batch batch(data::CopyKind::kScatter, shape_.row);
    std::uint64_t slot = 0;
    std::size_t emptied = 0;
    const auto wait = [&] {
      while (ring_->written.load(std::memory_order_acquire) <= slot) {
      }
    };
    wait();
    for (std::uint64_t done = 0; done < shape_.bytes(); done += shape_.row) {
      char* row = rows.next();
      for (std::uint64_t at = 0; at < shape_.row; at += piece) {
        const std::uint64_t n = std::min<std::uint64_t>(piece, shape_.row - at);
        if (emptied + n > FloorRing::kSlot) {
          batch.flush();
          ring_->taken.store(++slot, std::memory_order_release);
          emptied = 0;
          wait();
        }
        batch.add(row + at, ring_->slot(slot) + emptied, n);
        emptied += n;
      }
    }
    batch.flush();
    ring_->taken.store(slot + 1, std::memory_order_release);
    ring_->done.store(1, std::memory_order_release);
  }

  void floor_mapped(Rows& rows) {
    Rows from(source_.data(), shape_.source_order(), shape_.page_bytes(), shape_.row);
    Batch batch(data::CopyKind::kDirect, shape_.row);
    while (ring_->go.load(std::memory_order_acquire) == went_) {
    }
    ++went_;
    for (std::uint64_t done = 0; done < shape_.bytes(); done += shape_.row)
      batch.add(rows.next(), from.next(), shape_.row);
    batch.flush();
    ring_->done.store(1, std::memory_order_release);
  }

  const Shape shape_;
  Settings settings_;
  std::uint64_t bytes_ = 0, went_ = 0;
  std::uint8_t* memory_ = nullptr;  // until the process ends
  data::Mapping source_, ring_memory_;
  FloorRing* ring_ = nullptr;
  std::unique_ptr<data::StreamPlane> plane_;
  int listener_ = -1, raw_ = -1;
  std::uint16_t port_ = 0;
};

bool read_line(std::string& line) {
  line.clear();
  char c = 0;
  while (read(0, &c, 1) == 1) {
    if (c == '\n') return true;
    line += c;
  }
  return false;
}

void say(const Json& json) {
  const std::string text = json.dump() + "\n";
  (void)!write(1, text.data(), text.size());
}

}  // namespace

int run_bench_target() {
  std::string line;
  if (!read_line(line)) return 1;
  const Json config = Json::parse(line);
  if (config.contains("rooms")) return run_rooms_target(config);
  PlaneTarget target(config);
  say(target.hello());
  while (read_line(line)) {
    const Json question = Json::parse(line);
    if (question.contains("verify")) {
      say(target.verify(question["verify"]));
      continue;
    }
    if (question.contains("cpu")) {
      say({{"cpu", process_cpu_seconds()}});
      continue;
    }
    say({{"ready", true}});
    if (question.contains("raw")) {
      target.raw();
    } else {
      target.floor();
    }
  }
  return 0;
}

}  // namespace kvferry::cli
