// How long a thread that expects something at once looks for it before it sleeps. Waking a sleeping
// thread costs more than a short transfer; looking in vain costs a core that others may need.
//
// Adaptive: gives way to others at every look, stops for a while when somebody took the offer (the
// machine is oversubscribed), and looks for a shorter time when it was in vain. One thread's own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include <sched.h>

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
    if (begin < not_before_) return false;
    for (auto at = begin; at - begin < limit_;) {
      if (found()) {
        limit_ = longest_;
        return true;
      }
      sched_yield();
      const auto after = Clock::now();
      if (after - at > kTaken) {  // somebody else ran here meanwhile
        not_before_ = after + kPause;
        return found();
      }
      at = after;
    }
    limit_ = std::max(limit_ / 2, longest_ / 16);
    return false;
  }

 private:
  static constexpr auto kTaken = std::chrono::microseconds(20);
  static constexpr auto kPause = std::chrono::milliseconds(2);
  const std::chrono::nanoseconds longest_;
  std::chrono::nanoseconds limit_;
  Clock::time_point not_before_{};
};

}  // namespace kvferry
