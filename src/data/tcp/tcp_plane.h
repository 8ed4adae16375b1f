// Data plane over TCP. The *target* places every byte, after checking it against what is lent at
// that moment, so revoke is a fence and orphan_write_bound is 0.
//
//   source: plan cursor ─ gather one slice into a cache-sized buffer ─ send      (the source is
//   read while gathering only) target: receive into a cache-sized buffer ─ is the grant alive? ─
//   scatter by its own plan cursor
//
// One stream for each pair of planes, opened by the source and kept. One thread of its own does all
// I/O; it owns the grants and all connections, so that nothing is locked while bytes move. The
// methods only queue commands for it.
#pragma once

#include <memory>
#include <string>

#include "kvferry/config.h"
#include "kvferry/data_plane.h"
#include "src/base/random.h"

namespace kvferry::data {

struct TcpPlaneOptions {
  std::string listen_host = "127.0.0.1";
  std::uint16_t listen_port = 0;  // 0: any free one
  std::string public_host;        // what peers connect to; listen_host if empty
};

class TcpPlane final : public DataPlane {
 public:
  // kUnavailable with the address when it cannot listen there.
  static Result<std::unique_ptr<TcpPlane>> create(const TcpPlaneOptions& options,
                                                  const Settings& settings, Entropy& entropy);
  // Closes every connection, then joins the thread. Writes that have not ended never complete.
  ~TcpPlane() override;

  [[nodiscard]] PlaneAddress address() const override;
  // "host:port", by which foreign peers know this plane.
  [[nodiscard]] std::string session_name() const;
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

 private:
  class Engine;
  explicit TcpPlane(std::unique_ptr<Engine> engine);
  std::unique_ptr<Engine> engine_;
  std::uint64_t next_region_ = 1;
};

}  // namespace kvferry::data
