#include "src/data/loopback/loopback_plane.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>

#include <fmt/format.h>

#include "src/base/check.h"

namespace kvferry::data {

LoopbackPlane::LoopbackPlane(LoopbackFabric& fabric, const Settings& settings)
    : fabric_(fabric), settings_(settings), event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  KVF_CHECK(event_ >= 0, "eventfd");
  const std::lock_guard lock(fabric_.mutex_);
  address_ = fmt::format("loopback:{}", fabric_.next_life_++);
  fabric_.planes_[address_] = this;
}

LoopbackPlane::~LoopbackPlane() {
  const std::lock_guard lock(fabric_.mutex_);
  fabric_.planes_.erase(address_);
  close(event_);
}

void LoopbackPlane::signal() const {
  const std::uint64_t one = 1;
  (void)!::write(event_, &one, sizeof one);
}

Result<RegionId> LoopbackPlane::register_memory(std::span<const Region> regions) {
  for (const Region& region : regions) {
    if (region.memory.kind != Memory::Kind::kHost)
      return Status(Code::kInvalidArgument, "the loopback plane reaches host memory only");
  }
  const RegionId id{next_region_++};
  regions_.insert(id);
  return id;
}

Status LoopbackPlane::deregister_memory(RegionId region) {
  return regions_.erase(region) > 0 ? Status() : Status(Code::kNotFound, "no such region");
}

Status LoopbackPlane::grant(GrantSpec spec) {
  const std::lock_guard lock(fabric_.mutex_);
  return grants_.add(std::move(spec));
}

void LoopbackPlane::revoke(GrantId grant, FenceId fence) {
  {
    // Slices are copied under this lock: when it is ours, none is under way, and none is begun
    // without the grant.
    const std::lock_guard lock(fabric_.mutex_);
    grants_.remove(grant);
  }
  if (fence == FenceId{0}) return;
  completions_.push_back(
      {Completion::Kind::kFence, static_cast<std::uint64_t>(fence), {}, true, 0});
  signal();
}

void LoopbackPlane::write(WriteSpec spec) {
  const WriteId id = spec.id;
  auto& write = writes_[id] = std::make_unique<Write>(std::move(spec));
  turns_.push(write->spec.flow, write.get());
  if (!is_walkable(write->spec.plan))
    return finish(id, Status(Code::kInvalidArgument, "a lane or run of size 0"));
  signal();
}

void LoopbackPlane::cancel(WriteId id) {
  if (writes_.contains(id)) finish(id, Status(Code::kAborted, "cancelled"));
}

void LoopbackPlane::forget(const PlaneAddress& peer, FenceId fence) {
  std::vector<WriteId> ids;
  for (const auto& [id, write] : writes_) {
    if (write->spec.to == peer) ids.push_back(id);
  }
  for (const WriteId id : ids) finish(id, Status(Code::kAborted, "peer forgotten"));
  completions_.push_back(
      {Completion::Kind::kFence, static_cast<std::uint64_t>(fence), {}, true, 0});
  signal();
}

void LoopbackPlane::finish(WriteId id, Status status) {
  const auto it = writes_.find(id);
  const std::uint64_t bytes = status.ok() ? it->second->total : 0;
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
  turns_.remove(it->second->spec.flow, it->second.get());
  writes_.erase(it);
  completions_.push_back(
      {Completion::Kind::kWrite, static_cast<std::uint64_t>(id), std::move(status), true, bytes});
  signal();
}

std::optional<Status> LoopbackPlane::step(Write& write) {
  const std::lock_guard lock(fabric_.mutex_);
  const auto it = fabric_.planes_.find(write.spec.to);
  if (it == fabric_.planes_.end())
    return Status(Code::kPeerLost, fmt::format("no plane answers to {}", write.spec.to));
  KVF_RETURN_IF_ERROR(
      it->second->grants_.recheck(write.ticket, write.spec.authority, write.spec.plan));
  write.cursor.advance(
      settings_.slice_bytes, [](std::uint64_t source, std::uint64_t target, std::uint64_t bytes) {
        std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes);
      });
  if (write.cursor.left() > 0) return std::nullopt;
  return Status();
}

std::size_t LoopbackPlane::poll(std::vector<Completion>& out) {
  std::uint64_t drained = 0;
  (void)!read(event_, &drained, sizeof drained);
  if (!turns_.empty()) {
    Write& write = *turns_.front();
    if (auto status = step(write)) {
      finish(write.spec.id, std::move(*status));
    } else {
      turns_.rotate();
    }
    if (!turns_.empty()) signal();
  }
  const std::size_t count = completions_.size();
  for (Completion& completion : completions_) out.push_back(std::move(completion));
  completions_.clear();
  return count;
}

}  // namespace kvferry::data
