// What a process has lent, and the check of every copy against it. Used by every plane on its target side.
//
// Not thread-safe: a plane calls it from the one thread that lands bytes, or under its own lock.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "kvferry/data_plane.h"

namespace kvferry::data {

class GrantTable {
 public:
  Status add(GrantSpec spec);
  // False: it was not there.
  bool remove(GrantId grant);

  // Checks every lane times every run of `plan`: inside an item of a lent slab, of lent items only. kRefused says which. The
  // answer holds while generation() stays the same for a foreign authority, while is_live(grant) for a token.
  Result<GrantId> check(const Authority& authority, const CopyPlan& plan) const;
  [[nodiscard]] bool is_live(GrantId grant) const { return grants_.contains(grant); }
  // Counts removals of foreign grants.
  [[nodiscard]] std::uint64_t foreign_generation() const { return foreign_generation_; }
  [[nodiscard]] std::size_t size() const { return grants_.size(); }

 private:
  struct Group {
    GrantSlabs slabs;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> items;  // [begin, end), sorted, apart
  };
  struct Grant {
    Token token;
    bool foreign = false;
    std::vector<Group> groups;
  };
  static Status check_group(const Grant& grant, const CopyGroup& copies);
  std::map<GrantId, Grant> grants_;
  std::map<Token, GrantId> by_token_;
  std::uint64_t foreign_generation_ = 0;
};

}  // namespace kvferry::data
