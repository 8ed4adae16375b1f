#include "src/data/stream/pipe.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "src/base/check.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace kvferry::data::stream {
namespace {

constexpr std::size_t kApart = 128;  // two lines: processors fetch them in pairs

// Where both ends are in one process, the thread sanitizer sees two mappings and no order.
#if defined(__SANITIZE_THREAD__)
char order_between_ends;
void release_between_ends() {
  __tsan_release(&order_between_ends);
}
void acquire_between_ends() {
  __tsan_acquire(&order_between_ends);
}
#else
void release_between_ends() {}
void acquire_between_ends() {}
#endif

}  // namespace

// Each word has one writer, but `asleep`, which the other end takes back when it rings.
struct Pipe::Way {
  alignas(kApart) std::atomic<std::uint64_t> put;    // by its writer
  alignas(kApart) std::atomic<std::uint64_t> taken;  // by its reader
};
struct Pipe::Shared {
  Way ways[2];  // source to target, target to source
  struct alignas(kApart) Sleep {
    std::atomic<std::uint32_t> asleep;
    std::atomic<std::uint32_t> processor;  // and one; 0: none
  } ends[2];
};

namespace {

constexpr std::uint64_t kHeadBytes = 4096;

// Of `n` bytes from count `at` on: how many lie before the way's end.
std::uint64_t to_end(std::uint64_t at, std::uint64_t way_bytes, std::uint64_t n) {
  return std::min(n, way_bytes - at % way_bytes);
}

}  // namespace

std::uint64_t Pipe::file_bytes(std::uint64_t way_bytes) {
  return kHeadBytes + 2 * way_bytes;
}

Pipe::Pipe(Mapping memory, std::uint64_t way_bytes, End end)
    : memory_(std::move(memory)), way_bytes_(way_bytes), end_(end) {
  static_assert(sizeof(Shared) <= kHeadBytes);
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  KVF_CHECK(way_bytes > 0 && memory_.size() >= file_bytes(way_bytes), "a pipe shorter than itself");
}

// The words are in zeroed memory that another process maps as well; they live as long as it does.
Pipe::Shared& Pipe::shared() const {
  return *std::launder(reinterpret_cast<Shared*>(memory_.data()));
}

char* Pipe::bytes_of(int way) const {
  return memory_.data() + kHeadBytes + static_cast<std::uint64_t>(way) * way_bytes_;
}

bool Pipe::put(std::string_view& bytes) {
  Way& way = shared().ways[out_way()];
  const std::uint64_t waiting = put_ - way.taken.load(std::memory_order_acquire);
  if (waiting > way_bytes_) return false;
  std::uint64_t n = std::min<std::uint64_t>(bytes.size(), way_bytes_ - waiting);
  while (n > 0) {
    const std::uint64_t piece = to_end(put_, way_bytes_, n);
    std::memcpy(bytes_of(out_way()) + put_ % way_bytes_, bytes.data(), piece);
    bytes.remove_prefix(piece);
    put_ += piece;
    n -= piece;
  }
  release_between_ends();
  way.put.store(put_, std::memory_order_release);
  return true;
}

bool Pipe::take(char* to, std::size_t most, std::size_t& n) {
  Way& way = shared().ways[1 - out_way()];
  const std::uint64_t waiting = way.put.load(std::memory_order_acquire) - taken_;
  if (waiting > way_bytes_) return false;
  acquire_between_ends();
  n = std::min<std::uint64_t>(most, waiting);
  for (std::size_t done = 0; done < n;) {
    const std::uint64_t piece = to_end(taken_, way_bytes_, n - done);
    std::memcpy(to + done, bytes_of(1 - out_way()) + taken_ % way_bytes_, piece);
    taken_ += piece;
    done += piece;
  }
  if (n > 0) way.taken.store(taken_, std::memory_order_release);
  return true;
}

bool Pipe::has_bytes() const {
  return shared().ways[1 - out_way()].put.load(std::memory_order_acquire) != taken_;
}

bool Pipe::has_room() const {
  return put_ - shared().ways[out_way()].taken.load(std::memory_order_acquire) != way_bytes_;
}

// Sequentially consistent on both sides: either this end sees the byte when it looks again, or the
// other end sees that this one sleeps.
void Pipe::fall_asleep(bool for_room) {
  asleep_ = true;
  shared().ends[static_cast<int>(end_)].asleep.store(for_room ? kForRoom : kForBytes,
                                                     std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Pipe::wake_up() {
  if (!asleep_) return;
  asleep_ = false;
  shared().ends[static_cast<int>(end_)].asleep.store(0, std::memory_order_relaxed);
}

void Pipe::say_processor(int processor) {
  if (processor == processor_) return;
  processor_ = processor;
  shared().ends[static_cast<int>(end_)].processor.store(static_cast<std::uint32_t>(processor + 1),
                                                        std::memory_order_relaxed);
}

int Pipe::other_processor() const {
  const auto& said = shared().ends[1 - static_cast<int>(end_)].processor;
  return static_cast<int>(said.load(std::memory_order_relaxed)) - 1;
}

bool Pipe::must_ring(std::uint32_t least) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  auto& asleep = shared().ends[1 - static_cast<int>(end_)].asleep;
  // Whatever was taken back is answered by a ring, even if it slept anew meanwhile.
  return asleep.load(std::memory_order_relaxed) >= least &&
         asleep.exchange(0, std::memory_order_seq_cst) != 0;
}

}  // namespace kvferry::data::stream
