// What a prefill rank hears and says: its registration with the bootstrap server, sessions and
// foreign registrations, room messages and aborts.
#include "src/proto/prefill.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/base/mark.h"
#include "src/plan/positional.h"
#include "src/plan/writers.h"
#include "src/proto/text.h"

namespace kvferry::proto {

// --- registration

void PrefillManager::start(Time now) {
  started_ = now;
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
    std::vector<std::string> capabilities;
    if (all_cp_ranks()) capabilities.emplace_back(wire::kAllCpRanks);
    r.native = wire::NativeRank{.life = self_.life,
                                .version_min = 1,
                                .version_max = wire::kNativeVersion,
                                .capabilities = std::move(capabilities),
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
                       fmt::format("registered with bootstrap server {}, layout hash {:016x}",
                                   self_.bootstrap.host_port(), layout_hash_));
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

// --- messages

void PrefillManager::on_frames(const wire::Frames& frames, Time now) {
  if (wire::is_native(frames)) {
    const auto frame = wire::decode_native(frames);
    if (is_readable(frame, counters_, ports_.trace)) on_native(*frame, now);
    return;
  }
  auto message = wire::decode_at_prefill(frames);
  if (!is_readable(message, counters_, ports_.trace)) return;
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
  if (m.expected_layout != 0 && m.expected_layout != layout_hash_) {
    KVF_REACHED("a session was refused whose writers were elected by another layout");
    return reply_unknown(frame,
                         fmt::format("the layout of this rank has hash {:016x}, it was looked "
                                     "up with {:016x}: it was replaced since",
                                     layout_hash_, m.expected_layout));
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
  std::vector<std::uint32_t> kv_layers;
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component == Component::kKey || slab.component == Component::kLatent)
      kv_layers.push_back(slab.layer);
  }
  if (kv_layers.size() >= self_.stage_layers) kv_layers.clear();  // every layer has its cache
  const plan::PositionalContext context{
      .attention = self_.attention,
      .page_tokens = self_.layout.page_tokens,
      .total_kv_heads = self_.total_kv_heads,
      .stage_begin = self_.stage_begin,
      .stage_layers = self_.stage_layers,
      .kv_layers = kv_layers,
      .model_layers = static_cast<std::uint32_t>(settings_.model_layers),
      .compression_ratios = self_.compression_ratios,
      .state_kinds = kinds_};
  const plan::PositionalLists lists{
      .kv_pointers = m.pools.kv_pointers,
      .kv_item_lengths = m.pools.kv_item_lengths.empty() ? one : m.pools.kv_item_lengths,
      .aux_pointers = m.pools.aux_pointers,
      .aux_item_lengths = aux_lengths,
      .kv_layer_ids = m.pools.kv_layer_ids,
      .tp_rank = m.tp_rank,
      .tp_size = m.tp_size};
  if (session.refusal.ok()) {
    const plan::PositionalState states{.pointers = m.pools.state_pointers,
                                       .item_lengths = m.pools.state_item_lengths,
                                       .layer_ids = m.pools.state_layer_ids,
                                       .tp_rank = m.tp_rank,
                                       .tp_size = m.tp_size};
    const auto layout = plan::layout_of_peer(self_.layout, self_.place, context, lists, states,
                                             "decode " + m.session_name);
    if (!layout.ok()) {
      session.refusal = layout.status();
    } else {
      auto lanes = plan::pair_lanes(self_.layout, *layout, "prefill " + self_.control.host_port(),
                                    "decode " + m.session_name);
      if (lanes.ok()) {
        session.lanes = std::move(*lanes);
      } else {
        session.refusal = lanes.status();
      }
    }
    session.writes =
        plan::shares_for_reference(self_.place, self_.attention, self_.layer_split, m.tp_size);
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

  if (const auto& all = to.metadata.all_cp_ranks;
      all && self_.place.cp_size > 1 && *all != all_cp_ranks()) {
    KVF_REACHED("a decode rank and a prefill rank differed in which CP ranks send");
    const auto who = [](bool every) {
      return every ? "a part from every CP rank" : "everything from the first CP rank";
    };
    use.destinations[peer] = std::move(to);
    return fail(id, use,
                Status(Code::kRefused,
                       fmt::format("{}: {} waits for {}, this prefill rank (cp {} of {}) sends {}: "
                                   "the instance was replaced, or its ranks differ in all_cp_ranks",
                                   room_text(use.room), describe_peer(peer), who(!all_cp_ranks()),
                                   self_.place.cp_rank, self_.place.cp_size, who(all_cp_ranks()))),
                false, now);
  }
  if (!to.metadata.device_pages.empty()) {
    const std::size_t pages = to.metadata.device_pages.size();
    use.destinations[peer] = std::move(to);
    return fail(id, use,
                Status(Code::kRefused,
                       fmt::format("{}: {} lent {} pages of a second list (pools that stay on the "
                                   "device, HiSparse), which is not supported",
                                   room_text(use.room), describe_peer(peer), pages)),
                false, now);
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
  // Of a room that this life was not told of: a former life at this address may have written it.
  const auto ack_unheard = [&] {
    if (!peer.is_native() && now < started_ + settings_.hold_time) {
      KVF_REACHED("a drained answer was withheld because a former life may have written");
      return;
    }
    ack_now();
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
    return ack_unheard();
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
  bool heard = false;
  if (known ? pending_.at(m.room).metadata.size() + pending_.at(m.room).aborted.size() <
                  settings_.sessions_max
            : pending_.size() < settings_.pending_rooms_max) {
    if (!known) pending_deadlines_.set(m.room, now + settings_.bootstrap_timeout);
    Pending& pending = pending_[m.room];
    heard = pending.metadata.erase(peer) > 0;
    pending.aborted.insert(peer);
  }
  heard || peer.is_native() ? ack_now() : ack_unheard();
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

}  // namespace kvferry::proto
