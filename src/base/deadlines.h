// Keys with a time at which something is due. Ordered by time, then key, so that runs repeat
// exactly.
#pragma once

#include <map>
#include <optional>
#include <set>

#include "kvferry/types.h"

namespace kvferry {

template <class Key>
class Deadlines {
 public:
  // One deadline a key; a later call replaces it.
  void set(const Key& key, Time at) {
    clear(key);
    at_[key] = at;
    queue_.emplace(at, key);
  }
  void clear(const Key& key) {
    const auto it = at_.find(key);
    if (it == at_.end()) return;
    queue_.erase({it->second, key});
    at_.erase(it);
  }
  [[nodiscard]] Time next() const { return queue_.empty() ? Time::max() : queue_.begin()->first; }
  // Takes out one key that is due, or nothing.
  std::optional<Key> pop_due(Time now) {
    if (queue_.empty() || queue_.begin()->first > now) return std::nullopt;
    const Key key = queue_.begin()->second;
    clear(key);
    return key;
  }
  [[nodiscard]] bool contains(const Key& key) const { return at_.contains(key); }
  [[nodiscard]] std::size_t size() const { return at_.size(); }

 private:
  std::map<Key, Time> at_;
  std::set<std::pair<Time, Key>> queue_;
};

}  // namespace kvferry
