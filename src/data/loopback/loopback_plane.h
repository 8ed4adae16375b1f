// Data plane inside one process: memcpy, in slices, under a lock that the planes of one fabric
// share. For tests, examples and engines that run both sides in one process. Revoke is a fence;
// orphan_write_bound is 0.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "kvferry/config.h"
#include "kvferry/data_plane.h"
#include "src/data/flow_queue.h"
#include "src/data/grant_table.h"
#include "src/data/plan_cursor.h"

namespace kvferry::data {

class LoopbackPlane;

// The planes that can reach each other. Outlives them.
class LoopbackFabric {
 public:
  LoopbackFabric() = default;
  LoopbackFabric(const LoopbackFabric&) = delete;
  LoopbackFabric& operator=(const LoopbackFabric&) = delete;

 private:
  friend class LoopbackPlane;
  std::mutex mutex_;
  std::map<PlaneAddress, LoopbackPlane*> planes_;
  std::uint64_t next_life_ = 1;
};

class LoopbackPlane final : public DataPlane {
 public:
  LoopbackPlane(LoopbackFabric& fabric, const Settings& settings);
  ~LoopbackPlane() override;
  LoopbackPlane(const LoopbackPlane&) = delete;
  LoopbackPlane& operator=(const LoopbackPlane&) = delete;

  [[nodiscard]] PlaneAddress address() const override { return address_; }
  Result<RegionId> register_memory(std::span<const Region> regions) override;
  Status deregister_memory(RegionId region) override;
  Status grant(GrantSpec spec) override;
  void revoke(GrantId grant, FenceId fence) override;
  void write(WriteSpec spec) override;
  void cancel(WriteId write) override;
  void forget(const PlaneAddress& peer, FenceId fence) override;
  // Moves one slice of the write whose turn it is, and says what has ended.
  std::size_t poll(std::vector<Completion>& out) override;
  [[nodiscard]] int ready_fd() const override { return event_; }
  [[nodiscard]] Duration orphan_write_bound() const override { return Duration::zero(); }
  [[nodiscard]] PlaneCounters counters() const override {
    return {bytes_.load(std::memory_order_relaxed), 0, 0};
  }

 private:
  struct Write {
    explicit Write(WriteSpec s) : spec(std::move(s)), cursor(spec.plan), total(cursor.left()) {}
    WriteSpec spec;
    PlanCursor cursor;
    std::uint64_t total;
    GrantTable::Ticket ticket;
  };
  void finish(WriteId id, Status status);
  void signal() const;
  // Null while the write goes on.
  std::optional<Status> step(Write& write);

  LoopbackFabric& fabric_;
  const Settings& settings_;
  PlaneAddress address_;
  int event_;
  GrantTable grants_;  // under fabric_.mutex_: writers of other planes check it
  std::map<WriteId, std::unique_ptr<Write>> writes_;
  FlowQueue<Write> turns_;
  std::vector<Completion> completions_;
  std::atomic<std::uint64_t> bytes_{0};
  std::set<RegionId> regions_;
  std::uint64_t next_region_ = 1;
};

}  // namespace kvferry::data
