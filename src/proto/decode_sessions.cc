// What a decode rank and its prefill ranks say to each other: sessions opened and ended, messages
// taken apart and handed to the room that they belong to.
#include "src/proto/decode.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/base/mark.h"
#include "src/plan/components.h"
#include "src/plan/geometry.h"
#include "src/proto/text.h"

namespace kvferry::proto {

void DecodeManager::send_register(Session& session, Token token, const Address& peer, bool native,
                                  Time now) {
  wire::Register m;
  m.reply = self_.control;
  m.session_name = self_.session_name;
  m.tp_rank = self_.place.tp_rank;
  m.tp_size = self_.place.tp_size;
  if (native) {
    m.life = self_.life;
    m.plane = ports_.plane.address();
    m.place = self_.place;
    m.layout = self_.layout;
    m.expected_layout = session.layout_hash;
    session.next_register = now + settings_.register_retry;
    send_native(ports_.control, peer, self_.control, token, std::move(m));
    return;
  }
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component == Component::kAux) {
      m.pools.aux_pointers.push_back(slab.base);
    } else if (!state_of(slab.component)) {
      m.pools.kv_pointers.push_back(slab.base);
      m.pools.kv_item_lengths.push_back(slab.item_bytes);
      if (m.pools.kv_item_length == 0) m.pools.kv_item_length = slab.item_bytes;
      if (kinds_.size() > 0 &&
          kinds_.front() == StateKind::kMamba)  // as the reference's hybrids do
        m.pools.kv_layer_ids.push_back(slab.layer);
    }
  }
  for (const StateKind kind : kinds_) {
    auto& pointers = m.pools.state_pointers.emplace_back();
    auto& lengths = m.pools.state_item_lengths.emplace_back();
    auto& dims = m.pools.state_dims.emplace_back();
    auto& ids = m.pools.state_layer_ids.emplace_back();
    for (const plan::StatePool& pool : plan::state_pools(self_.layout, kind)) {
      pointers.push_back(pool.base);
      lengths.push_back(static_cast<std::uint32_t>(pool.item_bytes));
      ids.push_back(pool.layer);
      if (plan::row_of(kind).sharding != plan::Sharding::kBlocks) continue;
      std::uint32_t steps = 0;
      for (const Slab& block : pool.blocks) steps += block.head_count;
      dims.push_back(steps);
    }
  }
  if (auto frames = wire::encode_to_prefill(m, self_.foreign_dialect); frames.ok())
    ports_.control.send(peer, std::move(*frames));
}

void DecodeManager::connect(Use& use, Instance& instance, UseId id, Time now) {
  const wire::Topology& topology = *instance.topology;
  use.shape = {.tp_size = topology.tp_size,
               .pp_size = topology.pp_size,
               .cp_size = topology.cp_size,
               .dp_size = topology.dp_size};
  for (const PlaceKey& key : use.order) {
    Link& link = instance.links.at(key);
    if (link.native) {
      if (link.session.is_zero()) {
        if (sessions_.size() >= settings_.sessions_max) {
          return fail(
              id, use,
              Status(Code::kExhausted, fmt::format("{}: {} sessions are open (sessions_max)",
                                                   room_text(use.room), sessions_.size())),
              false, now);
        }
        link.session = ports_.entropy.token();
        Session& session = sessions_[link.session];
        session.peer = link.address;
        session.bootstrap = use.bootstrap;
        session.place = key;
        session.layout_hash = layout_hash(link.info.layout);
        session.name = fmt::format("prefill dp{} cp{} tp{} pp{} at {}", key[0], key[1], key[2],
                                   key[3], link.address.host_port());
        session.opened_at = session.last_heard = session.last_permission = now;
        ++counters_.sessions_opened;
        send_register(session, link.session, link.address, true, now);
        session_deadlines_.set(
            link.session, std::min(session.next_register, now + settings_.session_open_timeout));
      }
      sessions_.at(link.session).uses.insert(id);
    } else if (!link.registered) {
      Session none;
      send_register(none, {}, link.address, false, now);
      link.registered = true;
    }
    const RankPlace place{.tp_rank = key[2],
                          .tp_size = use.shape.tp_size,
                          .pp_rank = key[3],
                          .pp_size = use.shape.pp_size,
                          .cp_rank = key[1],
                          .cp_size = use.shape.cp_size};
    Source source;
    source.place = key;
    source.address = link.address;
    source.unique_rank = place.unique_rank();
    const auto& tps = use.mapping.tp_ranks;
    source.required_destinations = use.mapping.required_destinations[static_cast<std::size_t>(
        std::find(tps.begin(), tps.end(), key[2]) - tps.begin())];
    source.native = link.native;
    source.session = link.native ? link.session : Token{};
    use.connected.push_back(std::move(source));
  }
  if (Status status = elect(use, instance); !status.ok()) {
    KVF_REACHED("layouts that do not make up a whole were refused");
    return fail(id, use,
                Status(status.code(), fmt::format("{}: {}", room_text(use.room), status.message())),
                false, now);
  }
  use.resolved = true;
  move_to(use.view.state, RoomState::kWaitingForInput);
  room_deadlines_.set(id, now + settings_.waiting_timeout);
  publish(id, use);
  if (use.waiting_metadata) lend_and_announce(id, use, now);
}

void DecodeManager::end_session(Token token, Status reason, bool tell, Time now) {
  const auto it = sessions_.find(token);
  if (it == sessions_.end()) return;
  KVF_REACHED("a session ended on the decode side");
  const Session ended = std::move(it->second);
  sessions_.erase(it);
  session_deadlines_.clear(token);
  ++counters_.sessions_ended;
  ports_.trace.trace(reason.code() == Code::kAborted ? Severity::kInfo : Severity::kWarning,
                     fmt::format("{}: session over: {}", ended.name, reason.message()));
  if (tell)
    send_native(ports_.control, ended.peer, self_.control, token, wire::Unknown{reason.message()});
  if (const auto instance = instances_.find(ended.bootstrap); instance != instances_.end()) {
    const auto link = instance->second.links.find(ended.place);
    if (link != instance->second.links.end() && link->second.session == token)
      link->second.session = {};
    instance->second.stale = true;  // the rank may have been replaced: the next room asks again
  }
  for (const UseId id : ended.uses) {
    Use* use = find(id);
    if (use == nullptr) continue;
    const bool still_needed =
        std::any_of(use->sources.begin(), use->sources.end(),
                    [&](const Source& s) { return s.session == token && !s.done && !s.dummy; });
    if (!is_terminal(use->view.state) && (use->sources.empty() || still_needed)) {
      fail(id, *use,
           Status(reason.code(),
                  fmt::format("{}: {}: {}", room_text(use->room), ended.name, reason.message())),
           true, now);
    }
    for (Source& source : use->sources) {
      if (source.session == token && source.lease)
        leases_.take_back(*source.lease, now, ended.last_permission + settings_.write_lease);
    }
    settle(id, *use);
    drop_if_done(id);
  }
}

// --- messages

void DecodeManager::on_frames(const wire::Frames& frames, Time now) {
  if (wire::is_native(frames)) {
    const auto frame = wire::decode_native(frames);
    if (is_readable(frame, counters_, ports_.trace)) on_native(*frame, now);
    return;
  }
  auto message = wire::decode_at_decode(frames);
  if (!is_readable(message, counters_, ports_.trace)) return;
  if (const auto* m = std::get_if<wire::AuxData>(&*message)) return on_aux_data(*m);
  if (const auto* m = std::get_if<wire::Done>(&*message)) {
    const auto live = live_.find(m->room);
    if (live == live_.end()) {
      ++counters_.unexpected_messages;
      return;
    }
    Use& use = uses_.at(live->second);
    // A frame of the reference says nothing to a room that no foreign rank takes part in: it is of
    // another use of the number.
    const auto& known = use.sources.empty() ? use.connected : use.sources;
    if (!known.empty() && std::none_of(known.begin(), known.end(),
                                       [](const Source& s) { return !s.native && !s.dummy; })) {
      ++counters_.unexpected_messages;
      return;
    }
    Source* source = nullptr;
    for (Source& s : use.sources) {
      if (!s.native && s.unique_rank == m->unique_rank) source = &s;
    }
    return on_done(live->second, use, source, *m, now);
  }
  if (const auto* m = std::get_if<wire::AbortAck>(&*message)) {
    if (!m->unique_rank) return;  // heard, but no promise
    const auto known = by_room_.find(m->room);
    if (known == by_room_.end()) return;
    for (const UseId id : std::set<UseId>(known->second)) {
      Use& use = uses_.at(id);
      for (Source& source : use.sources) {
        if (source.native || source.unique_rank != *m->unique_rank) continue;
        const bool drained =
            m->generation ? *m->generation == use.abort_generation : !source.said_failed;
        if (drained) on_abort_ack(id, use, source, *m, now);
      }
      drop_if_done(id);
    }
    return;
  }
  ++counters_.unexpected_messages;  // staging messages without staging
}

std::pair<UseId, DecodeManager::Source*> DecodeManager::find_grant(Token grant, Token session) {
  const auto it = grants_.find(grant);
  if (it == grants_.end()) return {};
  Use* use = find(it->second);
  if (use == nullptr) return {};
  for (Source& source : use->sources) {
    if (source.grant == grant && source.session == session) return {it->second, &source};
  }
  return {};
}

void DecodeManager::on_native(const wire::NativeFrame& frame, Time now) {
  if (const auto* m = std::get_if<wire::Unknown>(&frame.message)) {
    const Code code = m->reason.starts_with("refused") ? Code::kRefused
                      : m->reason.ends_with("stopped") ? Code::kAborted
                                                       : Code::kPeerLost;
    return end_session(frame.session, Status(code, m->reason), false, now);
  }
  const auto it = sessions_.find(frame.session);
  if (it == sessions_.end()) {
    KVF_REACHED("a message of an unknown session was answered on the decode side");
    send_native(ports_.control, frame.reply, self_.control, frame.session,
                wire::Unknown{"session is not known here"});
    return;
  }
  Session& session = it->second;
  session.last_heard = now;
  if (const auto* m = std::get_if<wire::Ping>(&frame.message)) {
    session.open = true;
    session.last_permission = now;
    session_deadlines_.set(frame.session, now + settings_.ping_silence);
    send_native(ports_.control, session.peer, self_.control, frame.session,
                wire::Pong{m->asked_at_ns});
    return;
  }
  if (const auto* m = std::get_if<wire::Done>(&frame.message)) {
    const auto [id, source] = find_grant(m->grant, frame.session);
    if (source == nullptr) {
      KVF_REACHED("a word about a use that is over was ignored");
      return;
    }
    return on_done(id, uses_.at(id), source, *m, now);
  }
  if (const auto* m = std::get_if<wire::Abort>(&frame.message)) {
    const auto [id, source] = find_grant(m->grant, frame.session);
    if (source == nullptr) return;
    Use& use = uses_.at(id);
    fail(id, use,
         Status(Code::kAborted,
                fmt::format("{}: {}: {}", room_text(use.room), session.name, m->reason)),
         true, now);
    drop_if_done(id);
    return;
  }
  if (const auto* m = std::get_if<wire::AbortAck>(&frame.message)) {
    const auto [id, source] = find_grant(m->grant, frame.session);
    if (source == nullptr) return;
    on_abort_ack(id, uses_.at(id), *source, *m, now);
    drop_if_done(id);
    return;
  }
  ++counters_.unexpected_messages;
}

void DecodeManager::on_done(UseId id, Use& use, Source* source, const wire::Done& done, Time now) {
  if (done.state == RoomState::kFailed) {
    if (source != nullptr) source->said_failed = true;
    // Foreign ranks say no reason; any of them may have lost our registration.
    for (const Source& s : use.sources) {
      if (!s.native && !s.done) forget_link(use, s.place);
    }
    // A native source says Done only when nothing of the room is in flight.
    if (source != nullptr && source->native) {
      source->done = true;  // it needs no Abort
      if (source->lease) leases_.said_quiet(*source->lease);
    }
    fail(id, use,
         Status(
             Code::kAborted,
             fmt::format("{}: prefill rank {}{} failed{}{}", room_text(use.room), done.unique_rank,
                         source != nullptr ? " at " + source->address.host_port() : "",
                         done.reason.empty() ? "" : ": ", done.reason)),
         true, now);
    settle(id, use);
    drop_if_done(id);
    return;
  }
  if (done.state != RoomState::kSuccess) {
    ++counters_.unexpected_messages;
    return;
  }
  if (source != nullptr && source->native) {
    if (source->dummy || source->done) return;
    if (source->lease) leases_.said_quiet(*source->lease);
  }
  if (source != nullptr) source->done = true;
  if (is_terminal(use.view.state)) {
    settle(id, use);
    drop_if_done(id);
    return;
  }
  if (use.sources.empty()) {
    KVF_REACHED("a success came before the room's pages were lent");
    ++counters_.unexpected_messages;  // of an earlier use of the number
    return;
  }
  use.responded.insert(source != nullptr ? source->unique_rank : done.unique_rank);
  if (use.responded.size() >= use.required) {
    move_to(use.view.state, RoomState::kSuccess);
    ++counters_.rooms_succeeded;
    counters_.bytes_moved += use.view.bytes;
    room_deadlines_.clear(id);
    // All expected ranks have said Success: their pages are home.
    for (Source& s : use.sources) {
      if (s.lease) leases_.said_quiet(*s.lease);
    }
  }
  settle(id, use);
}

void DecodeManager::on_abort_ack(UseId id, Use& use, Source& source, const wire::AbortAck&, Time) {
  if (!is_terminal(use.view.state)) {
    ++counters_.unexpected_messages;  // we did not abort: the answer is to somebody else's question
    return;
  }
  KVF_REACHED("a drained answer brought pages home");
  if (source.lease) leases_.said_quiet(*source.lease);
  settle(id, use);
}

// From foreign ranks only; native ones send their rows over the data plane.
void DecodeManager::on_aux_data(const wire::AuxData& m) {
  const auto refuse = [&](std::string why) {
    ++counters_.refused_aux;
    ports_.trace.trace(Severity::kWarning,
                       fmt::format("aux data for {} refused: {}", room_text(m.room), why));
  };
  const auto live = live_.find(m.room);
  if (live == live_.end()) return refuse("the room is not open here");
  Use& use = uses_.at(live->second);
  if (is_terminal(use.view.state)) return refuse("the room has ended");
  const bool expected = std::any_of(use.sources.begin(), use.sources.end(),
                                    [](const Source& s) { return !s.native && !s.dummy; });
  if (!expected) return refuse("no foreign rank sends for it, or its row is not lent yet");
  if (!use.has_aux_row || m.row != use.aux_row)
    return refuse(fmt::format("row {} was not lent", m.row));
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component != Component::kAux || slab.layer != m.buffer) continue;
    if (m.row >= slab.item_count)
      return refuse(fmt::format("row {} outside pool of {}", m.row, slab.item_count));
    if (m.bytes.size() != slab.item_bytes)
      return refuse(fmt::format("{} bytes for a row of {}", m.bytes.size(), slab.item_bytes));
    ports_.memory.store(slab.base + std::uint64_t{m.row} * slab.item_stride, m.bytes);
    return;
  }
  refuse(fmt::format("buffer {} of {}", m.buffer, aux_slabs_->size()));
}

// A foreign rank that failed a room or let it wait to its deadline may be another process by now,
// that never heard our registration: the next room looks it up and registers again.
void DecodeManager::forget_link(const Use& use, PlaceKey place) {
  KVF_REACHED("a foreign rank will be looked up again");
  if (const auto instance = instances_.find(use.bootstrap); instance != instances_.end())
    instance->second.links.erase(place);
}

}  // namespace kvferry::proto
