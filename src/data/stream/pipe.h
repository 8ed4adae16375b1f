// Two byte streams in memory that two processes share, one each way: what a Unix socket would
// carry, without a system call while both ends are awake (docs/DATA_PLANES.md, "Pipe").
//
// Nothing that the other end can change is believed: each end counts what it has put and taken for
// itself, bounds what the other end says of it, and copies bytes out before it looks at them. A
// false partner spoils its own bytes and is found out as soon as its counts are impossible.
//
// One thread of each process. The resource is the mapping; moving a Pipe keeps it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "src/data/stream/memory_file.h"

namespace kvferry::data::stream {

class Pipe {
 public:
  enum class End : std::uint8_t { kSource, kTarget };
  // A memory file for ways of so many bytes each; zero bytes in it are a pipe at its beginning.
  static std::uint64_t file_bytes(std::uint64_t way_bytes);

  Pipe() = default;
  // `memory`: of file_bytes(way_bytes), writable.
  Pipe(Mapping memory, std::uint64_t way_bytes, End end);
  explicit operator bool() const { return static_cast<bool>(memory_); }

  // Takes what fits off the front of `bytes`. False: the other end's counts are impossible.
  bool put(std::string_view& bytes);
  // Copies at most `most` bytes out, `n` of them. False: the other end's counts are impossible.
  bool take(char* to, std::size_t most, std::size_t& n);
  // Whether take() or put() would do something, or find out a lie.
  [[nodiscard]] bool has_bytes() const;
  [[nodiscard]] bool has_room() const;

  // To be called before sleeping: from here on the other end rings for each byte, and for each that
  // it takes if `for_room`. Then look again, and sleep only if there is still nothing.
  void fall_asleep(bool for_room);
  void wake_up();
  // The processor that this end runs on, or ran on when it fell asleep. The other end's is what it
  // says: worth a guess about speed, nothing else. -1: not said.
  void say_processor(int processor);
  [[nodiscard]] int other_processor() const;
  // After put() and take(): whether the other end sleeps and waits for that. Says so once for each
  // sleep.
  bool must_ring_for_bytes() { return must_ring(kForBytes); }
  bool must_ring_for_room() { return must_ring(kForRoom); }

 private:
  struct Way;
  struct Shared;
  static constexpr std::uint32_t kForBytes = 1, kForRoom = 2;
  bool must_ring(std::uint32_t least);
  [[nodiscard]] Shared& shared() const;
  [[nodiscard]] char* bytes_of(int way) const;
  [[nodiscard]] int out_way() const { return end_ == End::kSource ? 0 : 1; }

  Mapping memory_;
  std::uint64_t way_bytes_ = 0;
  End end_ = End::kSource;
  std::uint64_t put_ = 0, taken_ = 0;  // by this end
  bool asleep_ = false;                // what this end said last
  int processor_ = -1;                 // the same
};

}  // namespace kvferry::data::stream
