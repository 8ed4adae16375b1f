// A data plane over the stream engine: the tcp and the shm plane. See tcp/tcp_plane.h and
// shm/shm_plane.h for how they are made.
#pragma once

#include <memory>
#include <string>

#include "kvferry/config.h"
#include "kvferry/data_plane.h"
#include "src/base/random.h"
#include "src/data/stream/links.h"

namespace kvferry::data {

namespace stream {
class Engine;
}

class StreamPlane final : public DataPlane {
 public:
  // `settings` outlive the plane. `session_name`: by which foreign peers know it, empty where they
  // cannot reach it.
  static Result<std::unique_ptr<StreamPlane>> create(std::unique_ptr<Links> links, Token life,
                                                     PlaneAddress address, std::string session_name,
                                                     const Settings& settings);
  // Closes every connection, then joins the thread. Writes that have not ended never complete.
  ~StreamPlane() override;

  [[nodiscard]] PlaneAddress address() const override { return address_; }
  [[nodiscard]] const std::string& session_name() const { return session_name_; }
  Result<RegionId> register_memory(std::span<const Region> regions) override;
  Status deregister_memory(RegionId region) override;
  Status grant(GrantSpec spec) override;
  void revoke(GrantId grant, FenceId fence) override;
  void write(WriteSpec spec) override;
  void cancel(WriteId write) override;
  void forget(const PlaneAddress& peer, FenceId fence) override;
  std::size_t poll(std::vector<Completion>& out) override;
  [[nodiscard]] int ready_fd() const override;
  [[nodiscard]] Duration orphan_write_bound() const override { return Duration::zero(); }
  [[nodiscard]] PlaneCounters counters() const override;

 private:
  StreamPlane(std::unique_ptr<stream::Engine> engine, PlaneAddress address,
              std::string session_name);
  const std::unique_ptr<stream::Engine> engine_;
  const PlaneAddress address_;
  const std::string session_name_;
  std::uint64_t next_region_ = 1;
};

}  // namespace kvferry::data
