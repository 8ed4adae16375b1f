// How long a thread that expects something at once looks for it before it sleeps. Waking a sleeping
// thread costs more than a short transfer; looking in vain costs a core that others may need.
//
// Adaptive: looks for a shorter time when it was in vain, and not at all for a while after the
// kernel has taken the core away, which says that the machine is oversubscribed: a thread that
// sleeps is woken at once there, one that gave its turn away is not. One thread's own.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <chrono>

namespace kvferry {

class Spinner {
 public:
  using Clock = std::chrono::steady_clock;
  // Zero: never.
  explicit Spinner(std::chrono::nanoseconds longest) : longest_(longest), limit_(longest) {}

  // Looks with `found` until it says yes (true) or it is time to sleep (false).
  template <class Found>
  bool look(Found&& found) {
    if (longest_.count() == 0) return false;
    const auto begin = Clock::now();
    const long taken = taken_away();
    if (taken != taken_) {
      taken_ = taken;
      not_before_ = begin + kPause;
    }
    if (begin < not_before_) return false;
    while (Clock::now() - begin < limit_) {
      if (found()) {
        limit_ = longest_;
        return true;
      }
    }
    limit_ = std::max(limit_ / 2, longest_ / 16);
    return false;
  }

 private:
  static constexpr auto kPause = std::chrono::milliseconds(5);
  // How often this thread had to leave its core although it wanted to go on.
  static long taken_away() {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
  }
  const std::chrono::nanoseconds longest_;
  std::chrono::nanoseconds limit_;
  Clock::time_point not_before_{};
  long taken_ = 0;
};

}  // namespace kvferry
