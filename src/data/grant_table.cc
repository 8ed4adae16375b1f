#include "src/data/grant_table.h"

#include <algorithm>

#include <fmt/format.h>

namespace kvferry::data {
namespace {

__extension__ using Wide = unsigned __int128;  // sums of what a writer says cannot wrap

}  // namespace

Status GrantTable::add(GrantSpec spec) {
  if (!spec.foreign && spec.token.is_zero())
    return Status(Code::kInvalidArgument, "a grant for native writers needs a token");
  if (grants_.contains(spec.id) || (!spec.foreign && by_token_.contains(spec.token))) {
    return Status(Code::kAlreadyExists,
                  fmt::format("grant {} exists", static_cast<std::uint64_t>(spec.id)));
  }
  Grant grant{spec.token, spec.foreign, {}};
  for (GrantGroup& group : spec.groups) {
    Group checked{std::move(group.slabs), {}};
    std::sort(group.items.begin(), group.items.end());
    for (const std::uint32_t item : group.items) {
      if (!checked.items.empty() && item <= checked.items.back().second) {
        checked.items.back().second = std::max(checked.items.back().second, item + 1);
      } else {
        checked.items.emplace_back(item, item + 1);
      }
    }
    grant.groups.push_back(std::move(checked));
  }
  if (!spec.foreign) by_token_[spec.token] = spec.id;
  grants_[spec.id] = std::move(grant);
  return {};
}

bool GrantTable::remove(GrantId id) {
  const auto it = grants_.find(id);
  if (it == grants_.end()) return false;
  if (it->second.foreign) {
    ++foreign_generation_;
  } else {
    by_token_.erase(it->second.token);
  }
  grants_.erase(it);
  return true;
}

Status GrantTable::check_group(const Grant& grant, const CopyGroup& copies) {
  const auto refused = [](std::string why) { return Status(Code::kRefused, std::move(why)); };
  // Lanes nearly always start in item 0 of slabs of one group; then the runs are checked once for
  // all of them.
  const Group* checked_group = nullptr;
  std::uint64_t checked_shift = 0, checked_parts = 0;
  for (const Lane& lane : copies.lanes) {
    const Group* found = nullptr;
    // The lane's items are parts of the pool's: its item i is in the pool's item
    // (i + shift) / parts.
    std::uint64_t shift = 0, parts = 1;
    for (const Group& group : grant.groups) {
      const auto& slabs = *group.slabs;
      auto it =
          std::upper_bound(slabs.begin(), slabs.end(), lane.target,
                           [](std::uint64_t at, const GrantSlab& slab) { return at < slab.base; });
      if (it == slabs.begin()) continue;
      const GrantSlab& slab = *std::prev(it);
      const std::uint64_t offset = lane.target - slab.base;
      if (offset / slab.item_stride >= slab.item_count) continue;
      if (lane.target_item == 0 || slab.item_stride % lane.target_item != 0) {
        return refused(
            fmt::format("item stride {} of a pool with {}", lane.target_item, slab.item_stride));
      }
      parts = slab.item_stride / lane.target_item;
      shift = offset / lane.target_item;
      // Where it ends in the last part of an item.
      const Wide inside = Wide{parts - 1} * lane.target_item + offset % lane.target_item;
      const Wide extent = Wide{lane.rows == 0 ? 0 : lane.rows - 1} * lane.target_row + lane.bytes;
      if (inside + extent > slab.item_bytes) {
        return refused(fmt::format("{} bytes at {} of an item of {} bytes",
                                   static_cast<std::uint64_t>(extent),
                                   static_cast<std::uint64_t>(inside), slab.item_bytes));
      }
      found = &group;
      break;
    }
    if (found == nullptr)
      return refused(fmt::format("address {:#x} is in no lent pool", lane.target));
    if (found == checked_group && shift == checked_shift && parts == checked_parts) continue;
    for (const Run& run : copies.runs) {
      const std::uint64_t first = (run.target_first + shift) / parts,
                          end = (run.target_first + shift + run.count + parts - 1) / parts;
      auto it =
          std::upper_bound(found->items.begin(), found->items.end(), first,
                           [](std::uint64_t at, const auto& range) { return at < range.first; });
      if (run.count == 0 || it == found->items.begin() || std::prev(it)->second < end) {
        return refused(fmt::format("items {}..{} are not lent", first, end));
      }
    }
    checked_group = found;
    checked_shift = shift;
    checked_parts = parts;
  }
  return {};
}

Result<GrantId> GrantTable::find(const Authority& authority, const CopyPlan& plan) const {
  if (!authority.foreign) {
    const auto it = by_token_.find(authority.token);
    if (it == by_token_.end())
      return Status(Code::kRefused, "no such grant: it was taken back, or never given");
    for (const CopyGroup& group : plan)
      KVF_RETURN_IF_ERROR(check_group(grants_.at(it->second), group));
    return it->second;
  }
  // The writer names no grant: each group must lie within some grant that is lent to foreign
  // writers.
  Status last(Code::kRefused, "nothing is lent to foreign writers");
  GrantId covering{};
  for (const CopyGroup& group : plan) {
    bool found = false;
    for (const auto& [id, grant] : grants_) {
      if (!grant.foreign) continue;
      last = check_group(grant, group);
      if (last.ok()) {
        covering = id;
        found = true;
        break;
      }
    }
    if (!found) return last;
  }
  return covering;
}

Status GrantTable::recheck(Ticket& ticket, const Authority& authority, const CopyPlan& plan) const {
  if (ticket.valid && (authority.foreign ? ticket.generation == foreign_generation_
                                         : grants_.contains(ticket.grant)))
    return {};
  const bool had_one = ticket.valid;
  const auto grant = find(authority, plan);
  ticket = {grant.ok(), grant.ok() ? *grant : GrantId{}, foreign_generation_};
  if (!grant.ok() && had_one) return Status(grant.status().code(), "the grant was taken back");
  return grant.status();
}

}  // namespace kvferry::data
