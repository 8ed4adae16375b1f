#include "src/proto/decode.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/base/check.h"
#include "src/base/mark.h"
#include "src/plan/geometry.h"
#include "src/plan/planner.h"
#include "src/proto/text.h"

namespace kvferry::proto {

DecodeManager::DecodeManager(DecodeSelf self, const Settings& settings, Ports ports)
    : self_(std::move(self)),
      settings_(settings),
      ports_(ports),
      leases_(ports_.plane, settings_, counters_) {
  pool_pages_ = plan::page_limit(self_.layout);
  kinds_ = self_.state_kinds.empty() ? plan::kinds_of(self_.layout) : self_.state_kinds;
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component == Component::kAux)
      aux_rows_ = aux_rows_ == 0 ? slab.item_count : std::min(aux_rows_, slab.item_count);
  }
  const auto slabs_of = [this](plan::Shares share) {
    return std::make_shared<const std::vector<GrantSlab>>(plan::grant_slabs(self_.layout, share));
  };
  kv_slabs_ = slabs_of(plan::kKvShare);
  aux_slabs_ = slabs_of(0);
  for (std::size_t k = 0; k < kStateKinds; ++k)
    state_slabs_[k] = slabs_of(plan::share_of(static_cast<StateKind>(k)));
}

DecodeManager::Use* DecodeManager::find(UseId id) {
  const auto it = uses_.find(id);
  return it == uses_.end() ? nullptr : &it->second;
}

const RoomView* DecodeManager::view(UseId use) const {
  const auto it = uses_.find(use);
  return it == uses_.end() ? nullptr : &it->second.view;
}

std::vector<SourceView> DecodeManager::sources(UseId use) const {
  std::vector<SourceView> views;
  const auto it = uses_.find(use);
  if (it == uses_.end()) return views;
  for (const Source& s : it->second.sources) {
    views.push_back({{.tp_rank = s.place[2],
                      .pp_rank = s.place[3],
                      .cp_rank = s.place[1],
                      .dp_rank = s.place[0]},
                     s.address,
                     s.native,
                     s.dummy,
                     s.writes_aux,
                     s.dummy ? 0 : s.writes});
  }
  return views;
}

// --- the engine's calls

Result<UseId> DecodeManager::open(RoomId room, const Address& bootstrap, Time now) {
  KVF_RETURN_IF_ERROR(may_open({.room = room,
                                .side = "decode",
                                .stopping = stopping_,
                                .is_open = live_.contains(room),
                                .open_rooms = uses_.size(),
                                .rooms_max = settings_.rooms_max}));
  if (const auto it = by_room_.find(room); it != by_room_.end()) {
    for (const UseId other : it->second) {
      const Use& old = uses_.at(other);
      const bool foreign = std::any_of(old.sources.begin(), old.sources.end(),
                                       [](const Source& s) { return !s.native && !s.dummy; });
      if (foreign && !old.view.pages_reusable) {
        // A late Success of the first use would complete the second: foreign messages carry only
        // the number.
        KVF_REACHED("a room number in quarantine was refused");
        return Status(Code::kUnavailable,
                      fmt::format("{} with {} is in quarantine: its last use has not come to rest",
                                  room_text(room), bootstrap.host_port()));
      }
    }
  }
  if (!instances_.contains(bootstrap) && instances_.size() >= settings_.sessions_max) {
    return Status(Code::kExhausted,
                  fmt::format("{} prefill instances are known (sessions_max)", instances_.size()));
  }
  const UseId id{next_id_++};
  Use& use = uses_[id];
  use.room = room;
  use.bootstrap = bootstrap;
  live_[room] = id;
  by_room_[room].insert(id);
  ++counters_.rooms_opened;
  room_deadlines_.set(id, now + settings_.bootstrap_timeout);
  Instance& instance = instances_[bootstrap];
  instance.uses.insert(id);
  if (!instance.beating) {
    instance.beating = true;
    beat_deadlines_.set(bootstrap, now + settings_.heartbeat_interval);
  }
  publish(id, use);
  if (!instance.topology || instance.stale) fetch_instance(bootstrap, instance, now);
  return id;
}

Status DecodeManager::init(UseId id, std::optional<std::uint32_t> prefill_dp_rank, Time now) {
  Use* use = find(id);
  if (use == nullptr) return Status(Code::kNotFound, "the room was cleared");
  if (use->initialised)
    return Status(Code::kInvalidArgument, room_text(use->room) + " was initialised before");
  use->initialised = true;
  use->dp_rank = prefill_dp_rank;
  resolve(id, *use, now);
  return {};
}

Status DecodeManager::send_metadata(UseId id, RoomMetadata metadata, Time now) {
  Use* use = find(id);
  if (use == nullptr) return Status(Code::kNotFound, "the room was cleared");
  if (is_terminal(use->view.state))
    return Status(Code::kAborted, fmt::format("{} has ended: {}", room_text(use->room),
                                              to_string(use->view.state)));
  if (use->waiting_metadata || !use->sources.empty())
    return Status(Code::kInvalidArgument, room_text(use->room) + ": metadata was sent before");
  if (metadata.pages.size() > settings_.pages_per_room_max) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {} pages are above pages_per_room_max {}", room_text(use->room),
                              metadata.pages.size(), settings_.pages_per_room_max));
  }
  for (const PageIndex page : metadata.pages) {
    if (page < 0 || static_cast<std::uint32_t>(page) >= pool_pages_) {
      return Status(Code::kInvalidArgument, fmt::format("{}: page {} outside pool of {}",
                                                        room_text(use->room), page, pool_pages_));
    }
  }
  if (metadata.aux_row && *metadata.aux_row >= aux_rows_) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: aux row {} outside pool of {}", room_text(use->room),
                              *metadata.aux_row, aux_rows_));
  }
  if (metadata.prefix_tokens % self_.layout.page_tokens != 0) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("{}: prefix of {} tokens is no multiple of the page size {}",
                    room_text(use->room), metadata.prefix_tokens, self_.layout.page_tokens));
  }
  if (const auto lists =
          plan::state_lists(self_.layout, metadata.states, settings_.pages_per_room_max);
      !lists.ok())
    return Status(lists.status().code(),
                  fmt::format("{}: {}", room_text(use->room), lists.status().message()));
  use->waiting_metadata = std::move(metadata);
  if (use->resolved) lend_and_announce(id, *use, now);
  return {};
}

void DecodeManager::abort(UseId id, Status reason, Time now) {
  if (Use* use = find(id)) fail(id, *use, std::move(reason), false, now);
}

void DecodeManager::clear(UseId id, Time now) {
  Use* use = find(id);
  if (use == nullptr) return;
  fail(id, *use,
       Status(Code::kAborted, room_text(use->room) + " was cleared by its engine before it ended"),
       false, now);
  if (const auto it = live_.find(use->room); it != live_.end() && it->second == id) live_.erase(it);
  use->cleared = true;
  drop_if_done(id);
}

void DecodeManager::stop(Time now) {
  stopping_ = true;
  std::vector<UseId> ids;
  for (const auto& [id, use] : uses_) ids.push_back(id);
  for (const UseId id : ids) {
    if (Use* use = find(id))
      fail(id, *use, Status(Code::kAborted, room_text(use->room) + ": the decode endpoint stopped"),
           false, now);
  }
  std::vector<Token> tokens;
  for (const auto& [token, session] : sessions_) tokens.push_back(token);
  for (const Token token : tokens)
    end_session(token, Status(Code::kAborted, "the decode endpoint stopped"), true, now);
  for (const auto& [address, instance] : instances_) {
    lookup_deadlines_.clear(address);
    beat_deadlines_.clear(address);
  }
}

bool DecodeManager::is_quiet() const {
  return std::all_of(uses_.begin(), uses_.end(),
                     [](const auto& entry) { return entry.second.view.pages_reusable; });
}

// --- lending

std::vector<GrantGroup> DecodeManager::groups_for(const Source& source,
                                                  const RoomMetadata& metadata,
                                                  const plan::StateLists& states) const {
  std::vector<GrantGroup> groups;
  const auto add = [&](plan::Shares share, const GrantSlabs& slabs,
                       const std::vector<PageIndex>& items) {
    if (items.empty() || (source.writes & share) == 0) return;
    groups.push_back({slabs, std::vector<std::uint32_t>(items.begin(), items.end())});
  };
  add(plan::kKvShare, kv_slabs_, metadata.pages);
  for (std::size_t k = 0; k < kStateKinds; ++k)
    add(plan::share_of(static_cast<StateKind>(k)), state_slabs_[k], states[k]);
  if (metadata.aux_row && source.writes_aux) groups.push_back({aux_slabs_, {*metadata.aux_row}});
  return groups;
}

// Native ranks say what they hold: who writes follows from the layouts, one writer for each byte,
// which is proved; a byte that nobody holds is found before a page is lent.
Result<std::vector<plan::Shares>> DecodeManager::writers_of(const Use& use,
                                                            const Instance& instance) const {
  const plan::Party self{fmt::format("decode tp{} pp{} at {}", self_.place.tp_rank,
                                     self_.place.pp_rank, self_.control.host_port()),
                         &self_.layout};
  std::vector<plan::Shares> writes;
  for (const std::uint32_t cp : use.mapping.cp_ranks) {  // each CP rank sends its part of all
    std::vector<plan::Party> parties;
    for (const PlaceKey& key : use.order) {
      if (key[1] != cp) continue;
      const Link& link = instance.links.at(key);
      parties.push_back({fmt::format("prefill cp{} tp{} pp{} at {}", key[1], key[2], key[3],
                                     link.address.host_port()),
                         &link.info.layout});
    }
    const auto depth = static_cast<std::uint32_t>(settings_.model_layers);
    const auto elected = plan::elect_writers(parties, self, depth);
    if (!elected.ok()) return elected.status();
    KVF_RETURN_IF_ERROR(plan::prove_writers(parties, *elected, self, depth));
    for (const plan::Shares shares : *elected)  // the first CP rank sends all state
      writes.push_back(cp == use.mapping.cp_ranks.front() ? shares : shares & plan::kKvShare);
  }
  return writes;
}

// Which of the sources write. Of a reference instance all, but only the selected rank under MLA
// (the others get a dummy message). Where native ranks stand beside foreign ones: for each head the
// lowest rank that holds it.
Status DecodeManager::elect(Use& use, Instance& instance) const {
  const std::uint32_t first_tp = use.mapping.tp_ranks.front(),
                      last_pp = use.mapping.pp_ranks.back(),
                      first_cp = use.mapping.cp_ranks.front();
  const std::vector<plan::Shares>* writes = nullptr;
  if (instance.all_native) {
    auto known = instance.writers.find(*use.dp_rank);
    if (known == instance.writers.end())
      known = instance.writers.emplace(*use.dp_rank, writers_of(use, instance)).first;
    if (!known->second.ok()) return known->second.status();
    writes = &*known->second;
  }
  for (std::size_t i = 0; i < use.connected.size(); ++i) {
    Source& source = use.connected[i];
    const std::uint32_t tp = source.place[2];
    source.writes_aux = source.native && tp == first_tp && source.place[3] == last_pp &&
                        source.place[1] == first_cp;
    if (writes != nullptr) {
      source.writes = writes->at(i);
      source.dummy = source.writes == 0 && !source.writes_aux;
      if (source.dummy) KVF_REACHED("a native rank was elected not to write");
    } else if (self_.attention.same_everywhere()) {
      source.dummy = tp != first_tp;
    } else if (source.native && self_.total_kv_heads > 0) {
      const plan::HeadRange own = plan::heads_of_rank(self_.total_kv_heads, use.shape.tp_size, tp);
      for (const std::uint32_t lower : use.mapping.tp_ranks) {
        if (lower < tp &&
            plan::heads_of_rank(self_.total_kv_heads, use.shape.tp_size, lower) == own)
          source.dummy = true;
      }
    }
    if (!source.native) source.writes_aux = !source.dummy;
  }
  return {};
}

void DecodeManager::lend_and_announce(UseId id, Use& use, Time now) {
  const RoomMetadata metadata = std::move(*use.waiting_metadata);
  use.waiting_metadata.reset();
  const auto lists = plan::state_lists(self_.layout, metadata.states, settings_.pages_per_room_max);
  KVF_CHECK(lists.ok(), "lists of state were checked when they came");
  std::vector<Source> sources = use.connected;
  for (const Source& source : sources) {
    if (source.native && !sessions_.contains(source.session)) {
      return fail(
          id, use,
          Status(Code::kPeerLost,
                 fmt::format("{}: the session with prefill rank {} ended before the room began",
                             room_text(use.room), source.address.host_port())),
          true, now);
    }
  }
  use.required = 0;
  for (const Source& source : sources) use.required += source.dummy ? 0 : 1;
  use.has_aux_row = metadata.aux_row.has_value();
  use.aux_row = metadata.aux_row.value_or(0);
  use.abort_generation = next_id_++;

  // Lend first, speak afterwards: a writer must find its grant in place.
  for (Source& source : sources) {
    if (source.native) {
      source.grant = ports_.entropy.token();
      grants_[source.grant] = id;
    }
    if (source.dummy) continue;
    auto lease =
        leases_.lend(id, source.grant, !source.native, groups_for(source, metadata, *lists));
    if (!lease.ok()) {
      use.sources = std::move(sources);
      return fail(id, use,
                  Status(lease.status().code(),
                         fmt::format("{}: {}", room_text(use.room), lease.status().message())),
                  false, now);
    }
    source.lease = *lease;
  }
  use.sources = std::move(sources);
  move_to(use.view.state, RoomState::kTransferring);
  room_deadlines_.set(
      id,
      now +
          settings_.waiting_timeout);  // from when the pages are lent, however long the engine took
  use.view.bytes = 0;
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component == Component::kAux) continue;
    const auto kind = state_of(slab.component);
    use.view.bytes += slab.item_bytes * (kind ? lists->at(static_cast<std::size_t>(*kind)).size()
                                              : metadata.pages.size());
  }
  for (const Source& source : use.sources) {
    wire::Metadata m;
    m.room = use.room;
    m.reply = self_.control;
    m.session_name = self_.session_name;
    m.grant = source.grant;
    m.dummy = source.dummy;
    m.writes_aux = source.writes_aux;
    m.required_destinations = source.required_destinations;
    m.prefix_tokens = metadata.prefix_tokens;
    if (!source.dummy) {
      m.pages = metadata.pages;
      m.aux_row = metadata.aux_row;
      m.writes = source.writes;
      if (use.shape.cp_size > 1) m.all_cp_ranks = use.mapping.cp_ranks.size() > 1;
      if (source.native) {
        m.states.assign(lists->begin(), lists->end());
        while (!m.states.empty() && m.states.back().empty()) m.states.pop_back();
      } else {
        for (const StateKind kind : kinds_)
          m.states.push_back(lists->at(static_cast<std::size_t>(kind)));
      }
    }
    if (source.native) {
      send_native(ports_.control, source.address, self_.control, source.session, std::move(m));
    } else {
      if (!source.dummy && !m.aux_row) m.aux_row = 0;
      if (auto frames = wire::encode_to_prefill(m, self_.foreign_dialect); frames.ok())
        ports_.control.send(source.address, std::move(*frames));
    }
  }
  publish(id, use);
}

void DecodeManager::on_completion(const Completion& completion, Time now) {
  if (completion.kind != Completion::Kind::kFence) return;
  leases_.on_fence(FenceId{completion.id}, now);
  for (const UseId id : leases_.take_returned()) {
    if (Use* use = find(id)) {
      settle(id, *use);
      drop_if_done(id);
    }
  }
}

// --- how a room ends

void DecodeManager::fail(UseId id, Use& use, Status reason, bool from_other, Time now) {
  if (!move_to(use.view.state, RoomState::kFailed)) return;
  use.view.failure = {std::move(reason), from_other};
  ++(use.view.failure.status.code() == Code::kAborted ? counters_.rooms_aborted
                                                      : counters_.rooms_failed);
  ports_.trace.trace(
      use.view.failure.status.code() == Code::kAborted ? Severity::kInfo : Severity::kError,
      use.view.failure.status.to_string());
  room_deadlines_.clear(id);
  retry_deadlines_.clear(id);
  use.waiting_metadata.reset();
  for (Source& source : use.sources) {
    if (source.done) continue;
    wire::Abort abort{use.room, self_.control, use.abort_generation, source.grant,
                      use.view.failure.status.message()};
    if (source.native) {
      if (sessions_.contains(source.session))
        send_native(ports_.control, source.address, self_.control, source.session,
                    std::move(abort));
    } else if (auto frames = wire::encode_to_prefill(abort, self_.foreign_dialect); frames.ok()) {
      ports_.control.send(source.address, std::move(*frames));
    }
  }
  // A foreign source that said Success is quiet only in a room that succeeds as a whole; a native
  // one is quiet at its word.
  for (Source& source : use.sources) {
    if (!source.lease) continue;
    const auto session = sessions_.find(source.session);
    leases_.take_back(
        *source.lease, now,
        session != sessions_.end() ? session->second.last_permission + settings_.write_lease : now);
  }
  settle(id, use);
}

void DecodeManager::settle(UseId id, Use& use) {
  if (is_terminal(use.view.state)) {
    use.view.pages_reusable =
        std::all_of(use.sources.begin(), use.sources.end(),
                    [&](const Source& s) { return !s.lease || leases_.is_home(*s.lease); });
  }
  publish(id, use);
}

void DecodeManager::publish(UseId id, Use& use) {
  ports_.rooms.on_room(id, use.view);
}

void DecodeManager::drop_if_done(UseId id) {
  const auto it = uses_.find(id);
  if (it == uses_.end() || !it->second.cleared || !it->second.view.pages_reusable) return;
  Use& use = it->second;
  for (const Source& source : use.sources) {
    if (source.lease) leases_.forget(*source.lease);
    if (source.native) grants_.erase(source.grant);
  }
  for (const Source& source : use.connected) {
    if (const auto session = sessions_.find(source.session); session != sessions_.end())
      session->second.uses.erase(id);
  }
  if (const auto instance = instances_.find(use.bootstrap); instance != instances_.end()) {
    instance->second.uses.erase(id);
  }
  room_deadlines_.clear(id);
  retry_deadlines_.clear(id);
  const auto room = by_room_.find(use.room);
  room->second.erase(id);
  if (room->second.empty()) by_room_.erase(room);
  uses_.erase(it);
}

// --- time

void DecodeManager::advance(Time now) {
  leases_.advance(now);
  for (const UseId id : leases_.take_returned()) {
    if (Use* use = find(id)) {
      settle(id, *use);
      drop_if_done(id);
    }
  }
  while (const auto id = room_deadlines_.pop_due(now)) {
    Use* use = find(*id);
    if (use == nullptr) continue;
    if (use->view.state == RoomState::kBootstrapping) {
      const Instance& instance = instances_.at(use->bootstrap);
      fail(*id, *use,
           Status(Code::kTimedOut,
                  fmt::format(
                      "{}: prefill instance {} not reached within {} s (bootstrap_timeout){}{}",
                      room_text(use->room), use->bootstrap.host_port(),
                      seconds(settings_.bootstrap_timeout), instance.last_error.empty() ? "" : ": ",
                      instance.last_error)),
           false, now);
    } else {
      std::string missing;
      for (const Source& s : use->sources) {
        if (!s.dummy && !s.done) missing += (missing.empty() ? "" : ", ") + s.address.host_port();
      }
      for (const Source& s : use->sources) {
        if (!s.native && !s.done) forget_link(*use, s.place);
      }
      fail(*id, *use,
           Status(Code::kTimedOut, fmt::format("{}: {} of {} prefill ranks said Success within {} "
                                               "s (waiting_timeout); waiting for {}",
                                               room_text(use->room), use->responded.size(),
                                               use->required, seconds(settings_.waiting_timeout),
                                               missing.empty() ? "the engine's pages" : missing)),
           false, now);
    }
    drop_if_done(*id);
  }
  while (const auto id = retry_deadlines_.pop_due(now)) {
    if (Use* use = find(*id)) resolve(*id, *use, now);
  }
  while (const auto address = lookup_deadlines_.pop_due(now)) {
    const auto it = instances_.find(*address);
    if (it == instances_.end()) continue;
    const bool needed = std::any_of(it->second.uses.begin(), it->second.uses.end(), [&](UseId id) {
      const Use* use = find(id);
      return use != nullptr && !use->resolved && !is_terminal(use->view.state);
    });
    if (needed) fetch_instance(*address, it->second, now);
  }
  while (const auto address = beat_deadlines_.pop_due(now)) {
    const auto it = instances_.find(*address);
    if (it == instances_.end()) continue;
    if (it->second.uses.empty() && it->second.links.empty()) {
      if (!it->second.fetching && it->second.lookups.empty()) {
        instances_.erase(it);
      } else {
        beat_deadlines_.set(*address, now + settings_.heartbeat_interval);
      }
      continue;
    }
    http(Call::kHealth, *address, "GET", "/health", "", {}, {});
  }
  while (const auto token = session_deadlines_.pop_due(now)) {
    const auto it = sessions_.find(*token);
    if (it == sessions_.end()) continue;
    Session& session = it->second;
    const Time dies = session.open ? session.last_heard + settings_.ping_silence
                                   : session.opened_at + settings_.session_open_timeout;
    if (dies <= now) {
      KVF_REACHED("a prefill rank fell silent");
      const Status reason(
          Code::kPeerLost,
          session.open
              ? fmt::format("silent for {} ms (ping_silence)", milliseconds(settings_.ping_silence))
              : fmt::format("did not answer the registration within {} ms (session_open_timeout)",
                            milliseconds(settings_.session_open_timeout)));
      end_session(*token, reason, true, now);
      continue;
    }
    if (!session.open && session.next_register <= now) {
      KVF_REACHED("a registration was sent again");
      send_register(session, *token, session.peer, true, now);
    }
    session_deadlines_.set(*token, session.open ? dies : std::min(dies, session.next_register));
  }
}

Time DecodeManager::next_deadline() const {
  return std::min({leases_.next_deadline(), room_deadlines_.next(), lookup_deadlines_.next(),
                   beat_deadlines_.next(), session_deadlines_.next(), retry_deadlines_.next()});
}

}  // namespace kvferry::proto
