#include "src/proto/lease.h"

#include <algorithm>

#include "src/base/mark.h"

namespace kvferry::proto {

Result<LeaseId> LeaseBook::lend(UseId owner, Token token, bool foreign,
                                std::vector<GrantGroup> groups) {
  const LeaseId id{next_++};
  // A grant has the number of its lease.
  KVF_RETURN_IF_ERROR(
      plane_.grant({GrantId{static_cast<std::uint64_t>(id)}, token, foreign, std::move(groups)}));
  leases_[id] = Lease{.owner = owner, .foreign = foreign};
  return id;
}

void LeaseBook::revoke(LeaseId id) {
  const FenceId fence{next_++};
  fences_[fence] = id;
  plane_.revoke(GrantId{static_cast<std::uint64_t>(id)}, fence);
}

void LeaseBook::come_home(Lease& lease) {
  if (lease.home) return;
  lease.home = true;
  returned_.push_back(lease.owner);
}

void LeaseBook::said_quiet(LeaseId id) {
  const auto it = leases_.find(id);
  if (it == leases_.end() || it->second.home) return;
  // Only to clear the plane's table: the source is quiet, so nobody waits for a fence.
  if (!it->second.returning) plane_.revoke(GrantId{static_cast<std::uint64_t>(id)}, FenceId{0});
  it->second.returning = true;
  it->second.home = true;
}

void LeaseBook::take_back(LeaseId id, Time now, Time last_permission) {
  const auto it = leases_.find(id);
  if (it == leases_.end() || it->second.home || it->second.returning) return;
  Lease& lease = it->second;
  lease.returning = true;
  if (lease.foreign) {
    // Its late writes carry only addresses: they would pass the check of the pages' next owner.
    lease.rests_until = now + settings_.hold_time;
  } else if (const Duration bound = plane_.orphan_write_bound(); bound > Duration::zero()) {
    lease.rests_until = std::max(now, last_permission) + bound;
  }
  revoke(id);
}

bool LeaseBook::on_fence(FenceId fence, Time now) {
  const auto it = fences_.find(fence);
  if (it == fences_.end()) return false;
  const LeaseId id = it->second;
  fences_.erase(it);
  const auto lease = leases_.find(id);
  if (lease == leases_.end()) return true;  // forgotten: it was home before its fence
  lease->second.fenced = true;
  settle(id, lease->second, now);
  return true;
}

void LeaseBook::settle(LeaseId id, Lease& lease, Time now) {
  if (lease.home || !lease.returning || !lease.fenced) return;
  if (now < lease.rests_until) {
    resting_.set(id, lease.rests_until);
    return;
  }
  if (lease.foreign) {
    KVF_REACHED("pages of a foreign writer came home unproven, by time");
    ++counters_.reuse_unproven;
  }
  come_home(lease);
}

void LeaseBook::advance(Time now) {
  while (const auto id = resting_.pop_due(now)) {
    if (const auto it = leases_.find(*id); it != leases_.end()) settle(*id, it->second, now);
  }
}

bool LeaseBook::is_home(LeaseId id) const {
  const auto it = leases_.find(id);
  return it == leases_.end() || it->second.home;
}

void LeaseBook::forget(LeaseId id) {
  const auto it = leases_.find(id);
  if (it != leases_.end() && it->second.home) leases_.erase(it);
}

std::vector<UseId> LeaseBook::take_returned() {
  return std::exchange(returned_, {});
}

std::size_t LeaseBook::quarantined() const {
  std::size_t count = 0;
  for (const auto& [id, lease] : leases_) count += lease.returning && !lease.home ? 1 : 0;
  return count;
}

}  // namespace kvferry::proto
