// Turns: one slice for each flow (room) in a circle, and within a flow the writes in their order. A
// large room does not hold up a small one on the same stream.
#pragma once

#include <cstdint>
#include <deque>
#include <map>

namespace kvferry::data {

template <class T>
class FlowQueue {
 public:
  void push(std::uint64_t flow, T* item) {
    auto& list = flows_[flow];
    if (list.empty()) order_.push_back(flow);
    list.push_back(item);
  }
  [[nodiscard]] bool empty() const { return order_.empty(); }
  // The item whose turn it is. Not empty.
  [[nodiscard]] T* front() const { return flows_.at(order_.front()).front(); }
  // The next flow has its turn.
  void rotate() {
    order_.push_back(order_.front());
    order_.pop_front();
  }
  // False: not there.
  bool remove(std::uint64_t flow, T* item) {
    const auto it = flows_.find(flow);
    if (it == flows_.end()) return false;
    for (auto i = it->second.begin(); i != it->second.end(); ++i) {
      if (*i != item) continue;
      it->second.erase(i);
      if (it->second.empty()) {
        flows_.erase(it);
        std::erase(order_, flow);
      }
      return true;
    }
    return false;
  }

 private:
  std::map<std::uint64_t, std::deque<T*>> flows_;  // none is empty
  std::deque<std::uint64_t> order_;
};

}  // namespace kvferry::data
