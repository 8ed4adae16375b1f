// One shape of the plane bench, as both of its processes know it, and the floor: the same rows in
// the same order with no protocol around them, by the kernels that kvferry would take.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/bench/common.h"
#include "src/data/copier/kernels.h"

namespace kvferry::cli {

enum class Way : std::uint8_t { kTcp, kShmRing, kShmMapped };
inline Way way_of(const std::string& name) {
  return name == "tcp" ? Way::kTcp : name == "shm_ring" ? Way::kShmRing : Way::kShmMapped;
}

struct Shape {
  Way way{};
  std::uint32_t row = 0, pages = 0;
  bool random = true;
  [[nodiscard]] std::uint64_t page_bytes() const { return std::uint64_t{row} * kRowsPerPage; }
  [[nodiscard]] std::uint64_t bytes() const { return page_bytes() * pages; }
  [[nodiscard]] std::uint64_t target_page() const { return page_bytes() * kTargetSpread; }
  [[nodiscard]] std::vector<PageIndex> source_order() const {
    return page_order(pages, 11, random);
  }
  [[nodiscard]] std::vector<PageIndex> target_order() const {
    return page_order(pages, 12, random);
  }
  [[nodiscard]] nlohmann::json to_json() const {
    return {{"way", way}, {"row", row}, {"pages", pages}, {"random", random}};
  }
  static Shape from_json(const nlohmann::json& json) {
    return {json["way"].get<Way>(), json["row"], json["pages"], json["random"]};
  }
};

// Addresses of the rows of one side, in the order in which they move.
class Rows {
 public:
  Rows(char* base, std::vector<PageIndex> order, std::uint64_t page, std::uint64_t row)
      : base_(base), order_(std::move(order)), page_(page), row_(row) {}
  char* next() {
    char* const at =
        base_ + static_cast<std::uint64_t>(order_[page_number_]) * page_ + in_page_ * row_;
    if (++in_page_ == kRowsPerPage) {
      in_page_ = 0;
      ++page_number_;
    }
    return at;
  }

 private:
  char* base_;
  std::vector<PageIndex> order_;
  std::uint64_t page_, row_;
  std::size_t page_number_ = 0, in_page_ = 0;
};

// Pieces of one kind, given to the kernel in batches.
class Batch {
 public:
  Batch(data::CopyKind kind, std::uint32_t row) : kernel_(data::measured_kernels().at(kind, row)) {}
  void add(char* to, const char* from, std::size_t bytes) {
    pieces_[count_++] = {to, from, bytes};
    if (count_ == pieces_.size()) flush();
  }
  void flush() {
    kernel_.copy({pieces_.data(), count_});
    count_ = 0;
    data::landing_fence();
  }

 private:
  const data::Kernel& kernel_;
  std::array<data::Piece, 256> pieces_;
  std::size_t count_ = 0;
};

// The shared ring of the floor: what one side has put in and the other taken out, each on a line of
// its own.
struct FloorRing {
  static constexpr std::uint64_t kSlot = 128 << 10, kSlots = 8, kHead = 4096;
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> taken;
  alignas(64) std::atomic<std::uint64_t> go;
  alignas(64) std::atomic<std::uint64_t> done;
  [[nodiscard]] char* slot(std::uint64_t number) {
    return reinterpret_cast<char*>(this) + kHead + number % kSlots * kSlot;
  }
  static constexpr std::uint64_t kBytes = kHead + kSlots * kSlot;
};
static_assert(sizeof(FloorRing) <= FloorRing::kHead);

// Memory that begins a line, as the kernels like it.
class LineBuffer {
 public:
  explicit LineBuffer(std::size_t bytes) : memory_(bytes + data::kLine) {}
  [[nodiscard]] char* data() {
    return memory_.data() + -reinterpret_cast<std::uintptr_t>(memory_.data()) % data::kLine;
  }
  [[nodiscard]] std::size_t size() const { return memory_.size() - data::kLine; }

 private:
  std::vector<char> memory_;
};

// Bounded buffers: on one host a flight that fits the caches is faster (docs/PERFORMANCE.md).
inline void tune_floor_socket(int fd) {
  const int one = 1, bytes = 500000;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}
// Without sleeping: waking up costs more than a look, and here nobody else needs the core. Asks
// poll() first: a receive in vain holds up the kernel, which delivers to the same socket.
inline void until(int fd, short events) {
  pollfd watched{fd, events, 0};
  while (::poll(&watched, 1, 0) == 0) {
  }
}
inline ssize_t receive_some(int fd, void* to, std::size_t bytes) {
  for (;;) {
    const ssize_t n = recv(fd, to, bytes, MSG_DONTWAIT);
    if (n >= 0 || (errno != EAGAIN && errno != EINTR)) return n;
    until(fd, POLLIN);
  }
}
inline ssize_t send_some(int fd, const void* from, std::size_t bytes) {
  for (;;) {
    const ssize_t n = send(fd, from, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0 || (errno != EAGAIN && errno != EINTR)) return n;
    until(fd, POLLOUT);
  }
}

// Rows in a slot, or in a buffer that is sent at once. Rows above it are cut.
inline std::uint64_t piece_bytes(std::uint32_t row) {
  return row < FloorRing::kSlot ? row : FloorRing::kSlot;
}

}  // namespace kvferry::cli
