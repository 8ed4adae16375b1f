// The ports of one manager, recorded. Nothing happens by itself: the test answers and completes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "src/base/random.h"
#include "src/proto/ports.h"

namespace kvferry::vectors {

struct FakeWorld final : proto::ControlPort,
                         proto::HttpPort,
                         proto::MemoryPort,
                         proto::RoomListener,
                         proto::TracePort,
                         DataPlane {
  struct Sent {
    Address to;
    wire::Frames frames;
  };
  struct Call {
    proto::CallId id{};
    proto::HttpRequest request;
  };
  std::vector<Sent> sent;
  std::vector<Call> calls;
  std::vector<WriteSpec> writes;
  std::vector<WriteId> cancelled;
  std::vector<FenceId> fences;
  std::map<proto::UseId, proto::RoomView> views;
  std::map<std::uint64_t, std::string> stored;
  Random random{1};

  proto::Ports ports() { return {*this, *this, *this, *this, *this, *this, random}; }

  void send(const Address& to, wire::Frames frames) override {
    sent.push_back({to, std::move(frames)});
  }
  void call(proto::CallId id, proto::HttpRequest request) override {
    calls.push_back({id, std::move(request)});
  }
  std::string load(std::uint64_t, std::size_t bytes) override { return std::string(bytes, 'a'); }
  void store(std::uint64_t address, const std::string& bytes) override { stored[address] = bytes; }
  void on_room(proto::UseId use, const proto::RoomView& view) override { views[use] = view; }
  void trace(proto::Severity, const std::string&) override {}

  [[nodiscard]] PlaneAddress address() const override { return "fake"; }
  Result<RegionId> register_memory(std::span<const Region>) override { return RegionId{1}; }
  Status deregister_memory(RegionId) override { return {}; }
  Status grant(GrantSpec) override { return {}; }
  void revoke(GrantId, FenceId fence) override { fences.push_back(fence); }
  void write(WriteSpec spec) override { writes.push_back(std::move(spec)); }
  void cancel(WriteId write) override { cancelled.push_back(write); }
  void forget(const PlaneAddress&, FenceId fence) override { fences.push_back(fence); }
  std::size_t poll(std::vector<Completion>&) override { return 0; }
  [[nodiscard]] int ready_fd() const override { return -1; }
  [[nodiscard]] Duration orphan_write_bound() const override { return Duration::zero(); }
  [[nodiscard]] PlaneCounters counters() const override { return {}; }
};

}  // namespace kvferry::vectors
