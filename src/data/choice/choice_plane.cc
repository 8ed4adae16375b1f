#include "src/data/choice/choice_plane.h"

#include <sys/epoll.h>

#include <algorithm>

namespace kvferry::data {
namespace {

constexpr std::size_t kPeersRemembered = 65536;  // forgotten all at once; asking again is cheap

// Of "a|b". A peer with another kind of address is far.
std::pair<PlaneAddress, PlaneAddress> parts(const PlaneAddress& peer) {
  const auto bar = peer.find('|');
  if (bar != PlaneAddress::npos) return {peer.substr(0, bar), peer.substr(bar + 1)};
  return {peer, peer};
}

}  // namespace

Result<std::unique_ptr<ChoicePlane>> ChoicePlane::create(std::unique_ptr<DataPlane> near,
                                                         std::unique_ptr<DataPlane> far,
                                                         bool (*in_reach)(const PlaneAddress&)) {
  OwnedFd ready(epoll_create1(EPOLL_CLOEXEC));
  for (const int fd : {near->ready_fd(), far->ready_fd()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (!ready || epoll_ctl(ready.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      return Status(Code::kExhausted, "no descriptor for a choice of planes");
  }
  return std::unique_ptr<ChoicePlane>(
      new ChoicePlane(std::move(near), std::move(far), in_reach, std::move(ready)));
}

ChoicePlane::ChoicePlane(std::unique_ptr<DataPlane> near, std::unique_ptr<DataPlane> far,
                         bool (*in_reach)(const PlaneAddress&), OwnedFd ready)
    : near_(std::move(near)), far_(std::move(far)), in_reach_(in_reach), ready_(std::move(ready)) {}

PlaneAddress ChoicePlane::address() const {
  return near_->address() + "|" + far_->address();
}

Result<RegionId> ChoicePlane::register_memory(std::span<const Region> regions) {
  for (DataPlane* plane : {near_.get(), far_.get()}) {
    if (const auto region = plane->register_memory(regions); !region.ok()) return region.status();
  }
  return RegionId{next_region_++};
}
Status ChoicePlane::deregister_memory(RegionId region) {
  KVF_RETURN_IF_ERROR(near_->deregister_memory(region));
  return far_->deregister_memory(region);
}

Status ChoicePlane::grant(GrantSpec spec) {
  KVF_RETURN_IF_ERROR(near_->grant(spec));
  return far_->grant(std::move(spec));
}
void ChoicePlane::revoke(GrantId grant, FenceId fence) {
  near_->revoke(grant, fence);
  far_->revoke(grant, fence);
}

void ChoicePlane::write(WriteSpec spec) {
  const auto known = is_near_.find(spec.to);
  const auto [near, far] = parts(spec.to);
  if (known == is_near_.end() && is_near_.size() >= kPeersRemembered) is_near_.clear();
  const bool is_near =
      known != is_near_.end() ? known->second : (is_near_[spec.to] = in_reach_(near));
  spec.to = is_near ? near : far;
  (is_near ? near_ : far_)->write(std::move(spec));
}
// A plane that does not know the write has nothing to cancel.
void ChoicePlane::cancel(WriteId write) {
  near_->cancel(write);
  far_->cancel(write);
}
void ChoicePlane::forget(const PlaneAddress& peer, FenceId fence) {
  is_near_.erase(peer);
  const auto [near, far] = parts(peer);
  near_->forget(near, fence);
  far_->forget(far, fence);
}

std::size_t ChoicePlane::poll(std::vector<Completion>& out) {
  const std::size_t before = out.size();
  near_->poll(out);
  far_->poll(out);
  // A fence has passed when it has passed on both.
  const auto half = [this](const Completion& c) {
    if (c.kind != Completion::Kind::kFence) return false;
    if (half_fences_.insert(FenceId{c.id}).second) return true;
    half_fences_.erase(FenceId{c.id});
    return false;
  };
  out.erase(std::remove_if(out.begin() + static_cast<std::ptrdiff_t>(before), out.end(), half),
            out.end());
  return out.size() - before;
}

Duration ChoicePlane::orphan_write_bound() const {
  return std::max(near_->orphan_write_bound(), far_->orphan_write_bound());
}
PlaneCounters ChoicePlane::counters() const {
  const PlaneCounters a = near_->counters(), b = far_->counters();
  return {a.bytes_inline + b.bytes_inline, a.bytes_ring + b.bytes_ring,
          a.bytes_pulled + b.bytes_pulled};
}

}  // namespace kvferry::data
