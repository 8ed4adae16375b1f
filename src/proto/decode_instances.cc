// How a decode rank finds the prefill ranks of a room: its view of each instance, kept by asking
// the bootstrap server, lost by its heartbeat.
#include "src/proto/decode.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/base/mark.h"
#include "src/proto/text.h"

namespace kvferry::proto {

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
  if (refused) instance.ours = instance.all_native = false;  // a server of the reference
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
      instance.all_native = !instance.links.empty() &&
                            std::all_of(instance.links.begin(), instance.links.end(),
                                        [](const auto& entry) { return entry.second.native; });
      instance.writers.clear();
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

// Whether every CP rank sends its part: native ranks say so themselves, and alike. Foreign ones do
// not: there it is a setting of both sides.
Result<bool> DecodeManager::all_cp_ranks(const wire::Topology& topology,
                                         const Instance& instance) const {
  constexpr std::uint16_t kSaidSince = 3;
  const bool configured =
      settings_.all_cp_ranks || self_.attention.hybrid_mla || topology.layer_split;
  if (topology.cp_size <= 1) return configured;
  const Link* first = nullptr;
  const auto says = [](const Link& link) {
    const auto& list = link.info.capabilities;
    return std::find(list.begin(), list.end(), wire::kAllCpRanks) != list.end();
  };
  const auto differ = [](const std::string& a, bool all, const std::string& b) {
    return Status(Code::kRefused,
                  fmt::format("{} has all_cp_ranks {}, {} has {}", a, all, b, !all));
  };
  for (const auto& [key, link] : instance.links) {
    if (!link.native || link.info.version_max < kSaidSince) continue;
    if (first == nullptr) first = &link;
    if (says(link) != says(*first)) {
      return differ("prefill rank " + first->address.host_port(), says(*first),
                    "prefill rank " + link.address.host_port());
    }
  }
  if (first == nullptr) return configured;
  if (!instance.all_native && says(*first) != configured)
    return differ("prefill rank " + first->address.host_port(), says(*first), "this decode rank");
  return says(*first);
}

// Native ranks meet whatever their sizes; where a reference rank takes part, its rules hold.
Result<plan::RankMapping> DecodeManager::map_to(const wire::Topology& topology,
                                                const Instance& instance) const {
  const auto all_cp = all_cp_ranks(topology, instance);
  if (!all_cp.ok()) return all_cp.status();
  const plan::InstanceShape shape{.tp_size = topology.tp_size,
                                  .pp_size = topology.pp_size,
                                  .cp_size = topology.cp_size,
                                  .dp_size = topology.dp_size};
  if (instance.all_native)
    return plan::map_native_ranks(self_.place, self_.attention, self_.total_kv_heads, shape,
                                  *all_cp);
  if (topology.page_size && *topology.page_size != self_.layout.page_tokens) {
    return Status(Code::kRefused,
                  fmt::format("page size differs: it has {}, this decode rank has {}; only native "
                              "ranks can bring them together",
                              *topology.page_size, self_.layout.page_tokens));
  }
  return plan::map_ranks(self_.place, self_.attention, shape, *all_cp);
}

Status DecodeManager::check_fit(const wire::Topology& topology, const Address& bootstrap,
                                const Instance& instance) const {
  if (topology.kv_cache_dtype && *topology.kv_cache_dtype != self_.kv_cache_dtype) {
    return Status(
        Code::kRefused,
        fmt::format("kv cache dtype differs: prefill instance {} has {}, this decode rank has {}",
                    bootstrap.host_port(), *topology.kv_cache_dtype, self_.kv_cache_dtype));
  }
  const auto mapping = map_to(topology, instance);
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
      problem = check_fit(*topology, bootstrap, instance);
      final = !problem.ok();
      if (problem.ok()) instance.topology = std::move(*topology);
      instance.writers.clear();
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
  auto mapping = map_to(topology, instance);
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
  instance.all_native = false;
  instance.writers.clear();
  instance.misses = 0;
  instance.stale = true;
  instance.beating = true;  // goes on until nobody needs the entry
  beat_deadlines_.set(bootstrap, now + settings_.heartbeat_interval);
  lookup_deadlines_.clear(bootstrap);
}

}  // namespace kvferry::proto
