#include "src/proto/prefill.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/base/mark.h"
#include "src/plan/positional.h"

namespace kvferry::proto {
namespace {

std::string room_text(RoomId room) {
  return fmt::format("room {}", value_of(room));
}

}  // namespace

PrefillManager::PrefillManager(PrefillSelf self, const Settings& settings, Ports ports)
    : self_(std::move(self)), settings_(settings), ports_(ports) {}

bool PrefillManager::all_cp_ranks() const {
  return self_.place.cp_size > 1 &&
         (settings_.all_cp_ranks || self_.layer_split || self_.attention.hybrid_mla);
}

bool PrefillManager::is_dummy_cp_rank() const {
  return self_.place.cp_rank != 0 && !all_cp_ranks();
}

// --- registration
// -------------------------------------------------------------------------------------------------

void PrefillManager::start(Time now) {
  register_self(now);
}

void PrefillManager::register_self(Time now) {
  wire::RankRegistration r;
  r.place = self_.place;
  r.system_dp_rank = self_.system_dp_rank;
  r.system_dp_size = self_.system_dp_size;
  r.address = self_.control;
  r.page_size = self_.layout.page_tokens;
  r.kv_cache_dtype = self_.kv_cache_dtype;
  r.load_balance_method = self_.load_balance_method;
  r.layer_split = self_.layer_split;
  r.prefill_http_port = self_.http_port;
  if (self_.native) {
    r.native = wire::NativeRank{.life = self_.life,
                                .version_min = 1,
                                .version_max = wire::kNativeVersion,
                                .capabilities = {},
                                .plane = ports_.plane.address(),
                                .layout = self_.layout};
  }
  const CallId call{next_id_++};
  registration_calls_.insert(call);
  next_registration_ =
      now + settings_.http_timeout + settings_.reregister_interval;  // the answer sets it nearer
  ports_.http.call(call,
                   {"PUT", self_.bootstrap, "/route", wire::to_json(r), settings_.http_timeout});
}

void PrefillManager::on_http(CallId call, const HttpResponse& response, Time now) {
  if (registration_calls_.erase(call) == 0)
    return;  // a dp rank of a room: nothing depends on the answer
  const bool ok = response.status == 200;
  if (ok && !registered_)
    ports_.trace.trace(Severity::kInfo,
                       "registered with bootstrap server " + self_.bootstrap.host_port());
  if (!ok) {
    Status why(response.status == 0 ? Code::kUnavailable : Code::kRefused,
               fmt::format("bootstrap server {} did not register this rank: {} {}",
                           self_.bootstrap.host_port(), response.status, response.body));
    if (!(why == registration_status_)) ports_.trace.trace(Severity::kWarning, why.message());
    registration_status_ = why;
  } else {
    registration_status_ = Status();
  }
  registered_ = ok;
  if (!stopping_)
    next_registration_ = now + (ok ? settings_.reregister_interval : settings_.register_retry);
}

// --- the engine's calls
// -------------------------------------------------------------------------------------------

PrefillManager::Use* PrefillManager::find(UseId id) {
  const auto it = uses_.find(id);
  return it == uses_.end() ? nullptr : &it->second;
}

const RoomView* PrefillManager::view(UseId use) const {
  const auto it = uses_.find(use);
  return it == uses_.end() ? nullptr : &it->second.view;
}

Result<UseId> PrefillManager::open(RoomId room, const SenderOptions& options, Time now) {
  if (stopping_) return Status(Code::kAborted, room_text(room) + ": this endpoint is stopping");
  if (value_of(room) > kRoomMax)
    return Status(Code::kInvalidArgument, fmt::format("room {} is above 2^63-1", value_of(room)));
  if (live_.contains(room))
    return Status(Code::kAlreadyExists, room_text(room) + " is open on this prefill rank");
  if (uses_.size() >= settings_.rooms_max) {
    return Status(Code::kExhausted,
                  fmt::format("{}: {} rooms are open (rooms_max)", room_text(room), uses_.size()));
  }
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

Status PrefillManager::init(UseId id, std::uint64_t pages, std::uint32_t aux_row, Time now) {
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
  dispatch(id, *use, now);
  return {};
}

Status PrefillManager::send(UseId id, std::vector<PageIndex> pages, ReadyId ready, Time now) {
  Use* use = find(id);
  if (use == nullptr) return Status(Code::kNotFound, "the room was cleared");
  if (is_terminal(use->view.state))
    return Status(Code::kAborted, fmt::format("{} has ended: {}", room_text(use->room),
                                              to_string(use->view.state)));
  if (!use->pages_total)
    return Status(Code::kInvalidArgument, room_text(use->room) + " was not initialised");
  std::uint32_t pool = 0;
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component != Component::kAux)
      pool = pool == 0 ? slab.item_count : std::min(pool, slab.item_count);
  }
  for (const PageIndex page : pages) {
    if (page < 0 || static_cast<std::uint32_t>(page) >= pool) {
      return Status(Code::kInvalidArgument, fmt::format("{}: page {} outside pool of {}",
                                                        room_text(use->room), page, pool));
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
  if (pages.empty() && !last) return {};
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

// --- messages
// -----------------------------------------------------------------------------------------------------

void PrefillManager::on_frames(const wire::Frames& frames, Time now) {
  if (wire::is_native(frames)) {
    const auto frame = wire::decode_native(frames);
    if (!frame.ok()) {
      ++counters_.malformed_messages;
      ports_.trace.trace(Severity::kDebug, frame.status().message());
      return;
    }
    return on_native(*frame, now);
  }
  auto message = wire::decode_at_prefill(frames);
  if (!message.ok()) {
    ++counters_.malformed_messages;
    ports_.trace.trace(Severity::kDebug, message.status().message());
    return;
  }
  if (const auto* m = std::get_if<wire::Register>(&*message)) return on_register_foreign(*m, now);
  if (auto* m = std::get_if<wire::Metadata>(&*message)) {
    const PeerKey peer{{}, m->session_name};
    return on_metadata(peer, std::move(*m), now);
  }
  if (const auto* m = std::get_if<wire::Abort>(&*message)) {
    // The frame names an address, not a session: it is the session that registered from there.
    for (const auto& [name, session] : foreign_) {
      if (session.reply == m->reply) return on_abort(PeerKey{{}, name}, m->reply, *m, now);
    }
    return on_abort(PeerKey{{}, m->reply.host_port()}, m->reply, *m, now);
  }
  if (const auto* m = std::get_if<wire::Watermark>(&*message)) {
    if (!m->session_name.empty() && !watermarks_.contains(m->session_name) &&
        watermarks_.size() >= settings_.sessions_max)
      return;
    // The ring begins at (0, 0): only what is beyond is news.
    const std::pair mark(m->round, m->tail);
    const auto known = watermarks_.find(m->session_name);
    if (mark >
        (known == watermarks_.end() ? std::pair<std::uint64_t, std::uint64_t>() : known->second))
      watermarks_[m->session_name] = mark;
    return;
  }
  ++counters_.unexpected_messages;
}

void PrefillManager::on_native(const wire::NativeFrame& frame, Time now) {
  if (const auto* m = std::get_if<wire::Unknown>(&frame.message)) {
    return end_session(frame.session,
                       Status(m->reason.ends_with("stopped") ? Code::kAborted : Code::kPeerLost,
                              "the decode rank ended the session: " + m->reason),
                       false, now);
  }
  if (const auto* m = std::get_if<wire::Register>(&frame.message))
    return on_register_native(frame, *m, now);
  const auto it = sessions_.find(frame.session);
  if (it == sessions_.end()) return reply_unknown(frame, "session is not known here");
  const PeerKey peer{frame.session, {}};
  if (const auto* m = std::get_if<wire::Pong>(&frame.message)) {
    // Only an answer to a question of ours counts: none lies in the future.
    if (m->asked_at_ns > static_cast<std::uint64_t>(now.time_since_epoch().count())) {
      ++counters_.unexpected_messages;
      return;
    }
    const Time until =
        Time(Duration(static_cast<std::int64_t>(m->asked_at_ns))) + settings_.write_lease;
    const bool lapsed = it->second.permitted_until <= now;
    it->second.permitted_until = std::max(it->second.permitted_until, until);
    if (lapsed) dispatch_peer_rooms(peer, now);
    return;
  }
  if (const auto* m = std::get_if<wire::Metadata>(&frame.message))
    return on_metadata(peer, *m, now);
  if (const auto* m = std::get_if<wire::Abort>(&frame.message))
    return on_abort(peer, it->second.reply, *m, now);
  ++counters_.unexpected_messages;
}

void PrefillManager::reply_unknown(const wire::NativeFrame& frame, std::string reason) {
  KVF_REACHED("a message of an unknown session was answered on the prefill side");
  send_native(ports_.control, frame.reply, self_.control, frame.session,
              wire::Unknown{std::move(reason)});
}

void PrefillManager::on_register_native(const wire::NativeFrame& frame, const wire::Register& m,
                                        Time now) {
  if (stopping_) return reply_unknown(frame, "the prefill endpoint is stopping");
  if (frame.session.is_zero()) {
    ++counters_.malformed_messages;
    return;
  }
  if (!sessions_.contains(frame.session)) {
    if (sessions_.size() >= settings_.sessions_max) {
      return reply_unknown(frame,
                           fmt::format("{} sessions are open (sessions_max)", sessions_.size()));
    }
    const std::string name = fmt::format("decode tp{} pp{} at {}", m.place.tp_rank, m.place.pp_rank,
                                         m.reply.host_port());
    const std::string own = fmt::format("prefill tp{} pp{} at {}", self_.place.tp_rank,
                                        self_.place.pp_rank, self_.control.host_port());
    Status fit = validate(m.layout);
    NativeSession session;
    if (fit.ok()) {
      auto lanes = plan::pair_lanes(self_.layout, m.layout, own, name);
      if (lanes.ok()) {
        session.lanes = std::move(*lanes);
      } else {
        fit = lanes.status();
      }
    }
    if (!fit.ok()) {
      KVF_REACHED("a pair that does not fit was refused");
      ports_.trace.trace(Severity::kError, fmt::format("{} refused: {}", name, fit.message()));
      return reply_unknown(frame, "refused: " + fit.message());
    }
    session.reply = m.reply;
    session.name = name;
    session.plane = m.plane;
    session.opened_at = now;
    sessions_[frame.session] = std::move(session);
    ++counters_.sessions_opened;
  }
  // Registered again (its first ping may have been lost): ask at once.
  send_native(ports_.control, m.reply, self_.control, frame.session,
              wire::Ping{static_cast<std::uint64_t>(now.time_since_epoch().count())});
  ping_deadlines_.set(frame.session, now + settings_.ping_interval);
}

void PrefillManager::on_register_foreign(const wire::Register& m, Time now) {
  if (!foreign_.contains(m.session_name)) {
    // Whoever listened there before is gone; its entry goes too unless a room still needs it.
    std::erase_if(foreign_, [&](const auto& entry) {
      const bool same = entry.second.reply == m.reply || foreign_.size() >= settings_.sessions_max;
      return same && std::none_of(uses_.begin(), uses_.end(), [&](const auto& use) {
               return use.second.destinations.contains(PeerKey{{}, entry.first});
             });
    });
    std::erase_if(watermarks_, [&](const auto& entry) {
      return !entry.first.empty() && watermarks_.size() >= settings_.sessions_max &&
             !foreign_.contains(entry.first);
    });
  }
  if (!foreign_.contains(m.session_name) && foreign_.size() >= settings_.sessions_max) {
    ports_.trace.trace(Severity::kWarning,
                       fmt::format("registration of {} dropped: sessions_max {}", m.session_name,
                                   settings_.sessions_max));
    return;
  }
  ForeignSession session;
  session.reply = m.reply;
  if (m.pools.dcp_size > 1) {
    session.refusal = Status(
        Code::kRefused,
        fmt::format("decode {} runs with decode context parallelism of {}, which is not supported",
                    m.session_name, m.pools.dcp_size));
  }
  std::vector<std::uint64_t> aux_lengths;
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component == Component::kAux) aux_lengths.push_back(slab.item_bytes);
  }
  const std::vector<std::uint64_t> one{m.pools.kv_item_length};
  const plan::PositionalContext context{
      .attention = self_.attention,
      .page_tokens = self_.layout.page_tokens,
      .total_kv_heads = self_.total_kv_heads,
      .stage_begin = self_.stage_begin,
      .stage_layers = self_.stage_layers,
      .model_layers = static_cast<std::uint32_t>(settings_.model_layers)};
  const plan::PositionalLists lists{
      .kv_pointers = m.pools.kv_pointers,
      .kv_item_lengths = m.pools.kv_item_lengths.empty() ? one : m.pools.kv_item_lengths,
      .aux_pointers = m.pools.aux_pointers,
      .aux_item_lengths = aux_lengths,
      .tp_rank = m.tp_rank,
      .tp_size = m.tp_size};
  if (session.refusal.ok()) {
    auto layout = plan::layout_from_lists(context, lists);
    if (layout.ok()) {
      auto lanes = plan::pair_lanes(self_.layout, *layout, "prefill " + self_.control.host_port(),
                                    "decode " + m.session_name);
      if (lanes.ok()) {
        session.lanes = std::move(*lanes);
      } else {
        session.refusal = lanes.status();
      }
    } else {
      session.refusal = layout.status();
    }
  }
  if (!session.refusal.ok())
    ports_.trace.trace(Severity::kError, fmt::format("decode {} refused: {}", m.session_name,
                                                     session.refusal.message()));
  const PeerKey peer{{}, m.session_name};
  const auto before = foreign_.find(m.session_name);
  const bool other_life = before != foreign_.end() && !(before->second.lanes == session.lanes);
  foreign_[m.session_name] = std::move(session);
  if (other_life) {
    // Another process, or other memory, under the same name: what was said before must not be
    // written there.
    KVF_REACHED("a foreign rank registered other memory under its old name");
    std::vector<UseId> concerned;
    for (const auto& [id, use] : uses_) {
      if (use.destinations.contains(peer)) concerned.push_back(id);
    }
    for (const UseId id : concerned) {
      Use* use = find(id);
      fail(id, *use,
           Status(Code::kPeerLost, fmt::format("{}: decode {} registered again with other memory",
                                               room_text(use->room), m.session_name)),
           true, now);
      drop_if_done(id);
    }
    for (auto& [room, pending] : pending_) pending.metadata.erase(peer);
  }
  dispatch_peer_rooms(peer, now);
}

void PrefillManager::on_metadata(const PeerKey& peer, wire::Metadata metadata, Time now) {
  const bool registered = peer.is_native() || foreign_.contains(peer.name);
  if (const auto live = live_.find(metadata.room); live != live_.end()) {
    Use& use = uses_.at(live->second);
    const auto before = use.destinations.find(peer);
    // The room has ended here but is not cleared yet, and the other side has begun its next use
    // already: that waits.
    const bool next_use =
        is_terminal(use.view.state) && (use.view.state == RoomState::kSuccess ||
                                        (before != use.destinations.end() && peer.is_native() &&
                                         before->second.metadata.grant != metadata.grant));
    if (next_use) KVF_REACHED("a room message was of the next use of its number");
    if (!next_use) return adopt(live->second, use, peer, {std::move(metadata), registered}, now);
  }
  const bool known = pending_.contains(metadata.room);
  if (!known && pending_.size() >= settings_.pending_rooms_max) {
    ports_.trace.trace(
        Severity::kWarning,
        fmt::format("{} of {} dropped: pending_rooms_max {}", room_text(metadata.room),
                    describe_peer(peer), settings_.pending_rooms_max));
    return;
  }
  // A foreign room message carries no name of its use. It must be forgotten before its number can
  // be used again there, which is after the hold time at the earliest.
  const Duration keep = peer.is_native()
                            ? settings_.bootstrap_timeout
                            : std::min(settings_.bootstrap_timeout, settings_.hold_time);
  if (!known) pending_deadlines_.set(metadata.room, now + keep);
  Pending& pending = pending_[metadata.room];
  if (!pending.metadata.contains(peer) &&
      pending.metadata.size() + pending.aborted.size() >= settings_.sessions_max)
    return;
  pending.aborted.erase(peer);
  pending.metadata[peer] = {std::move(metadata), registered};
}

void PrefillManager::adopt(UseId id, Use& use, const PeerKey& peer, Word word, Time now) {
  wire::Metadata& metadata = word.metadata;
  if (const auto before = use.destinations.find(peer); before != use.destinations.end()) {
    ++counters_.unexpected_messages;
    if (peer.is_native() || is_terminal(use.view.state) || before->second.metadata == metadata)
      return;
    // A foreign decode rank speaks once in each use of a number: its first word was of another use.
    KVF_REACHED("a foreign rank spoke twice for one room");
    if (use.view.state == RoomState::kTransferring) {
      fail(id, use,
           Status(Code::kProtocol,
                  fmt::format("{}: {} announced other pages while they were written",
                              room_text(use.room), describe_peer(peer))),
           false, now);
      return;
    }
    use.destinations.erase(before);
  }
  if (use.destinations.size() >= settings_.sessions_max) return;
  Destination to;
  to.reply = peer.is_native() ? sessions_.at(peer.session).reply : metadata.reply;
  to.metadata = std::move(metadata);
  to.registered = word.registered;
  if (is_terminal(use.view.state)) {
    // Too late: the room has ended here. Who came late is told, or it would wait for its deadline.
    KVF_REACHED("a room message came after the room had ended");
    if (use.view.state == RoomState::kFailed) {
      Destination& late = use.destinations[peer] = std::move(to);
      tell(use, peer, late);
    }
    return;
  }

  const std::uint32_t required = to.metadata.required_destinations;
  const std::uint32_t agreed =
      use.destinations.empty() ? required
                               : use.destinations.begin()->second.metadata.required_destinations;
  if (!use.view.prefix_tokens && to.metadata.prefix_tokens)
    use.view.prefix_tokens = to.metadata.prefix_tokens;
  use.destinations[peer] = std::move(to);
  if (required != agreed || use.destinations.size() > agreed) {
    fail(id, use,
         Status(Code::kProtocol,
                fmt::format("{}: {} says {} decode ranks take part, others said {}; {} have spoken",
                            room_text(use.room), describe_peer(peer), required, agreed,
                            use.destinations.size())),
         false, now);
    return;
  }
  if (use.destinations.size() == agreed && use.view.state == RoomState::kBootstrapping) {
    if (!use.view.prefix_tokens) use.view.prefix_tokens = 0;
    move_to(use.view.state, RoomState::kWaitingForInput);
    touch(id, use, now);
    publish(id, use);
  }
  dispatch(id, use, now);
}

void PrefillManager::on_abort(const PeerKey& peer, const Address& reply, const wire::Abort& m,
                              Time now) {
  PeerKey spoke_as = peer;
  const auto ack_now = [&] {
    if (unsettled_.contains({m.room, spoke_as})) {
      KVF_REACHED("a drained answer was withheld because a write was unsettled");
      return;
    }
    if (peer.is_native()) {
      send_native(ports_.control, reply, self_.control, peer.session,
                  wire::AbortAck{m.room, self_.place.unique_rank(), {}, m.grant});
    } else {
      auto frames = wire::encode_to_decode(
          wire::AbortAck{m.room, self_.place.unique_rank(), m.generation, {}},
          wire::Dialect::kUnknown);
      if (frames.ok()) ports_.control.send(reply, std::move(*frames));
    }
  };
  // The use that this decode rank takes part in, the latest first; a native rank names it by its
  // grant.
  std::set<UseId> candidates;
  if (const auto known = by_room_.find(m.room); known != by_room_.end()) candidates = known->second;
  for (auto it = candidates.rbegin(); it != candidates.rend(); ++it) {
    const UseId id = *it;
    Use& use = uses_.at(id);
    auto d = use.destinations.find(peer);
    if (d == use.destinations.end() && !peer.is_native()) {
      // A foreign rank is known by where it listens: it may have spoken under another session name.
      d = std::find_if(use.destinations.begin(), use.destinations.end(), [&](const auto& e) {
        return !e.first.is_native() && e.second.reply == reply;
      });
    }
    if (d == use.destinations.end() || (peer.is_native() && d->second.metadata.grant != m.grant))
      continue;

    spoke_as = d->first;
    Destination& to = d->second;
    if (use.view.state == RoomState::kSuccess)
      return ack_now();  // nothing in flight; a no-op for the room
    if (to.told) return ack_now();
    to.abort_asked = true;
    to.abort_generation = m.generation;
    if (is_terminal(use.view.state)) {
      settle(id, use, now);
    } else {
      fail(id, use,
           Status(Code::kAborted,
                  fmt::format("{}: {} aborted{}{}", room_text(m.room), describe_peer(peer),
                              m.reason.empty() ? "" : ": ", m.reason)),
           true, now);
    }
    drop_if_done(id);
    return;
  }
  if (const auto live = live_.find(m.room); live != live_.end() && !peer.is_native()) {
    // A foreign rank that has not spoken for the room yet may still abort it.
    Use& use = uses_.at(live->second);
    if (use.view.state != RoomState::kSuccess) {
      const UseId id = live->second;
      fail(id, use,
           Status(Code::kAborted,
                  fmt::format("{}: {} aborted", room_text(m.room), describe_peer(peer))),
           true, now);
    }
    return ack_now();
  }
  // The sender does not exist yet: it shall not wait for a partner that has given up.
  const bool known = pending_.contains(m.room);
  if (peer.is_native()) {
    // A native rank names its use by the grant: only a word that waits can be aborted. Anything
    // else is of a use that is over.
    const auto p = known ? &pending_.at(m.room) : nullptr;
    if (p == nullptr || !p->metadata.contains(peer) ||
        p->metadata.at(peer).metadata.grant != m.grant)
      return ack_now();
  }
  if (known ? pending_.at(m.room).metadata.size() + pending_.at(m.room).aborted.size() <
                  settings_.sessions_max
            : pending_.size() < settings_.pending_rooms_max) {
    if (!known) pending_deadlines_.set(m.room, now + settings_.bootstrap_timeout);
    Pending& pending = pending_[m.room];
    pending.metadata.erase(peer);
    pending.aborted.insert(peer);
  }
  ack_now();
}

void PrefillManager::end_session(Token session, Status reason, bool tell_peer, Time now) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  KVF_REACHED("a session ended on the prefill side");
  const NativeSession ended = std::move(it->second);
  sessions_.erase(it);
  ping_deadlines_.clear(session);
  ++counters_.sessions_ended;
  ports_.trace.trace(reason.code() == Code::kAborted ? Severity::kInfo : Severity::kWarning,
                     fmt::format("{}: session over: {}", ended.name, reason.message()));
  if (tell_peer)
    send_native(ports_.control, ended.reply, self_.control, session,
                wire::Unknown{reason.message()});
  const PeerKey peer{session, {}};
  std::vector<UseId> concerned;
  for (auto& [id, use] : uses_) {
    const auto d = use.destinations.find(peer);
    if (d == use.destinations.end()) continue;
    d->second.told = true;  // nothing is said in a session that is over
    concerned.push_back(id);
  }
  for (const UseId id : concerned) {
    if (Use* use = find(id)) {
      fail(id, *use,
           Status(reason.code(),
                  fmt::format("{}: {}: {}", room_text(use->room), ended.name, reason.message())),
           true, now);
      settle(id, *use, now);
      drop_if_done(id);
    }
  }
  for (auto p = pending_.begin(); p != pending_.end();) {
    p->second.metadata.erase(peer);
    p->second.aborted.erase(peer);
    if (p->second.metadata.empty() && p->second.aborted.empty()) {
      pending_deadlines_.clear(p->first);
      p = pending_.erase(p);
    } else {
      ++p;
    }
  }
}

// --- moving bytes
// -------------------------------------------------------------------------------------------------

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
  const std::uint64_t total = *use.pages_total;
  // Native ranks take exactly what is sent; a foreign one may hold a page more (padding, a
  // speculative token), never less.
  if (to.metadata.pages.size() < total || (peer.is_native() && to.metadata.pages.size() != total)) {
    return Status(Code::kRefused,
                  fmt::format("{}: {} pages are sent but {} lent {}", room_text(use.room), total,
                              describe_peer(peer), to.metadata.pages.size()));
  }
  std::uint64_t begin = chunk.begin, end = chunk.begin + chunk.pages.size();
  if (all_cp_ranks() && !self_.layer_split) {
    const plan::PagePart part = plan::cp_part(total, self_.place.cp_size, self_.place.cp_rank);
    begin = std::max(begin, part.begin);
    end = std::max(begin, std::min(end, part.end));
  }
  if (begin < end) {
    const auto source = std::span(chunk.pages).subspan(begin - chunk.begin, end - begin);
    const auto target = std::span(to.metadata.pages).subspan(begin, end - begin);
    auto runs = plan::make_runs(source, target);
    if (!runs.ok())
      return Status(runs.status().code(),
                    fmt::format("{}: {}", room_text(use.room), runs.status().message()));
    if (!lanes->kv.empty()) plan.push_back({lanes->kv, std::move(*runs)});
  }
  if (chunk.last && to.metadata.aux_row && to.metadata.writes_aux && !lanes->aux.empty() &&
      (peer.is_native() || !settings_.aux_over_control)) {
    plan.push_back({lanes->aux, {Run{use.aux_row, *to.metadata.aux_row, 1}}});
  }
  return {};
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
// ----------------------------------------------------------------------------------------------

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
// ---------------------------------------------------------------------------------------------------------

void PrefillManager::advance(Time now) {
  while (const auto id = room_deadlines_.pop_due(now)) {
    if (Use* use = find(*id)) {
      if (use->view.state != RoomState::kBootstrapping) {
        KVF_REACHED("a transfer made no progress");
        fail(*id, *use,
             Status(Code::kTimedOut, fmt::format("{}: no progress within {} s (waiting_timeout); "
                                                 "{} chunks wait, {} writes are under way",
                                                 room_text(use->room),
                                                 std::chrono::duration_cast<std::chrono::seconds>(
                                                     settings_.waiting_timeout)
                                                     .count(),
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
                  fmt::format(
                      "{}: {} of {} decode ranks spoke within {} s (bootstrap_timeout)",
                      room_text(use->room), use->destinations.size(),
                      required == 0 ? "an unknown number" : fmt::format("{}", required),
                      std::chrono::duration_cast<std::chrono::seconds>(settings_.bootstrap_timeout)
                          .count())),
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
      end_session(
          *token,
          Status(Code::kPeerLost, fmt::format("no answer to pings for {} ms (write_lease)",
                                              std::chrono::duration_cast<std::chrono::milliseconds>(
                                                  settings_.write_lease)
                                                  .count())),
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
