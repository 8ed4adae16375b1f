#include "src/proto/directory.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "src/base/parse.h"

namespace kvferry::proto {
namespace {

DirectoryResponse text(int status, std::string body) {
  return {status, "text/plain; charset=utf-8", std::move(body), ""};
}
DirectoryResponse json(std::string body) {
  return {200, "application/json; charset=utf-8", std::move(body), ""};
}
DirectoryResponse not_allowed(std::string_view body, std::string allow) {
  return {405, "text/plain; charset=utf-8", std::string(body), std::move(allow)};
}

std::string decode_percent(std::string_view in) {
  std::string out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    unsigned value = 0;
    if (in[i] == '%' && i + 2 < in.size() &&
        std::from_chars(in.data() + i + 1, in.data() + i + 3, value, 16).ptr == in.data() + i + 3) {
      out += static_cast<char>(value);
      i += 2;
    } else {
      out += in[i] == '+' ? ' ' : in[i];
    }
  }
  return out;
}

std::optional<std::string> parameter(std::string_view query, std::string_view name) {
  while (!query.empty()) {
    const auto end = std::min(query.find('&'), query.size());
    const std::string_view pair = query.substr(0, end);
    const auto equals = std::min(pair.find('='), pair.size());
    if (pair.substr(0, equals) == name)
      return decode_percent(equals < pair.size() ? pair.substr(equals + 1) : std::string_view());
    query.remove_prefix(std::min(end + 1, query.size()));
  }
  return std::nullopt;
}

}  // namespace

DirectoryResponse Directory::too_large(std::size_t actual) {
  return text(413, fmt::format("Maximum request body size {} exceeded, actual body size {}",
                               kBodyBytesMax, actual));
}

DirectoryAnswer Directory::handle(std::string_view method, std::string_view target,
                                  std::string_view body, Time now) {
  advance(now);
  const auto mark = std::min(target.find('?'), target.size());
  const std::string_view path = target.substr(0, mark);
  const std::string_view query =
      mark < target.size() ? target.substr(mark + 1) : std::string_view();
  const bool get = method == "GET" || method == "HEAD";

  DirectoryAnswer answer = text(404, "404: Not Found");
  if (path == "/health") {
    answer = get ? text(200, "OK") : not_allowed("405: Method Not Allowed", "GET,HEAD");
  } else if (path == "/route") {
    if (method == "PUT") {
      answer = put_route(body);
    } else if (method == "GET") {
      answer = get_route(query);
    } else {
      answer = DirectoryResponse{405, "application/json; charset=utf-8", "Method not allowed",
                                 ""};  // as the reference says it
    }
  } else if (path == "/register_dp_rank") {
    if (method != "POST") {
      answer = not_allowed("405: Method Not Allowed", "POST");
    } else if (const auto entry = wire::parse_dp_rank_entry(body); !entry.ok()) {
      answer = text(400, entry.status().message());
    } else if (!dp_ranks_.contains(entry->room) &&
               dp_ranks_.size() >= settings_.dp_rank_entries_max) {
      answer =
          text(503, fmt::format("{} rooms have a dp rank (dp_rank_entries_max)", dp_ranks_.size()));
    } else {
      dp_ranks_[entry->room] = entry->dp_rank;
      dp_rank_deadlines_.set(entry->room, now + settings_.dp_rank_expiry);
      answer = text(200, "OK");
    }
  } else if (path == "/query_dp_ranks") {
    if (method != "POST") {
      answer = not_allowed("405: Method Not Allowed", "POST");
    } else if (const auto rooms = wire::parse_dp_rank_query(body); !rooms.ok()) {
      answer = text(400, rooms.status().message());
    } else {
      std::map<RoomId, std::uint32_t> known;
      for (const RoomId room : *rooms) {
        if (const auto it = dp_ranks_.find(room); it != dp_ranks_.end()) known[room] = it->second;
      }
      answer = json(wire::to_json(known));
    }
  } else if (path == "/kvferry/v1/instance") {
    if (get) {
      wire::Instance instance{life_, {}, {}};
      for (const auto& [key, rank] : ranks_) {
        if (rank.native) {
          instance.ranks.push_back({key[0], rank.place, rank.address, *rank.native});
        } else {
          instance.foreign.push_back({key[0], rank.place, rank.address, {}});
        }
      }
      answer = json(wire::to_json(instance));
    } else {
      answer = not_allowed("405: Method Not Allowed", "GET,HEAD");
    }
  } else if (path == "/metrics") {
    answer = get ? DirectoryAnswer(DirectoryResponse{
                       200, "text/plain; version=0.0.4; charset=utf-8", metrics(), ""})
                 : not_allowed("405: Method Not Allowed", "GET,HEAD");
  }
  if (auto* response = std::get_if<DirectoryResponse>(&answer)) {
    ++answered_[{response->status == 404 && path != "/route" ? "other" : std::string(path),
                 response->status}];
    if (method == "HEAD") response->body.clear();
  }
  return answer;
}

std::size_t Directory::expected_ranks() const {
  return std::size_t{shape_->dp_size()} * shape_->place.cp_size * shape_->place.tp_size *
         shape_->place.pp_size;
}

std::optional<DirectoryResponse> Directory::conflict(const wire::RankRegistration& r) const {
  if (!shape_) return std::nullopt;
  const wire::RankRegistration& s = *shape_;
  std::string differences;
  const auto compare = [&](std::string_view name, const auto& old, const auto& now) {
    if (old == now) return;
    differences += fmt::format("{}{}: registered {}, this rank says {}",
                               differences.empty() ? "" : "; ", name, old, now);
  };
  compare("attn_tp_size", s.place.tp_size, r.place.tp_size);
  compare("attn_cp_size", s.place.cp_size, r.place.cp_size);
  compare("dp_size", s.dp_size(), r.dp_size());
  compare("pp_size", s.place.pp_size, r.place.pp_size);
  compare("page_size", s.page_size, r.page_size);
  compare("kv_cache_dtype", s.kv_cache_dtype, r.kv_cache_dtype);
  if (!differences.empty()) return text(409, "conflicting registration: " + differences);
  const auto or_null = [](const std::string& value) {
    return value.empty() ? std::string("null") : value;
  };
  compare("dsv41_spec_layout", or_null(s.dsv41_spec_layout), or_null(r.dsv41_spec_layout));
  compare("kv_layout", or_null(s.kv_layout), or_null(r.kv_layout));
  compare("enable_kv_cache_sharding", s.kv_cache_sharding, r.kv_cache_sharding);
  compare("decode_allocation_policy", s.decode_allocation_policy, r.decode_allocation_policy);
  if (!differences.empty()) return text(400, "conflicting registration: " + differences);
  return std::nullopt;
}

void Directory::store(const wire::RankRegistration& r) {
  if (!shape_) shape_ = r;
  // A rank that registers again replaces itself; so does another process that has taken its place.
  ranks_[{r.dp_rank(), r.place.cp_rank, r.place.tp_rank, r.place.pp_rank}] = r;
}

DirectoryAnswer Directory::put_route(std::string_view body) {
  auto registration = wire::parse_registration(body);
  if (!registration.ok()) return text(400, registration.status().message());
  if (is_wildcard(registration->address.host)) {
    return text(400, fmt::format("key 'rank_ip': {} is a wildcard, nobody can connect to it",
                                 registration->address.host));
  }
  if (auto refusal = conflict(*registration)) {
    // The old instance may be gone: then the new one takes the table over.
    DirectoryProbe probe{next_ticket_++, {}};
    for (const auto& [key, rank] : ranks_) {
      if (rank.address != registration->address) probe.addresses.push_back(rank.address);
    }
    waiting_[probe.ticket] = {std::move(*registration), std::move(*refusal)};
    return probe;
  }
  store(*registration);
  return text(200, "OK");
}

DirectoryResponse Directory::finish(std::uint64_t ticket, const std::vector<Address>& alive, Time) {
  const auto it = waiting_.find(ticket);
  if (it == waiting_.end()) return text(500, "unknown ticket");
  const Waiting waiting = std::move(it->second);
  waiting_.erase(it);
  auto refusal =
      conflict(waiting.registration);  // another one may have replaced the table meanwhile
  const bool old_lives = std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& entry) {
    return std::find(alive.begin(), alive.end(), entry.second.address) != alive.end();
  });
  if (refusal && old_lives) {
    ++answered_[{"/route", refusal->status}];
    return *refusal;
  }
  if (refusal) {
    ++replaced_;
    ranks_.clear();
    shape_.reset();
  }
  store(waiting.registration);
  ++answered_[{"/route", 200}];
  return text(200, "OK");
}

DirectoryResponse Directory::get_route(std::string_view query) const {
  std::array<std::int64_t, 4> wanted{};
  constexpr std::array<std::string_view, 4> kNames = {"prefill_dp_rank", "prefill_cp_rank",
                                                      "target_tp_rank", "target_pp_rank"};
  std::array<std::string, 4> raw;
  for (std::size_t i = 0; i < 4; ++i) {
    auto value = parameter(query, kNames[i]);
    if (!value || value->empty()) return text(400, "Missing inputs for bootstrap server.");
    raw[i] = std::move(*value);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    const auto number = parse_int<std::int64_t>(raw[i]);
    if (!number)
      return text(400, fmt::format("{} is not a whole number: '{:.40}'", kNames[i], raw[i]));
    wanted[i] = *number;
  }
  if (!shape_ || ranks_.size() < expected_ranks()) {
    return text(503, fmt::format("Prefill server not fully registered yet ({} workers registered).",
                                 ranks_.size()));
  }
  if (std::all_of(wanted.begin(), wanted.end(), [](std::int64_t v) { return v == -1; })) {
    wire::Topology t;
    t.tp_size = shape_->place.tp_size;
    t.cp_size = shape_->place.cp_size;
    t.dp_size = shape_->dp_size();
    t.pp_size = shape_->place.pp_size;
    t.page_size = shape_->page_size;
    t.kv_cache_dtype = shape_->kv_cache_dtype;
    t.follow_bootstrap_room = shape_->load_balance_method == "follow_bootstrap_room";
    t.layer_split = shape_->layer_split;
    t.prefill_http_port = shape_->prefill_http_port;
    t.dsv41_spec_layout = shape_->dsv41_spec_layout;
    t.kv_layout = shape_->kv_layout;
    t.kv_cache_sharding = shape_->kv_cache_sharding;
    t.decode_allocation_policy = shape_->decode_allocation_policy;
    return json(wire::to_json(t));
  }
  const bool negative = std::any_of(wanted.begin(), wanted.end(),
                                    [](std::int64_t v) { return v < 0 || v > 1 << 20; });
  const auto it = negative ? ranks_.end()
                           : ranks_.find({static_cast<std::uint32_t>(wanted[0]),
                                          static_cast<std::uint32_t>(wanted[1]),
                                          static_cast<std::uint32_t>(wanted[2]),
                                          static_cast<std::uint32_t>(wanted[3])});
  if (it == ranks_.end()) {
    return text(
        404, fmt::format("Bootstrap info not found for dp_rank={} cp_rank={} tp_rank={} pp_rank={}",
                         wanted[0], wanted[1], wanted[2], wanted[3]));
  }
  return json(wire::to_json(it->second.address));
}

void Directory::advance(Time now) {
  while (const auto room = dp_rank_deadlines_.pop_due(now)) dp_ranks_.erase(*room);
}

std::string Directory::metrics() const {
  std::string out;
  out +=
      "# HELP kvferry_bootstrap_ranks Distinct prefill ranks that are registered.\n# TYPE "
      "kvferry_bootstrap_ranks gauge\n";
  out += fmt::format("kvferry_bootstrap_ranks {}\n", ranks_.size());
  out +=
      "# HELP kvferry_bootstrap_dp_rank_entries Rooms with a dp rank.\n# TYPE "
      "kvferry_bootstrap_dp_rank_entries gauge\n";
  out += fmt::format("kvferry_bootstrap_dp_rank_entries {}\n", dp_ranks_.size());
  out +=
      "# HELP kvferry_bootstrap_tables_replaced_total Registries taken over by a new instance.\n# "
      "TYPE kvferry_bootstrap_tables_replaced_total counter\n";
  out += fmt::format("kvferry_bootstrap_tables_replaced_total {}\n", replaced_);
  out +=
      "# HELP kvferry_bootstrap_requests_total Requests answered.\n# TYPE "
      "kvferry_bootstrap_requests_total counter\n";
  for (const auto& [key, count] : answered_) {
    out += fmt::format("kvferry_bootstrap_requests_total{{path=\"{}\",status=\"{}\"}} {}\n",
                       key.first, key.second, count);
  }
  return out;
}

}  // namespace kvferry::proto
