// JSON bodies of the bootstrap server's calls. Parsing says what is wrong with which key; nothing
// throws.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvferry/data_plane.h"
#include "kvferry/layout.h"
#include "kvferry/status.h"
#include "kvferry/types.h"

namespace kvferry::wire {

// What a native rank says of itself beside the reference's keys, under the key "kvferry" (other
// servers ignore it).
// A capability: every CP rank of the instance sends its part of each request; else the first alone.
// Said since native version 3.
inline constexpr std::string_view kAllCpRanks = "all_cp_ranks";

struct NativeRank {
  Token life;  // of the process
  std::uint16_t version_min = 1, version_max = 1;
  std::vector<std::string> capabilities;  // kAllCpRanks ...
  PlaneAddress plane;
  Layout layout;
  friend bool operator==(const NativeRank&, const NativeRank&) = default;
};

// PUT /route
struct RankRegistration {
  RankPlace place;  // dp as attn_dp_*; see dp_rank() and dp_size()
  std::uint32_t system_dp_rank = 0, system_dp_size = 1;
  Address address;  // rank_ip, rank_port
  std::uint32_t page_size = 1;
  std::string kv_cache_dtype;  // compared as text
  std::string load_balance_method = "follow_bootstrap_room";
  bool layer_split = false;  // enable_dsa_cache_layer_split
  std::optional<std::int64_t> prefill_http_port;
  std::string dsv41_spec_layout;  // JSON text, canonical; empty: null
  std::string kv_layout;          // empty: null
  bool kv_cache_sharding = false;
  std::string decode_allocation_policy = "early";
  std::optional<NativeRank> native;

  // The DP group that the server files the rank under.
  [[nodiscard]] std::uint32_t dp_rank() const {
    return system_dp_size == 1 ? place.dp_rank : system_dp_rank;
  }
  [[nodiscard]] std::uint32_t dp_size() const {
    return system_dp_size == 1 ? place.dp_size : system_dp_size;
  }
  friend bool operator==(const RankRegistration&, const RankRegistration&) = default;
};
std::string to_json(const RankRegistration& registration);
Result<RankRegistration> parse_registration(std::string_view body);

// GET /route with -1 everywhere
struct Topology {
  std::uint32_t tp_size = 1, cp_size = 1, dp_size = 1, pp_size = 1;
  std::optional<std::uint32_t> page_size;
  std::optional<std::string> kv_cache_dtype;
  bool follow_bootstrap_room = true;
  bool layer_split = false;
  std::optional<std::int64_t> prefill_http_port;
  std::string dsv41_spec_layout;  // as above; sent only when not at its default
  std::string kv_layout;
  bool kv_cache_sharding = false;
  std::string decode_allocation_policy = "early";
  friend bool operator==(const Topology&, const Topology&) = default;
};
std::string to_json(const Topology& topology);
// An unknown key is ignored only when its value is null, false, 0, empty or "early"; else kRefused
// with key and value, and so are the features that newer releases announce and we do not have.
Result<Topology> parse_topology(std::string_view body);

// GET /route with real ranks
std::string to_json(const Address& address);
Result<Address> parse_rank_address(std::string_view body);

// POST /register_dp_rank
struct DpRankEntry {
  RoomId room{};
  std::uint32_t dp_rank = 0;
};
std::string to_json(const DpRankEntry& entry);
Result<DpRankEntry> parse_dp_rank_entry(std::string_view body);

// POST /query_dp_ranks and its answer
std::string to_json_query(const std::vector<RoomId>& rooms);
Result<std::vector<RoomId>> parse_dp_rank_query(std::string_view body);
std::string to_json(const std::map<RoomId, std::uint32_t>& ranks);
Result<std::map<RoomId, std::uint32_t>> parse_dp_ranks(std::string_view body);

// GET /kvferry/v1/instance
struct InstanceRank {
  std::uint32_t dp_rank = 0;
  RankPlace place;
  Address address;
  NativeRank native;
};
// One snapshot of all ranks, so that nobody takes a native rank for a foreign one because it
// registered between two calls.
struct Instance {
  Token life;                         // of the server
  std::vector<InstanceRank> ranks;    // native ones
  std::vector<InstanceRank> foreign;  // the others; `native` is empty
};
std::string to_json(const Instance& instance);
Result<Instance> parse_instance(std::string_view body);

}  // namespace kvferry::wire
