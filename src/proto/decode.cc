#include "src/proto/decode.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/base/mark.h"
#include "src/plan/planner.h"

namespace kvferry::proto {
namespace {

std::string room_text(RoomId room) {
  return fmt::format("room {}", value_of(room));
}
std::int64_t seconds(Duration d) {
  return std::chrono::duration_cast<std::chrono::seconds>(d).count();
}
std::int64_t milliseconds(Duration d) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(d).count();
}

}  // namespace

DecodeManager::DecodeManager(DecodeSelf self, const Settings& settings, Ports ports)
    : self_(std::move(self)),
      settings_(settings),
      ports_(ports),
      leases_(ports_.plane, settings_, counters_) {
  std::vector<GrantSlab> kv, aux;
  for (const Slab& slab : self_.layout.slabs) {
    const bool is_aux = slab.component == Component::kAux;
    (is_aux ? aux : kv).push_back({slab.base, slab.item_stride, slab.item_bytes, slab.item_count});
    std::uint32_t& count = is_aux ? aux_rows_ : pool_pages_;
    count = count == 0 ? slab.item_count : std::min(count, slab.item_count);
  }
  const auto by_base = [](const GrantSlab& a, const GrantSlab& b) { return a.base < b.base; };
  std::sort(kv.begin(), kv.end(), by_base);
  std::sort(aux.begin(), aux.end(), by_base);
  kv_slabs_ = std::make_shared<const std::vector<GrantSlab>>(std::move(kv));
  aux_slabs_ = std::make_shared<const std::vector<GrantSlab>>(std::move(aux));
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
                     s.writes_aux});
  }
  return views;
}

// --- the engine's calls
// -------------------------------------------------------------------------------------------

Result<UseId> DecodeManager::open(RoomId room, const Address& bootstrap, Time now) {
  if (stopping_) return Status(Code::kAborted, room_text(room) + ": this endpoint is stopping");
  if (value_of(room) > kRoomMax)
    return Status(Code::kInvalidArgument, fmt::format("room {} is above 2^63-1", value_of(room)));
  if (live_.contains(room))
    return Status(Code::kAlreadyExists, room_text(room) + " is open on this decode rank");
  if (uses_.size() >= settings_.rooms_max) {
    return Status(Code::kExhausted,
                  fmt::format("{}: {} rooms are open (rooms_max)", room_text(room), uses_.size()));
  }
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

// --- looking the instance up
// --------------------------------------------------------------------------------------

void DecodeManager::http(Call kind, const Address& bootstrap, std::string method, std::string path,
                         std::string body, PlaceKey place, UseId use) {
  const CallId call{next_id_++};
  calls_[call] = {kind, bootstrap, place, use};
  if (kind == Call::kRank) instances_.at(bootstrap).lookups[place] = call;
  ports_.http.call(call, {std::move(method), bootstrap, std::move(path), std::move(body),
                          settings_.http_timeout});
}

void DecodeManager::fetch_instance(const Address& bootstrap, Instance& instance, Time) {
  if (instance.fetching) return;
  instance.fetching = true;
  lookup_deadlines_.clear(bootstrap);
  http(Call::kInstance, bootstrap, "GET", "/kvferry/v1/instance", "", {}, {});
}

void DecodeManager::on_http(CallId id, const HttpResponse& response, Time now) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  const Pending call = it->second;
  calls_.erase(it);
  if (call.kind == Call::kDpRank) return on_dp_rank(call.use, response, now);
  const auto instance = instances_.find(call.bootstrap);
  if (instance == instances_.end()) return;  // lost meanwhile
  switch (call.kind) {
    case Call::kInstance:
      return on_instance(call.bootstrap, instance->second, response, now);
    case Call::kTopology:
      return on_topology(call.bootstrap, instance->second, response, now);
    case Call::kRank:
      return on_rank(call.bootstrap, instance->second, call.place, response, now);
    case Call::kHealth:
      return on_health(call.bootstrap, instance->second, response, now);
    case Call::kDpRank:
      return;
  }
}

void DecodeManager::on_instance(const Address& bootstrap, Instance& instance,
                                const HttpResponse& response, Time now) {
  const bool refused = response.status == 404 || response.status == 405;
  if (refused) instance.ours = false;  // a server of the reference
  if (response.status != 200 && !refused) {
    // Whether it is one of ours is not known; a native rank must not be taken for a foreign one.
    KVF_REACHED("a server did not say whether it is one of ours");
    instance.fetching = false;
    instance.last_error = fmt::format(
        "bootstrap server {}: {} {:.200}", bootstrap.host_port(),
        response.status == 0 ? "no answer:" : fmt::format("status {}:", response.status),
        response.body);
    lookup_deadlines_.set(bootstrap, now + settings_.lookup_retry);
    return;
  }
  if (response.status == 200) {
    auto parsed = wire::parse_instance(response.body);
    if (parsed.ok()) {
      instance.ours = true;
      // What is said now replaces what was known. A link whose rank has another life or address is
      // another process.
      std::map<PlaceKey, Link> links;
      for (wire::InstanceRank& rank : parsed->ranks) {
        const PlaceKey key{rank.dp_rank, rank.place.cp_rank, rank.place.tp_rank,
                           rank.place.pp_rank};
        if (rank.native.version_min > wire::kNativeVersion) {
          ports_.trace.trace(Severity::kError,
                             fmt::format("prefill rank {} speaks native versions {}..{}, this rank "
                                         "up to {}: used as a foreign one",
                                         rank.address.host_port(), rank.native.version_min,
                                         rank.native.version_max, wire::kNativeVersion));
          parsed->foreign.push_back(std::move(rank));
          continue;
        }
        Link link{.address = rank.address,
                  .native = true,
                  .info = std::move(rank.native),
                  .session = {},
                  .registered = false};
        if (const auto old = instance.links.find(key); old != instance.links.end() &&
                                                       old->second.native &&
                                                       old->second.info.life == link.info.life) {
          link.session = old->second.session;
        }
        links[key] = std::move(link);
      }
      for (const wire::InstanceRank& rank : parsed->foreign) {
        const PlaceKey key{rank.dp_rank, rank.place.cp_rank, rank.place.tp_rank,
                           rank.place.pp_rank};
        const auto old = instance.links.find(key);
        const bool same = old != instance.links.end() && !old->second.native &&
                          old->second.address == rank.address;
        links[key] = same ? old->second
                          : Link{.address = rank.address,
                                 .native = false,
                                 .info = {},
                                 .session = {},
                                 .registered = false};
      }
      // A session whose rank is not in the snapshot any more would be kept alive by its pings for
      // ever.
      std::set<Token> kept;
      for (const auto& [key, link] : links) kept.insert(link.session);
      std::vector<Token> orphans;
      for (const auto& [key, link] : instance.links) {
        const auto session = sessions_.find(link.session);
        if (session != sessions_.end() && !kept.contains(link.session) &&
            session->second.uses.empty())
          orphans.push_back(link.session);
      }
      instance.links = std::move(links);
      for (const Token token : orphans)
        end_session(token, Status(Code::kAborted, "the rank is not registered any more"), true,
                    now);
    } else {
      ports_.trace.trace(
          Severity::kError,
          fmt::format("bootstrap server {}: {}", bootstrap.host_port(), parsed.status().message()));
    }
  }
  http(Call::kTopology, bootstrap, "GET",
       "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1", "", {},
       {});
}

Status DecodeManager::check_fit(const wire::Topology& topology, const Address& bootstrap) const {
  if (topology.page_size && *topology.page_size != self_.layout.page_tokens) {
    return Status(
        Code::kRefused,
        fmt::format("page size differs: prefill instance {} has {}, this decode rank has {}",
                    bootstrap.host_port(), *topology.page_size, self_.layout.page_tokens));
  }
  if (topology.kv_cache_dtype && *topology.kv_cache_dtype != self_.kv_cache_dtype) {
    return Status(
        Code::kRefused,
        fmt::format("kv cache dtype differs: prefill instance {} has {}, this decode rank has {}",
                    bootstrap.host_port(), *topology.kv_cache_dtype, self_.kv_cache_dtype));
  }
  const auto mapping = plan::map_ranks(self_.place, self_.attention,
                                       {.tp_size = topology.tp_size,
                                        .pp_size = topology.pp_size,
                                        .cp_size = topology.cp_size,
                                        .dp_size = topology.dp_size},
                                       settings_.all_cp_ranks);
  return mapping.ok() ? Status()
                      : Status(mapping.status().code(),
                               fmt::format("prefill instance {}: {}", bootstrap.host_port(),
                                           mapping.status().message()));
}

void DecodeManager::on_topology(const Address& bootstrap, Instance& instance,
                                const HttpResponse& response, Time now) {
  instance.fetching = false;
  Status problem;
  bool final = false;  // the instance cannot be used; asking again does not help
  if (response.status == 200) {
    auto topology = wire::parse_topology(response.body);
    if (topology.ok()) {
      problem = check_fit(*topology, bootstrap);
      final = !problem.ok();
      if (problem.ok()) instance.topology = std::move(*topology);
    } else {
      final = topology.status().code() == Code::kRefused;
      problem = Status(topology.status().code(),
                       fmt::format("bootstrap server {}: {}", bootstrap.host_port(),
                                   topology.status().message()));
    }
  } else {
    problem = Status(Code::kUnavailable,
                     fmt::format("bootstrap server {}: {} {:.200}", bootstrap.host_port(),
                                 response.status == 0 ? "no answer:"
                                                      : fmt::format("status {}:", response.status),
                                 response.body));
  }
  const std::set<UseId> uses = instance.uses;
  if (problem.ok()) {
    instance.stale = false;
    instance.last_error.clear();
    for (const UseId id : uses) {
      if (Use* use = find(id)) resolve(id, *use, now);
    }
    return;
  }
  instance.last_error = problem.message();
  if (final) {
    KVF_REACHED("an instance that does not fit was refused");
    instance.topology.reset();
    for (const UseId id : uses) {
      Use* use = find(id);
      if (use != nullptr && !use->resolved)
        fail(id, *use,
             Status(problem.code(), fmt::format("{}: {}", room_text(use->room), problem.message())),
             false, now);
    }
    return;
  }
  KVF_REACHED("an instance was asked for again");
  lookup_deadlines_.set(bootstrap, now + settings_.lookup_retry);
}

void DecodeManager::resolve(UseId id, Use& use, Time now) {
  if (use.resolved || !use.initialised || is_terminal(use.view.state)) return;
  Instance& instance = instances_.at(use.bootstrap);
  if (!instance.topology || instance.stale) {
    // A retry is due already: many rooms that wait ask no more often than one.
    if (!lookup_deadlines_.contains(use.bootstrap)) fetch_instance(use.bootstrap, instance, now);
    return;
  }
  const wire::Topology& topology = *instance.topology;
  if (!use.dp_rank) {
    if (topology.dp_size == 1) {
      use.dp_rank = 0;
    } else if (topology.follow_bootstrap_room && !settings_.force_query_dp_rank) {
      use.dp_rank = static_cast<std::uint32_t>(value_of(use.room) % topology.dp_size);
    } else {
      if (!use.asked_dp_rank) {
        use.asked_dp_rank = true;
        http(Call::kDpRank, use.bootstrap, "POST", "/query_dp_ranks",
             wire::to_json_query({use.room}), {}, id);
      }
      return;
    }
  }
  if (*use.dp_rank >= topology.dp_size) {
    return fail(id, use,
                Status(Code::kInvalidArgument,
                       fmt::format("{}: prefill dp rank {} of {} groups", room_text(use.room),
                                   *use.dp_rank, topology.dp_size)),
                false, now);
  }
  // The flag that decides whether all CP ranks send is the prefill side's to say where it can; ours
  // otherwise.
  const bool all_cp = settings_.all_cp_ranks || self_.attention.hybrid_mla || topology.layer_split;
  auto mapping = plan::map_ranks(self_.place, self_.attention,
                                 {.tp_size = topology.tp_size,
                                  .pp_size = topology.pp_size,
                                  .cp_size = topology.cp_size,
                                  .dp_size = topology.dp_size},
                                 all_cp);
  if (!mapping.ok())
    return fail(id, use,
                Status(mapping.status().code(),
                       fmt::format("{}: {}", room_text(use.room), mapping.status().message())),
                false, now);
  use.mapping = std::move(*mapping);
  use.order.clear();
  bool complete = true;
  for (const std::uint32_t cp : use.mapping.cp_ranks) {
    for (const std::uint32_t tp : use.mapping.tp_ranks) {
      for (auto pp = use.mapping.pp_ranks.rbegin(); pp != use.mapping.pp_ranks.rend();
           ++pp) {  // later stages first
        const PlaceKey key{*use.dp_rank, cp, tp, *pp};
        use.order.push_back(key);
        if (instance.links.contains(key)) continue;
        complete = false;
        if (!instance.ours && !instance.lookups.contains(key)) {
          http(Call::kRank, use.bootstrap, "GET",
               fmt::format("/route?prefill_dp_rank={}&prefill_cp_rank={}&target_tp_rank={}&target_"
                           "pp_rank={}",
                           key[0], key[1], key[2], key[3]),
               "", key, id);
        }
      }
    }
  }
  if (complete) return connect(use, instance, id, now);
  if (instance.ours) {
    // Not in the snapshot: it has registered since, or is registering again.
    KVF_REACHED("a rank was missing from the instance's snapshot");
    instance.stale = true;
    if (!instance.fetching) lookup_deadlines_.set(use.bootstrap, now + settings_.lookup_retry);
  }
}

void DecodeManager::on_dp_rank(UseId id, const HttpResponse& response, Time now) {
  Use* use = find(id);
  if (use == nullptr || is_terminal(use->view.state)) return;
  use->asked_dp_rank = false;
  if (response.status == 200) {
    const auto ranks = wire::parse_dp_ranks(response.body);
    if (ranks.ok() && ranks->contains(use->room)) {
      use->dp_rank = ranks->at(use->room);
      return resolve(id, *use, now);
    }
  }
  KVF_REACHED("the dp rank of a room was asked for again");
  retry_deadlines_.set(id, now + settings_.lookup_retry);
}

void DecodeManager::on_rank(const Address& bootstrap, Instance& instance, PlaceKey place,
                            const HttpResponse& response, Time now) {
  instance.lookups.erase(place);
  const auto concerned = [&](auto&& act) {
    const std::set<UseId> uses = instance.uses;
    for (const UseId id : uses) {
      Use* use = find(id);
      if (use != nullptr && !use->resolved &&
          std::find(use->order.begin(), use->order.end(), place) != use->order.end())
        act(id, *use);
    }
  };
  if (response.status == 200) {
    if (const auto address = wire::parse_rank_address(response.body); address.ok()) {
      if (!instance.links.contains(place))
        instance.links[place] = Link{
            .address = *address, .native = false, .info = {}, .session = {}, .registered = false};
      concerned([&](UseId id, Use& use) { resolve(id, use, now); });
      return;
    }
  }
  if (response.status == 404) {
    KVF_REACHED("a prefill rank is not registered");
    concerned([&](UseId id, Use& use) {
      fail(id, use,
           Status(Code::kNotFound,
                  fmt::format("{}: bootstrap server {}: {:.200}", room_text(use.room),
                              bootstrap.host_port(), response.body)),
           false, now);
    });
    return;
  }
  instance.last_error = fmt::format("bootstrap server {}: {} {:.200}", bootstrap.host_port(),
                                    response.status, response.body);
  concerned([&](UseId id, Use&) { retry_deadlines_.set(id, now + settings_.lookup_retry); });
}

// --- sessions
// -----------------------------------------------------------------------------------------------------

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
    session.next_register = now + settings_.register_retry;
    send_native(ports_.control, peer, self_.control, token, std::move(m));
    return;
  }
  for (const Slab& slab : self_.layout.slabs) {
    if (slab.component == Component::kAux) {
      m.pools.aux_pointers.push_back(slab.base);
    } else {
      m.pools.kv_pointers.push_back(slab.base);
      m.pools.kv_item_lengths.push_back(slab.item_bytes);
      if (m.pools.kv_item_length == 0) m.pools.kv_item_length = slab.item_bytes;
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
    source.native = link.native;
    source.session = link.native ? link.session : Token{};
    use.connected.push_back(std::move(source));
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

// --- lending
// ------------------------------------------------------------------------------------------------------

GrantGroup DecodeManager::kv_group(const std::vector<PageIndex>& pages) const {
  GrantGroup group{kv_slabs_, {}};
  group.items.reserve(pages.size());
  for (const PageIndex page : pages) group.items.push_back(static_cast<std::uint32_t>(page));
  return group;
}

// Which of the sources write. Foreign ones: all, but only the selected rank under MLA (the others
// get a dummy message). Native ones: for each head the lowest rank that holds it, so that every
// destination byte has exactly one writer.
void DecodeManager::elect(const Use& use, std::vector<Source>& sources) const {
  const std::uint32_t first_tp = use.mapping.tp_ranks.front(),
                      last_pp = use.mapping.pp_ranks.back(),
                      first_cp = use.mapping.cp_ranks.front();
  for (Source& source : sources) {
    const std::uint32_t tp = source.place[2];
    if (self_.attention.mla) {
      source.dummy = tp != first_tp;
    } else if (source.native && self_.total_kv_heads > 0) {
      const plan::HeadRange own = plan::heads_of_rank(self_.total_kv_heads, use.shape.tp_size, tp);
      for (const std::uint32_t lower : use.mapping.tp_ranks) {
        if (lower < tp &&
            plan::heads_of_rank(self_.total_kv_heads, use.shape.tp_size, lower) == own) {
          KVF_REACHED("a replica of a head was elected not to write");
          source.dummy = true;
        }
      }
    }
    source.writes_aux =
        source.native ? tp == first_tp && source.place[3] == last_pp && source.place[1] == first_cp
                      : !source.dummy;
  }
}

void DecodeManager::lend_and_announce(UseId id, Use& use, Time now) {
  const RoomMetadata metadata = std::move(*use.waiting_metadata);
  use.waiting_metadata.reset();
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
  elect(use, sources);
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
    std::vector<GrantGroup> groups;
    if (!metadata.pages.empty()) groups.push_back(kv_group(metadata.pages));
    if (metadata.aux_row && source.writes_aux) groups.push_back({aux_slabs_, {*metadata.aux_row}});
    auto lease = leases_.lend(id, source.grant, !source.native, std::move(groups));
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
  std::uint64_t page_bytes = 0;
  for (const GrantSlab& slab : *kv_slabs_) page_bytes += slab.item_bytes;
  use.view.bytes = page_bytes * metadata.pages.size();
  for (const Source& source : use.sources) {
    wire::Metadata m;
    m.room = use.room;
    m.reply = self_.control;
    m.session_name = self_.session_name;
    m.grant = source.grant;
    m.dummy = source.dummy;
    m.writes_aux = source.writes_aux;
    m.required_destinations = use.mapping.required_destinations;
    m.prefix_tokens = metadata.prefix_tokens;
    if (!source.dummy) {
      m.pages = metadata.pages;
      m.aux_row = metadata.aux_row;
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

// --- messages
// -----------------------------------------------------------------------------------------------------

void DecodeManager::on_frames(const wire::Frames& frames, Time now) {
  if (wire::is_native(frames)) {
    const auto frame = wire::decode_native(frames);
    if (!frame.ok()) {
      ++counters_.malformed_messages;
      ports_.trace.trace(Severity::kDebug, frame.status().message());
      return;
    }
    return on_native(*frame, now);
  }
  auto message = wire::decode_at_decode(frames);
  if (!message.ok()) {
    ++counters_.malformed_messages;
    ports_.trace.trace(Severity::kDebug, message.status().message());
    return;
  }
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
// ----------------------------------------------------------------------------------------------

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

// A foreign rank that failed a room or let it wait to its deadline may be another process by now,
// that never heard our registration: the next room looks it up and registers again.
void DecodeManager::forget_link(const Use& use, PlaceKey place) {
  KVF_REACHED("a foreign rank will be looked up again");
  if (const auto instance = instances_.find(use.bootstrap); instance != instances_.end())
    instance->second.links.erase(place);
}

// --- time
// ---------------------------------------------------------------------------------------------------------

void DecodeManager::on_health(const Address& bootstrap, Instance& instance,
                              const HttpResponse& response, Time now) {
  if (response.status == 200) {
    instance.misses = 0;
  } else if (++instance.misses >= settings_.heartbeat_misses) {
    KVF_REACHED("an instance was lost by its heartbeat");
    return lose_instance(bootstrap, now);
  }
  beat_deadlines_.set(bootstrap, now + settings_.heartbeat_interval);
}

void DecodeManager::lose_instance(const Address& bootstrap, Time now) {
  const auto it = instances_.find(bootstrap);
  if (it == instances_.end()) return;
  const std::set<UseId> uses = it->second.uses;
  std::vector<Token> tokens;
  for (const auto& [key, link] : it->second.links) {
    if (sessions_.contains(link.session)) tokens.push_back(link.session);
  }
  const Status reason(
      Code::kPeerLost,
      fmt::format(
          "lost connection with prefill instance (bootstrap server {} missed {} health checks)",
          bootstrap.host_port(), it->second.misses));
  for (const UseId id : uses) {
    if (Use* use = find(id))
      fail(id, *use,
           Status(reason.code(), fmt::format("{}: {}", room_text(use->room), reason.message())),
           true, now);
  }
  for (const Token token : tokens) end_session(token, reason, true, now);
  // Rooms that still wait for their pages keep the entry; what was learned of the instance is
  // forgotten.
  Instance& instance = it->second;
  instance.topology.reset();
  instance.links.clear();
  instance.misses = 0;
  instance.stale = true;
  instance.beating = true;  // goes on until nobody needs the entry
  beat_deadlines_.set(bootstrap, now + settings_.heartbeat_interval);
  lookup_deadlines_.clear(bootstrap);
}

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
