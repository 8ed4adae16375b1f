// Short turns on the processor, for threads that do a little at once and are waited for: when they
// wake up on a busy machine they run before threads with longer turns, instead of after those.
// Their share of the processor stays the same. Kernels before 6.12 know no such wish and do as
// before.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvferry {

// While it lives, this thread and those that it starts have turns of that length.
class ShortTurns {
 public:
  explicit ShortTurns(std::chrono::nanoseconds turn);
  ~ShortTurns();
  ShortTurns(const ShortTurns&) = delete;
  ShortTurns& operator=(const ShortTurns&) = delete;

 private:
  const std::uint64_t before_;
};

// Loops, and what brings their messages, come before threads that copy.
inline constexpr std::chrono::microseconds kLoopTurn{100}, kCopyTurn{400};

}  // namespace kvferry
