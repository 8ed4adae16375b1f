// The simulated data plane: of the kind whose revoke is a fence, but otherwise as mean as the
// contract allows. Each piece of a write lands at its own moment, in any order, now and then much
// later; writes fail half-way; pieces of a dead writer go on landing as long as their grant lives.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "kvferry/data_plane.h"
#include "src/data/grant_table.h"
#include "src/data/plan_cursor.h"
#include "src/sim/queue.h"

namespace kvferry::sim {

class SimPlane;

struct SimPlaneFaults {
  std::uint64_t fail_percent = 0;       // of writes
  std::uint64_t slow_percent = 0;       // of pieces
  Duration slow{};                      // how late a slow piece may be
  std::uint64_t unsettled_percent = 0;  // of cancels
};

class SimFabric {
 public:
  SimFabric(EventQueue& queue, Random& random) : queue_(queue), random_(random) {}
  SimFabric(const SimFabric&) = delete;
  SimFabric& operator=(const SimFabric&) = delete;

  SimPlaneFaults faults;
  // Asked before each piece lands; false drops it (the link is cut).
  std::function<bool(const std::string& from, const std::string& to)> linked =
      [](const auto&, const auto&) { return true; };
  // Until when the named host does not run.
  std::function<Time(const std::string& host)> frozen_until = [](const auto&) {
    return Time::min();
  };
  // Told of every piece that lands.
  std::function<void(const std::string& from_host, std::uint64_t from_life, std::uint64_t flow,
                     const std::string& to_host, std::uint64_t address, std::uint64_t bytes)>
      on_land;

 private:
  friend class SimPlane;
  EventQueue& queue_;
  Random& random_;
  std::map<PlaneAddress, SimPlane*> planes_;
  std::map<std::string, PlaneAddress> by_host_;  // the present life of a host
  std::uint64_t next_life_ = 1;
};

class SimPlane final : public DataPlane {
 public:
  SimPlane(SimFabric& fabric, std::string host);
  ~SimPlane() override;
  SimPlane(const SimPlane&) = delete;
  SimPlane& operator=(const SimPlane&) = delete;

  // Called when poll() has something.
  std::function<void()> on_ready = [] {};
  [[nodiscard]] std::uint64_t life() const { return life_; }
  [[nodiscard]] std::size_t grants() const { return grants_.size(); }

  [[nodiscard]] PlaneAddress address() const override { return address_; }
  Result<RegionId> register_memory(std::span<const Region>) override { return RegionId{1}; }
  Status deregister_memory(RegionId) override { return {}; }
  Status grant(GrantSpec spec) override { return grants_.add(std::move(spec)); }
  void revoke(GrantId grant, FenceId fence) override;
  void write(WriteSpec spec) override;
  void cancel(WriteId write) override;
  void forget(const PlaneAddress& peer, FenceId fence) override;
  std::size_t poll(std::vector<Completion>& out) override;
  [[nodiscard]] int ready_fd() const override { return -1; }
  [[nodiscard]] Duration orphan_write_bound() const override { return Duration::zero(); }
  [[nodiscard]] PlaneCounters counters() const override { return {}; }

 private:
  struct Piece {
    std::uint64_t source = 0, target = 0, bytes = 0;
    std::optional<std::string> wire;  // its bytes, once it has left the source's memory
  };
  // One write under way. Outlives its plane: the pieces of a dead writer are on the wire.
  struct Flight {
    WriteSpec spec;
    std::string from_host;
    std::uint64_t from_life = 0;
    PlaneAddress to;
    std::map<std::size_t, Piece> pieces;  // not landed yet
    std::uint64_t bytes = 0;
    data::GrantTable::Ticket ticket;
    bool stopped = false;    // no piece lands any more
    bool completed = false;  // its completion went out
  };
  static void arrive(SimFabric& fabric, const std::shared_ptr<Flight>& flight, std::size_t piece);
  void land(const std::shared_ptr<Flight>& flight, std::size_t piece);
  void leave_memory(Flight& flight);
  void complete(const std::shared_ptr<Flight>& flight, Status status, bool settled);
  void deliver(Completion completion);
  static void complete_later(SimFabric& fabric, const std::shared_ptr<Flight>& flight,
                             Status status, bool settled, Duration delay);

  SimFabric& fabric_;
  std::string host_;
  std::uint64_t life_;
  PlaneAddress address_;
  data::GrantTable grants_;
  std::map<WriteId, std::shared_ptr<Flight>> flights_;
  std::vector<Completion> completions_;
};

}  // namespace kvferry::sim
