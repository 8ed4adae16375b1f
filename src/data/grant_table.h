// What a process has lent, and the check of every copy against it. Used by every plane on its
// target side.
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

  // Checks every lane times every run of `plan`: inside an item of a lent slab, of lent items only.
  // kRefused says which.
  [[nodiscard]] Status check(const Authority& authority, const CopyPlan& plan) const {
    return find(authority, plan).status();
  }

  // The answer of an earlier check of the same plan, so that the next one is cheap.
  struct Ticket {
    bool valid = false;
    GrantId grant{};
    std::uint64_t generation = 0;
  };
  // Like check(), but looks again only where something was taken back since. To be asked before
  // every slice lands.
  Status recheck(Ticket& ticket, const Authority& authority, const CopyPlan& plan) const;

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
  Result<GrantId> find(const Authority& authority, const CopyPlan& plan) const;
  static Status check_group(const Grant& grant, const CopyGroup& copies);
  std::map<GrantId, Grant> grants_;
  std::map<Token, GrantId> by_token_;
  std::uint64_t foreign_generation_ = 0;  // removals of foreign grants
};

}  // namespace kvferry::data
