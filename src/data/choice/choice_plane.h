// Two planes behind one address: shared memory where the peer is in reach on this host, else TCP.
// Chosen by the source, once for each peer. Lent memory is lent on both.
//
//   address   "<of the shm plane>|<of the tcp plane>"
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kvferry/data_plane.h"
#include "src/data/stream/memory_file.h"

namespace kvferry::data {

class ChoicePlane final : public DataPlane {
 public:
  // `near` is asked for first; `in_reach` says whether it can reach an address.
  static Result<std::unique_ptr<ChoicePlane>> create(std::unique_ptr<DataPlane> near,
                                                     std::unique_ptr<DataPlane> far,
                                                     bool (*in_reach)(const PlaneAddress&));

  [[nodiscard]] PlaneAddress address() const override;
  Result<RegionId> register_memory(std::span<const Region> regions) override;
  Status deregister_memory(RegionId region) override;
  Status grant(GrantSpec spec) override;
  void revoke(GrantId grant, FenceId fence) override;
  void write(WriteSpec spec) override;
  void cancel(WriteId write) override;
  void forget(const PlaneAddress& peer, FenceId fence) override;
  std::size_t poll(std::vector<Completion>& out) override;
  [[nodiscard]] int ready_fd() const override { return ready_.get(); }
  [[nodiscard]] Duration orphan_write_bound() const override;
  [[nodiscard]] PlaneCounters counters() const override;

 private:
  ChoicePlane(std::unique_ptr<DataPlane> near, std::unique_ptr<DataPlane> far,
              bool (*in_reach)(const PlaneAddress&), OwnedFd ready);

  const std::unique_ptr<DataPlane> near_, far_;
  bool (*const in_reach_)(const PlaneAddress&);
  const OwnedFd ready_;  // an epoll of both planes' own
  std::map<PlaneAddress, bool> is_near_;
  std::set<FenceId> half_fences_;  // one of the planes has said its word
  std::uint64_t next_region_ = 1;
};

}  // namespace kvferry::data
