#include "src/data/stream/stream_plane.h"

#include "src/data/stream/engine.h"

namespace kvferry::data {

Result<std::unique_ptr<StreamPlane>> StreamPlane::create(std::unique_ptr<Links> links, Token life,
                                                         PlaneAddress address,
                                                         std::string session_name,
                                                         const Settings& settings) {
  auto engine = std::make_unique<stream::Engine>(std::move(links), settings, life);
  KVF_RETURN_IF_ERROR(engine->start());
  return std::unique_ptr<StreamPlane>(
      new StreamPlane(std::move(engine), std::move(address), std::move(session_name)));
}

StreamPlane::StreamPlane(std::unique_ptr<stream::Engine> engine, PlaneAddress address,
                         std::string session_name)
    : engine_(std::move(engine)),
      address_(std::move(address)),
      session_name_(std::move(session_name)) {}
StreamPlane::~StreamPlane() = default;

Result<RegionId> StreamPlane::register_memory(std::span<const Region> regions) {
  for (const Region& region : regions) {
    if (region.memory.kind != Memory::Kind::kHost)
      return Status(Code::kInvalidArgument, address_ + ": reaches host memory only");
  }
  for (const Region& region : regions) engine_->offer(region);
  return RegionId{next_region_++};
}
Status StreamPlane::deregister_memory(RegionId) {
  return {};
}

Status StreamPlane::grant(GrantSpec spec) {
  if (!spec.foreign && spec.token.is_zero())
    return Status(Code::kInvalidArgument, "a grant for native writers needs a token");
  engine_->grant(std::move(spec));
  return {};
}
void StreamPlane::revoke(GrantId grant, FenceId fence) {
  engine_->revoke(grant, fence);
}
void StreamPlane::write(WriteSpec spec) {
  engine_->write(std::move(spec));
}
void StreamPlane::cancel(WriteId write) {
  engine_->cancel(write);
}
void StreamPlane::forget(const PlaneAddress& peer, FenceId fence) {
  engine_->forget(peer, fence);
}
std::size_t StreamPlane::poll(std::vector<Completion>& out) {
  return engine_->poll(out);
}
int StreamPlane::ready_fd() const {
  return engine_->ready_fd();
}
PlaneCounters StreamPlane::counters() const {
  return engine_->counters();
}

}  // namespace kvferry::data
