#include "src/sim/plane.h"

#include <cstring>

#include <fmt/format.h>

#include "src/base/mark.h"
#include "src/plan/planner.h"

namespace kvferry::sim {
namespace {

constexpr std::uint64_t kPieceBytesMax = 1024;

Duration microseconds(std::uint64_t n) {
  return std::chrono::microseconds(n);
}

}  // namespace

SimPlane::SimPlane(SimFabric& fabric, std::string host)
    : fabric_(fabric), host_(std::move(host)), life_(fabric.next_life_++) {
  address_ = fmt::format("sim/{}/{}", host_, life_);
  fabric_.planes_[address_] = this;
  fabric_.by_host_[host_] = address_;
}

SimPlane::~SimPlane() {
  for (const auto& [id, flight] : flights_) leave_memory(*flight);
  fabric_.planes_.erase(address_);
  if (fabric_.by_host_[host_] == address_) fabric_.by_host_.erase(host_);
}

void SimPlane::deliver(Completion completion) {
  completions_.push_back(std::move(completion));
  on_ready();
}

void SimPlane::revoke(GrantId grant, FenceId fence) {
  grants_.remove(grant);  // pieces are checked as they land: from here on none passes
  if (fence == FenceId{0}) return;
  const PlaneAddress self = address_;
  SimFabric& fabric = fabric_;
  fabric.queue_.after(microseconds(fabric.random_.below(200)), [&fabric, self, fence] {
    const auto it = fabric.planes_.find(self);
    if (it != fabric.planes_.end())
      it->second->deliver(
          {Completion::Kind::kFence, static_cast<std::uint64_t>(fence), {}, true, 0});
  });
}

void SimPlane::write(WriteSpec spec) {
  auto flight = std::make_shared<Flight>();
  flight->from_host = host_;
  flight->from_life = life_;
  flight->to = spec.to;
  flight->spec = std::move(spec);
  flights_[flight->spec.id] = flight;
  if (!data::is_walkable(flight->spec.plan))
    return complete(flight, Status(Code::kInvalidArgument, "a lane or run of size 0"), true);
  // A peer that knows no lives names "host:port" alone.
  if (const auto it = fabric_.by_host_.find(flight->to.substr(0, flight->to.find(':')));
      it != fabric_.by_host_.end())
    flight->to = it->second;
  if (!fabric_.planes_.contains(flight->to)) {
    return complete_later(
        fabric_, flight, Status(Code::kPeerLost, fmt::format("no plane answers to {}", flight->to)),
        true, microseconds(100 + fabric_.random_.below(2000)));
  }
  std::size_t count = 0;
  for (const plan::Block& block : plan::expand(flight->spec.plan)) {
    for (std::uint64_t at = 0; at < block.bytes; at += kPieceBytesMax) {
      flight->pieces[count++] = {block.source + at, block.target + at,
                                 std::min(kPieceBytesMax, block.bytes - at), std::nullopt};
    }
    flight->bytes += block.bytes;
  }
  if (count == 0) return complete_later(fabric_, flight, Status(), true, microseconds(50));
  const SimPlaneFaults& faults = fabric_.faults;
  SimFabric& fabric = fabric_;
  if (fabric.random_.chance(faults.fail_percent)) {
    KVF_REACHED("a write failed half-way");
    // The source learns that its write broke; what was on the wire goes on landing while its grant
    // lives.
    complete_later(fabric, flight, Status(Code::kPeerLost, "simulated failure"), false,
                   microseconds(100 + fabric.random_.below(3000)));
  }
  for (std::size_t i = 0; i < count; ++i) {
    // A link has a speed: later pieces of a large write come later.
    Duration delay = microseconds(50 + fabric.random_.below(2000) + i);
    if (fabric.random_.chance(faults.slow_percent))
      delay += microseconds(
          fabric.random_.below(static_cast<std::uint64_t>(faults.slow.count()) / 1000 + 1));
    fabric.queue_.after(delay, [&fabric, flight, i] { arrive(fabric, flight, i); });
  }
}

// The source is read no more after its completion: each piece either never left or is on the wire
// with its bytes of now.
void SimPlane::leave_memory(Flight& flight) {
  for (auto it = flight.pieces.begin(); it != flight.pieces.end();) {
    Piece& piece = it->second;
    if (!piece.wire && fabric_.random_.chance(50)) {
      it = flight.pieces.erase(it);
      continue;
    }
    if (!piece.wire) piece.wire.emplace(reinterpret_cast<const char*>(piece.source), piece.bytes);
    ++it;
  }
}

void SimPlane::arrive(SimFabric& fabric, const std::shared_ptr<Flight>& flight, std::size_t piece) {
  if (flight->stopped || !flight->pieces.contains(piece)) return;
  const auto target = fabric.planes_.find(flight->to);
  if (target == fabric.planes_.end()) {
    flight->stopped = true;
    return complete_later(fabric, flight, Status(Code::kPeerLost, "the target is gone"), true,
                          microseconds(100));
  }
  target->second->land(flight, piece);
}

// `this` is the target.
void SimPlane::land(const std::shared_ptr<Flight>& flight, std::size_t number) {
  SimFabric& fabric = fabric_;
  Piece& piece = flight->pieces.at(number);
  const Time thaw = std::max(fabric.frozen_until(host_), fabric.frozen_until(flight->from_host));
  if (thaw > fabric.queue_.now() || !fabric.linked(flight->from_host, host_)) {
    KVF_REACHED("a piece was held up on the wire");
    if (!piece.wire) piece.wire.emplace(reinterpret_cast<const char*>(piece.source), piece.bytes);
    const Time again = std::max(thaw, fabric.queue_.now() + microseconds(500)) +
                       microseconds(fabric.random_.below(2000));
    fabric.queue_.at(again, [&fabric, flight, number] { arrive(fabric, flight, number); });
    return;
  }
  if (Status lent = grants_.recheck(flight->ticket, flight->spec.authority, flight->spec.plan);
      !lent.ok()) {
    KVF_REACHED("a piece was refused because its grant was gone");
    flight->stopped = true;  // a refusal ends the write on the target
    return complete_later(fabric, flight, std::move(lent), true,
                          microseconds(50 + fabric.random_.below(1000)));
  }
  std::memcpy(reinterpret_cast<void*>(piece.target),
              piece.wire ? piece.wire->data() : reinterpret_cast<const char*>(piece.source),
              piece.bytes);
  if (fabric.on_land)
    fabric.on_land(flight->from_host, flight->from_life, flight->spec.flow, host_, piece.target,
                   piece.bytes);
  flight->pieces.erase(number);
  if (flight->pieces.empty())
    complete_later(fabric, flight, Status(), true, microseconds(20 + fabric.random_.below(500)));
}

void SimPlane::complete_later(SimFabric& fabric, const std::shared_ptr<Flight>& flight,
                              Status status, bool settled, Duration delay) {
  const PlaneAddress from = fmt::format("sim/{}/{}", flight->from_host, flight->from_life);
  fabric.queue_.after(delay, [&fabric, flight, status, settled, from] {
    const auto it = fabric.planes_.find(from);
    if (it != fabric.planes_.end()) it->second->complete(flight, status, settled);
  });
}

void SimPlane::complete(const std::shared_ptr<Flight>& flight, Status status, bool settled) {
  if (flight->completed) return;
  flight->completed = true;
  if (settled) {
    flight->stopped = true;
  } else {
    leave_memory(*flight);
  }
  flights_.erase(flight->spec.id);
  const std::uint64_t bytes = status.ok() ? flight->bytes : 0;
  deliver({Completion::Kind::kWrite, static_cast<std::uint64_t>(flight->spec.id), std::move(status),
           settled, bytes});
}

void SimPlane::cancel(WriteId write) {
  const auto it = flights_.find(write);
  if (it == flights_.end()) return;
  const bool settled = !fabric_.random_.chance(fabric_.faults.unsettled_percent);
  complete_later(fabric_, it->second, Status(Code::kAborted, "cancelled"), settled,
                 microseconds(fabric_.random_.below(20000)));
}

void SimPlane::forget(const PlaneAddress& peer, FenceId fence) {
  std::vector<std::shared_ptr<Flight>> concerned;
  for (const auto& [id, flight] : flights_) {
    if (flight->spec.to == peer) concerned.push_back(flight);
  }
  for (const auto& flight : concerned)
    complete(flight, Status(Code::kAborted, "peer forgotten"), true);
  deliver({Completion::Kind::kFence, static_cast<std::uint64_t>(fence), {}, true, 0});
}

std::size_t SimPlane::poll(std::vector<Completion>& out) {
  const std::size_t count = completions_.size();
  for (Completion& completion : completions_) out.push_back(std::move(completion));
  completions_.clear();
  return count;
}

}  // namespace kvferry::sim
