#include "src/proto/prefill.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/base/mark.h"
#include "src/plan/geometry.h"
#include "src/proto/text.h"

namespace kvferry::proto {

PrefillManager::PrefillManager(PrefillSelf self, const Settings& settings, Ports ports)
    : self_(std::move(self)),
      pool_pages_(plan::page_limit(self_.layout)),
      layout_hash_(layout_hash(self_.layout)),
      kinds_(self_.state_kinds.empty() ? plan::kinds_of(self_.layout) : self_.state_kinds),
      settings_(settings),
      ports_(ports) {}

bool PrefillManager::all_cp_ranks() const {
  return self_.place.cp_size > 1 &&
         (settings_.all_cp_ranks || self_.layer_split || self_.attention.hybrid_mla);
}

bool PrefillManager::is_dummy_cp_rank() const {
  return self_.place.cp_rank != 0 && !all_cp_ranks();
}

// --- the engine's calls

PrefillManager::Use* PrefillManager::find(UseId id) {
  const auto it = uses_.find(id);
  return it == uses_.end() ? nullptr : &it->second;
}

const RoomView* PrefillManager::view(UseId use) const {
  const auto it = uses_.find(use);
  return it == uses_.end() ? nullptr : &it->second.view;
}

Result<UseId> PrefillManager::open(RoomId room, const SenderOptions& options, Time now) {
  KVF_RETURN_IF_ERROR(may_open({.room = room,
                                .side = "prefill",
                                .stopping = stopping_,
                                .is_open = live_.contains(room),
                                .open_rooms = uses_.size(),
                                .rooms_max = settings_.rooms_max}));
  const UseId id{next_id_++};
  Use& use = uses_[id];
  use.room = room;
  use.dummy = is_dummy_cp_rank();
  use.view.state = use.dummy ? RoomState::kWaitingForInput : RoomState::kBootstrapping;
  live_[room] = id;
  by_room_[room].insert(id);
  ++counters_.rooms_opened;
  if (!use.dummy) room_deadlines_.set(id, now + settings_.bootstrap_timeout);

  const std::uint32_t dp_size =
      self_.system_dp_size == 1 ? self_.place.dp_size : self_.system_dp_size;
  const std::uint32_t dp_rank =
      self_.system_dp_size == 1 ? self_.place.dp_rank : self_.system_dp_rank;
  if (dp_size > 1 && !options.carries_dp_rank && !use.dummy) {
    const bool follow = self_.load_balance_method == "follow_bootstrap_room";
    const std::uint64_t follows_to = value_of(room) % dp_size;
    if (follow && follows_to != dp_rank && !settings_.force_query_dp_rank) {
      fail(id, use,
           Status(
               Code::kRefused,
               fmt::format("{} belongs to dp rank {} (room mod dp size {}) but reached dp rank {}",
                           room_text(room), follows_to, dp_size, dp_rank)),
           false, now);
    } else if (!follow || follows_to != dp_rank) {
      ports_.http.call(CallId{next_id_++},
                       {"POST", self_.bootstrap, "/register_dp_rank",
                        wire::to_json(wire::DpRankEntry{room, dp_rank}), settings_.http_timeout});
    }
  }
  if (const auto it = pending_.find(room); it != pending_.end()) {
    Pending pending = std::move(it->second);
    pending_.erase(it);
    pending_deadlines_.clear(room);
    for (auto& [peer, word] : pending.metadata) adopt(id, use, peer, std::move(word), now);
    if (!pending.aborted.empty()) {
      KVF_REACHED("an abort came before the sender existed");
      fail(id, use,
           Status(Code::kAborted,
                  fmt::format("{} was aborted by {} before it was opened here", room_text(room),
                              describe_peer(*pending.aborted.begin()))),
           true, now);
    }
  }
  publish(id, use);
  return id;
}

Status PrefillManager::init(UseId id, std::uint64_t pages, std::uint32_t aux_row, Time now,
                            bool whole_request) {
  Use* use = find(id);
  if (use == nullptr) return Status(Code::kNotFound, "the room was cleared");
  if (pages > settings_.pages_per_room_max) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {} pages are above pages_per_room_max {}", room_text(use->room),
                              pages, settings_.pages_per_room_max));
  }
  if (use->pages_total)
    return Status(Code::kInvalidArgument, room_text(use->room) + " was initialised before");
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component == Component::kAux && aux_row >= slab.item_count) {
      return Status(Code::kInvalidArgument,
                    fmt::format("{}: aux row {} outside pool of {}", room_text(use->room), aux_row,
                                slab.item_count));
    }
  }
  use->pages_total = pages;
  use->aux_row = aux_row;
  use->whole_request = whole_request;
  dispatch(id, *use, now);
  return {};
}

Status PrefillManager::send(UseId id, std::vector<PageIndex> pages, ReadyId ready, Time now,
                            const std::vector<StateItems>& states) {
  Use* use = find(id);
  if (use == nullptr) return Status(Code::kNotFound, "the room was cleared");
  if (is_terminal(use->view.state))
    return Status(Code::kAborted, fmt::format("{} has ended: {}", room_text(use->room),
                                              to_string(use->view.state)));
  if (!use->pages_total)
    return Status(Code::kInvalidArgument, room_text(use->room) + " was not initialised");
  for (const PageIndex page : pages) {
    if (page < 0 || static_cast<std::uint32_t>(page) >= pool_pages_) {
      return Status(Code::kInvalidArgument, fmt::format("{}: page {} outside pool of {}",
                                                        room_text(use->room), page, pool_pages_));
    }
  }
  if (use->pages_queued + pages.size() > *use->pages_total) {
    Status over(
        Code::kInvalidArgument,
        fmt::format("{}: {} pages sent on top of {}, announced were {}", room_text(use->room),
                    pages.size(), use->pages_queued, *use->pages_total));
    fail(id, *use, over, false, now);
    return over;
  }
  if (use->last_queued) return {};  // an empty trailer
  const bool last = use->pages_queued + pages.size() == *use->pages_total;
  if (!last && !states.empty()) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("{}: state goes with the last chunk, this one ends at page {} of {}",
                    room_text(use->room), use->pages_queued + pages.size(), *use->pages_total));
  }
  if (pages.empty() && !last) return {};
  auto lists = plan::state_lists(self_.layout, states, settings_.pages_per_room_max);
  if (!lists.ok())
    return Status(lists.status().code(),
                  fmt::format("{}: {}", room_text(use->room), lists.status().message()));
  if (use->chunks.size() >= settings_.chunks_per_room_max) {
    return Status(Code::kExhausted, fmt::format("{}: {} chunks wait (chunks_per_room_max)",
                                                room_text(use->room), use->chunks.size()));
  }
  Chunk chunk{.begin = use->pages_queued,
              .pages = std::move(pages),
              .last = last,
              .ready = ready,
              .is_ready = ready == ReadyId{}};
  use->pages_queued += chunk.pages.size();
  use->last_queued = last;
  if (last) use->states = std::move(*lists);
  if (!chunk.is_ready) ready_[ready] = id;
  use->chunks.push_back(std::move(chunk));
  touch(id, *use, now);
  dispatch(id, *use, now);
  return {};
}

void PrefillManager::abort(UseId id, Status reason, Time now) {
  if (Use* use = find(id)) fail(id, *use, std::move(reason), false, now);
}

void PrefillManager::clear(UseId id, Time now) {
  Use* use = find(id);
  if (use == nullptr) return;
  fail(id, *use,
       Status(Code::kAborted, room_text(use->room) + " was cleared by its engine before it ended"),
       false, now);
  if (const auto it = live_.find(use->room); it != live_.end() && it->second == id) live_.erase(it);
  use->cleared = true;
  drop_if_done(id);
}

void PrefillManager::stop(Time now) {
  stopping_ = true;
  next_registration_ = Time::max();
  std::vector<UseId> ids;
  for (const auto& [id, use] : uses_) ids.push_back(id);
  for (const UseId id : ids) {
    if (Use* use = find(id))
      fail(id, *use,
           Status(Code::kAborted, room_text(use->room) + ": the prefill endpoint stopped"), false,
           now);
  }
  std::vector<Token> sessions;
  for (const auto& [token, session] : sessions_) sessions.push_back(token);
  if (is_quiet()) {
    for (const Token token : sessions)
      end_session(token, Status(Code::kAborted, "the prefill endpoint stopped"), true, now);
  }
}

bool PrefillManager::is_quiet() const {
  return writes_.empty() && std::all_of(uses_.begin(), uses_.end(), [](const auto& entry) {
           const auto& destinations = entry.second.destinations;
           return std::all_of(destinations.begin(), destinations.end(),
                              [](const auto& d) { return d.second.told; });
         });
}

// --- moving bytes

const plan::PairLanes* PrefillManager::lanes_of(const PeerKey& peer) const {
  if (peer.is_native()) {
    const auto it = sessions_.find(peer.session);
    return it == sessions_.end() ? nullptr : &it->second.lanes;
  }
  const auto it = foreign_.find(peer.name);
  return it == foreign_.end() ? nullptr : &it->second.lanes;
}

bool PrefillManager::may_write(const PeerKey& peer, Time now) const {
  if (!peer.is_native()) return foreign_.contains(peer.name);
  const auto it = sessions_.find(peer.session);
  return it != sessions_.end() && it->second.permitted_until > now;
}

std::string PrefillManager::describe_peer(const PeerKey& peer) const {
  if (peer.is_native()) {
    const auto it = sessions_.find(peer.session);
    return it == sessions_.end() ? peer.text() : it->second.name;
  }
  return "decode " + peer.name;
}

void PrefillManager::dispatch_peer_rooms(const PeerKey& peer, Time now) {
  std::vector<UseId> ids;
  for (const auto& [id, use] : uses_) {
    if (!use.chunks.empty() && use.destinations.contains(peer)) ids.push_back(id);
  }
  for (const UseId id : ids) {
    if (Use* use = find(id)) dispatch(id, *use, now);
  }
}

void PrefillManager::dispatch(UseId id, Use& use, Time now) {
  while (!use.chunks.empty() && !is_terminal(use.view.state)) {
    if (use.view.state == RoomState::kBootstrapping) return;
    Chunk& chunk = use.chunks.front();
    if (!chunk.is_ready) return;
    for (const auto& [peer, to] : use.destinations) {
      if (to.metadata.dummy || use.dummy) continue;
      if (!to.registered) {
        // A registration comes before the first room message on the same connection. One that comes
        // later may be of another process at the same name, whose memory these pages do not belong
        // to.
        KVF_REACHED("a room message came without a registration");
        fail(id, use,
             Status(Code::kNotFound, fmt::format("{}: {} is not registered on this prefill rank",
                                                 room_text(use.room), describe_peer(peer))),
             false, now);
        return;
      }
      if (!may_write(peer, now)) {
        KVF_REACHED("a chunk waited for leave to write");
        return;
      }
    }
    const Chunk current = std::move(chunk);
    use.chunks.pop_front();
    if (!dispatch_chunk(id, use, current, now)) return;
    if (current.last) use.last_dispatched = true;
  }
  settle(id, use, now);
}

Status PrefillManager::plan_for(const Use& use, const PeerKey& peer, const Destination& to,
                                const Chunk& chunk, CopyPlan& plan) const {
  const plan::PairLanes* lanes = lanes_of(peer);
  if (lanes == nullptr) return Status(Code::kPeerLost, describe_peer(peer) + " is not registered");
  if (!peer.is_native()) KVF_RETURN_IF_ERROR(foreign_.at(peer.name).refusal);
  const plan::ListLanes& kv = lanes->kv;
  const std::uint32_t page = self_.layout.page_tokens,
                      their_page = page / kv.parts.source * kv.parts.target;
  const std::uint64_t prefix = to.metadata.prefix_tokens.value_or(0);
  const auto refused = [&](std::string_view rule) {
    return Status(
        Code::kRefused,
        fmt::format("{}: {} pages of {} tokens are announced but {} lent {} of {} behind a "
                    "prefix of {} tokens: {}",
                    room_text(use.room), *use.pages_total, page, describe_peer(peer),
                    to.metadata.pages.size(), their_page, prefix, rule));
  };
  // All positions are in parts of pages (plan/parts.h), counted from the first page that is sent.
  // Whole pages that the other side holds already are left out. (A foreign rank's prefix may end
  // inside a page; that page is sent.)
  const std::uint64_t all = *use.pages_total * kv.parts.source;
  const std::uint64_t held =
      use.whole_request ? std::min(all, prefix / their_page * kv.parts.target) : 0;
  if (!use.whole_request && !kv.parts.whole() && prefix % page != 0)
    return refused("pages behind it can be sent only if it is whole pages here too");
  const bool cut = all_cp_ranks() && !self_.layer_split;
  const auto range = plan::range_of({.parts = kv.parts,
                                     .source_pages = *use.pages_total,
                                     .first_page = chunk.begin,
                                     .page_count = chunk.pages.size(),
                                     .held = held,
                                     .target_pages = to.metadata.pages.size(),
                                     .exact = peer.is_native(),
                                     .cp_size = cut ? self_.place.cp_size : 1,
                                     .cp_rank = cut ? self_.place.cp_rank : 0});
  if (!range)
    return refused(peer.is_native() ? "these are not the same tokens" : "these are too few");
  const plan::Shares writes = peer.is_native() ? to.metadata.writes : foreign_.at(peer.name).writes;
  if ((writes & plan::kKvShare) != 0) {
    const Status planned =
        plan::plan_list(kv, {chunk.pages, chunk.begin * kv.parts.source}, {to.metadata.pages, held},
                        range->begin, range->end, plan);
    if (!planned.ok())
      return Status(planned.code(), fmt::format("{}: {}", room_text(use.room), planned.message()));
  }
  if (chunk.last) {
    const auto states = states_of(peer, to.metadata);
    Status status = states.status();
    if (status.ok())
      status = plan::plan_states(*lanes, writes, use.states, *states, "this prefill rank",
                                 describe_peer(peer), plan);
    if (!status.ok())
      return Status(status.code(), fmt::format("{}: {}", room_text(use.room), status.message()));
  }
  if (chunk.last && to.metadata.aux_row && to.metadata.writes_aux && !lanes->aux.empty() &&
      (peer.is_native() || !settings_.aux_over_control)) {
    plan.push_back({lanes->aux, {Run{use.aux_row, *to.metadata.aux_row, 1}}});
  }
  return {};
}

// What a decode rank announced, by kind: a foreign one does not say which list is of which.
Result<plan::StateLists> PrefillManager::states_of(const PeerKey& peer,
                                                   const wire::Metadata& metadata) const {
  plan::StateLists lists;
  const std::size_t known = peer.is_native() ? kStateKinds : kinds_.size();
  if (metadata.states.size() > known) {
    return Status(Code::kRefused,
                  fmt::format("{} announced state of {} kinds, here are pools of {}",
                              describe_peer(peer), metadata.states.size(), known));
  }
  for (std::size_t i = 0; i < metadata.states.size(); ++i)
    lists.at(peer.is_native() ? i : static_cast<std::size_t>(kinds_[i])) = metadata.states[i];
  return lists;
}

bool PrefillManager::dispatch_chunk(UseId id, Use& use, const Chunk& chunk, Time now) {
  // Everything is planned before anything is written: a room that cannot be sent to one of its
  // destinations is sent to none.
  std::vector<std::pair<PeerKey, CopyPlan>> plans;
  for (const auto& [peer, to] : use.destinations) {
    if (to.metadata.dummy || use.dummy) continue;
    CopyPlan plan;
    if (Status status = plan_for(use, peer, to, chunk, plan); !status.ok()) {
      fail(id, use, status, false, now);
      return false;
    }
    plans.emplace_back(peer, std::move(plan));
  }
  if (use.view.state == RoomState::kWaitingForInput && !plans.empty()) {
    move_to(use.view.state, RoomState::kTransferring);
    publish(id, use);
  }
  for (auto& [peer, plan] : plans) {
    Destination& to = use.destinations.at(peer);
    if (chunk.last && !peer.is_native() && settings_.aux_over_control && to.metadata.aux_row)
      send_aux_data(use, to);
    if (bytes_of(plan) == 0) continue;
    const WriteId write{next_id_++};
    writes_[write] = {id, peer};
    use.writes.insert(write);
    ++to.in_flight;
    WriteSpec spec;
    spec.id = write;
    spec.to = peer.is_native() ? sessions_.at(peer.session).plane : peer.name;
    spec.authority = {to.metadata.grant, !peer.is_native()};
    spec.flow = static_cast<std::uint64_t>(id);
    spec.plan = std::move(plan);
    ports_.plane.write(std::move(spec));
  }
  return true;
}

// To foreign ranks only: a control message can be lost without anybody noticing, the data plane's
// writes cannot.
void PrefillManager::send_aux_data(const Use& use, const Destination& to) {
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component != Component::kAux) continue;
    const wire::AuxData message{
        use.room,
        slab.layer,
        *to.metadata.aux_row,
        ports_.memory.load(slab.base + use.aux_row * slab.item_stride, slab.item_bytes),
        {}};
    if (auto frames = wire::encode_to_decode(message, wire::Dialect::kUnknown); frames.ok())
      ports_.control.send(to.reply, std::move(*frames));
  }
}

void PrefillManager::on_completion(const Completion& completion, Time now) {
  if (completion.kind != Completion::Kind::kWrite) return;
  const auto it = writes_.find(WriteId{completion.id});
  if (it == writes_.end()) return;
  const WriteOwner owner = it->second;
  writes_.erase(it);
  Use* use = find(owner.use);
  if (use == nullptr) return;
  Destination& to = use->destinations.at(owner.peer);
  --to.in_flight;
  use->writes.erase(WriteId{completion.id});
  if (!completion.settled) {
    KVF_REACHED("a write ended unsettled");
    to.unsettled = true;
    unsettled_.set({use->room, owner.peer}, now + settings_.hold_time);
  }
  if (completion.status.ok()) {
    counters_.bytes_moved += completion.bytes;
    use->view.bytes += completion.bytes;
  } else if (!is_terminal(use->view.state)) {
    ++counters_.writes_failed;
    fail(owner.use, *use,
         Status(completion.status.code(),
                fmt::format("{}: write to {}: {}", room_text(use->room), describe_peer(owner.peer),
                            completion.status.message())),
         false, now);
  }
  settle(owner.use, *use, now);
  drop_if_done(owner.use);
}

void PrefillManager::on_ready(ReadyId ready, Time now) {
  const auto it = ready_.find(ready);
  if (it == ready_.end()) return;
  const UseId id = it->second;
  ready_.erase(it);
  Use* use = find(id);
  if (use == nullptr) return;
  for (Chunk& chunk : use->chunks) {
    if (chunk.ready == ready) chunk.is_ready = true;
  }
  dispatch(id, *use, now);
}

// --- how a room ends

void PrefillManager::fail(UseId id, Use& use, Status reason, bool from_other, Time now) {
  if (!move_to(use.view.state, RoomState::kFailed)) return;
  use.view.failure = {std::move(reason), from_other};
  ++(use.view.failure.status.code() == Code::kAborted ? counters_.rooms_aborted
                                                      : counters_.rooms_failed);
  ports_.trace.trace(
      use.view.failure.status.code() == Code::kAborted ? Severity::kInfo : Severity::kError,
      use.view.failure.status.to_string());
  room_deadlines_.clear(id);
  for (const Chunk& chunk : use.chunks) ready_.erase(chunk.ready);
  use.chunks.clear();
  for (auto& [peer, to] : use.destinations) {
    // The failure travels at once; that nothing is in flight any more follows when it is true.
    if (to.in_flight > 0 && !to.told && !to.abort_asked && peer.is_native()) {
      send_native(
          ports_.control, to.reply, self_.control, peer.session,
          wire::Abort{use.room, {}, {}, to.metadata.grant, use.view.failure.status.message()});
    }
  }
  for (const WriteId write : use.writes) ports_.plane.cancel(write);
  settle(id, use, now);
}

void PrefillManager::tell(Use& use, const PeerKey& peer, Destination& to) {
  if (to.told || to.in_flight > 0) return;
  to.told = true;
  const std::uint32_t rank = self_.place.unique_rank();
  if (to.abort_asked) {
    if (to.unsettled) return;  // no promise can be given; the other side has its own deadline
    if (peer.is_native()) {
      send_native(ports_.control, to.reply, self_.control, peer.session,
                  wire::AbortAck{use.room, rank, {}, to.metadata.grant});
    } else if (auto frames = wire::encode_to_decode(
                   wire::AbortAck{use.room, rank, to.abort_generation, {}},
                   foreign_.contains(peer.name) ? foreign_.at(peer.name).dialect
                                                : wire::Dialect::kUnknown);
               frames.ok()) {
      ports_.control.send(to.reply, std::move(*frames));
    }
    return;
  }
  if (to.metadata.dummy && use.view.state == RoomState::kSuccess)
    return;  // nobody waits for a dummy's word
  const wire::Done done{use.room, use.view.state, rank, to.metadata.grant,
                        use.view.failure.status.message()};
  if (peer.is_native()) {
    // Done says that nothing is in flight. Where that is not known, only the failure is told.
    if (to.unsettled) {
      send_native(ports_.control, to.reply, self_.control, peer.session,
                  wire::Abort{use.room, {}, {}, to.metadata.grant, done.reason});
    } else {
      send_native(ports_.control, to.reply, self_.control, peer.session, done);
    }
  } else if (auto frames = wire::encode_to_decode(done, wire::Dialect::kUnknown); frames.ok()) {
    ports_.control.send(to.reply, std::move(*frames));
  }
}

// A room that has something to move must go on moving: its deadline starts again with every step.
// While the engine has given nothing to send, nothing is due.
void PrefillManager::touch(UseId id, Use& use, Time now) {
  if (is_terminal(use.view.state) || use.view.state == RoomState::kBootstrapping) return;
  if (use.chunks.empty() && use.writes.empty()) {
    room_deadlines_.clear(id);
  } else {
    room_deadlines_.set(id, now + settings_.waiting_timeout);
  }
}

void PrefillManager::settle(UseId id, Use& use, Time now) {
  touch(id, use, now);
  std::uint64_t in_flight = 0;
  for (const auto& [peer, to] : use.destinations) in_flight += to.in_flight;
  if (!is_terminal(use.view.state) && use.view.state != RoomState::kBootstrapping &&
      use.last_dispatched && in_flight == 0) {
    move_to(use.view.state, RoomState::kSuccess);
    ++counters_.rooms_succeeded;
  }
  if (is_terminal(use.view.state)) {
    for (auto& [peer, to] : use.destinations) tell(use, peer, to);
    use.view.pages_reusable = in_flight == 0;
  }
  publish(id, use);
}

void PrefillManager::publish(UseId id, Use& use) {
  ports_.rooms.on_room(id, use.view);
}

void PrefillManager::drop_if_done(UseId id) {
  const auto it = uses_.find(id);
  if (it == uses_.end() || !it->second.cleared || !it->second.view.pages_reusable) return;
  room_deadlines_.clear(id);
  const auto room = by_room_.find(it->second.room);
  room->second.erase(id);
  if (room->second.empty()) by_room_.erase(room);
  uses_.erase(it);
}

// --- time

void PrefillManager::advance(Time now) {
  while (const auto id = room_deadlines_.pop_due(now)) {
    if (Use* use = find(*id)) {
      if (use->view.state != RoomState::kBootstrapping) {
        KVF_REACHED("a transfer made no progress");
        fail(*id, *use,
             Status(Code::kTimedOut,
                    fmt::format("{}: no progress within {} s (waiting_timeout); "
                                "{} chunks wait, {} writes are under way",
                                room_text(use->room), seconds(settings_.waiting_timeout),
                                use->chunks.size(), use->writes.size())),
             false, now);
        continue;
      }
      const std::uint32_t required =
          use->destinations.empty()
              ? 0
              : use->destinations.begin()->second.metadata.required_destinations;
      fail(*id, *use,
           Status(Code::kTimedOut,
                  fmt::format("{}: {} of {} decode ranks spoke within {} s (bootstrap_timeout)",
                              room_text(use->room), use->destinations.size(),
                              required == 0 ? "an unknown number" : fmt::format("{}", required),
                              seconds(settings_.bootstrap_timeout))),
           false, now);
    }
  }
  while (unsettled_.pop_due(now)) {
  }
  while (const auto room = pending_deadlines_.pop_due(now)) {
    KVF_REACHED("a pending room expired");
    pending_.erase(*room);
  }
  while (const auto token = ping_deadlines_.pop_due(now)) {
    const auto it = sessions_.find(*token);
    if (it == sessions_.end()) continue;
    const Time trusted_until =
        std::max(it->second.permitted_until, it->second.opened_at + settings_.write_lease);
    if (trusted_until <= now) {
      KVF_REACHED("leave to write ran out");
      end_session(*token,
                  Status(Code::kPeerLost, fmt::format("no answer to pings for {} ms (write_lease)",
                                                      milliseconds(settings_.write_lease))),
                  true, now);
      continue;
    }
    send_native(ports_.control, it->second.reply, self_.control, *token,
                wire::Ping{static_cast<std::uint64_t>(now.time_since_epoch().count())});
    ping_deadlines_.set(*token, std::min(now + settings_.ping_interval,
                                         std::max(trusted_until, now + Duration(1))));
  }
  if (next_registration_ <= now) register_self(now);
}

Time PrefillManager::next_deadline() const {
  return std::min({room_deadlines_.next(), pending_deadlines_.next(), unsettled_.next(),
                   ping_deadlines_.next(), next_registration_});
}

}  // namespace kvferry::proto
