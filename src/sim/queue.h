// Virtual time. Events are ordered by (time, random, sequence): the order of equal times is
// explored, and replayable.
#pragma once

#include <functional>
#include <map>
#include <tuple>

#include "kvferry/types.h"
#include "src/base/random.h"

namespace kvferry::sim {

class EventQueue {
 public:
  explicit EventQueue(Random& random) : random_(random) {}

  [[nodiscard]] Time now() const { return now_; }
  void at(Time time, std::function<void()> act) {
    events_.emplace(std::tuple(std::max(time, now_), random_.next64() & 0xFF, next_++),
                    std::move(act));
  }
  void after(Duration delay, std::function<void()> act) { at(now_ + delay, std::move(act)); }
  [[nodiscard]] bool empty() const { return events_.empty(); }
  [[nodiscard]] Time next_time() const {
    return events_.empty() ? Time::max() : std::get<0>(events_.begin()->first);
  }
  // Runs one event. False: there is none.
  bool step() {
    if (events_.empty()) return false;
    auto event = events_.extract(events_.begin());
    const Time time = std::get<0>(event.key());
    in_this_instant_ = time == now_ ? in_this_instant_ + 1 : 0;
    now_ = time;
    event.mapped()();
    return true;
  }
  // Events run so far at the present time. A deadline in the past shows as an endless instant.
  [[nodiscard]] std::uint64_t in_this_instant() const { return in_this_instant_; }

 private:
  Random& random_;
  Time now_{};
  std::map<std::tuple<Time, std::uint64_t, std::uint64_t>, std::function<void()>> events_;
  std::uint64_t next_ = 0, in_this_instant_ = 0;
};

}  // namespace kvferry::sim
