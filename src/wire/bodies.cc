#include "src/wire/bodies.h"

#include <limits>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "src/base/parse.h"
#include "src/wire/messages.h"

namespace kvferry::wire {
namespace {

using Json = nlohmann::json;

Status bad(std::string message) {
  return Status(Code::kInvalidArgument, std::move(message));
}

std::string brief(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

// Reads the keys of one object; remembers the first thing that is wrong.
class ObjectReader {
 public:
  explicit ObjectReader(std::string_view body) {
    json_ = Json::parse(body, nullptr, false);
    if (json_.is_discarded()) {
      status_ = bad("the body is not JSON");
    } else if (!json_.is_object()) {
      status_ = bad("the body is no JSON object");
    }
  }
  explicit ObjectReader(Json json) : json_(std::move(json)) {
    if (!json_.is_object()) status_ = bad("not a JSON object");
  }
  [[nodiscard]] const Status& status() const { return status_; }
  void fail(std::string_view key, std::string why) {
    if (status_.ok()) status_ = bad(fmt::format("key '{}': {}", key, why));
  }
  [[nodiscard]] const Json* find(std::string_view key) {
    if (!status_.ok()) return nullptr;
    const auto it = json_.find(key);
    return it == json_.end() ? nullptr : &*it;
  }
  [[nodiscard]] const Json& json() const { return json_; }

  // A whole number, or its decimal text; the reference's ranks send both.
  template <class T>
  static std::optional<T> integer(const Json& value, T least, T most) {
    if (value.is_string()) {
      const auto parsed = parse_int<T>(value.get_ref<const std::string&>());
      return parsed && *parsed >= least && *parsed <= most ? parsed : std::nullopt;
    }
    if (value.is_number_unsigned()) {
      const auto raw = value.get<std::uint64_t>();
      if (raw > static_cast<std::uint64_t>(most)) return std::nullopt;
      const T result = static_cast<T>(raw);
      return result >= least ? std::optional<T>(result) : std::nullopt;
    }
    if (value.is_number_integer()) {  // negative
      if constexpr (std::is_signed_v<T>) {
        const auto raw = value.get<std::int64_t>();
        if (raw >= static_cast<std::int64_t>(least)) return static_cast<T>(raw);
      }
    }
    return std::nullopt;
  }
  template <class T>
  T number(std::string_view key, T least, T most = std::numeric_limits<T>::max()) {
    const Json* value = find(key);
    if (value == nullptr) return fail(key, "is missing"), T{};
    const auto parsed = integer<T>(*value, least, most);
    if (!parsed)
      return fail(key, fmt::format("{} is not a whole number from {} to {}", brief(*value), least,
                                   most)),
             T{};
    return *parsed;
  }
  std::string text(std::string_view key) {
    const Json* value = find(key);
    if (value == nullptr) return fail(key, "is missing"), std::string();
    if (!value->is_string())
      return fail(key, fmt::format("{} is not text", brief(*value))), std::string();
    return value->get<std::string>();
  }
  bool flag(std::string_view key, bool fallback) {
    const Json* value = find(key);
    if (value == nullptr || value->is_null()) return fallback;
    if (!value->is_boolean())
      return fail(key, fmt::format("{} is not true or false", brief(*value))), fallback;
    return value->get<bool>();
  }
  std::string optional_text(std::string_view key, std::string fallback) {
    const Json* value = find(key);
    return value == nullptr || value->is_null() ? fallback : text(key);
  }
  std::optional<std::int64_t> optional_number(std::string_view key, std::int64_t least,
                                              std::int64_t most) {
    const Json* value = find(key);
    if (value == nullptr || value->is_null()) return std::nullopt;
    return number<std::int64_t>(key, least, most);
  }

 private:
  Json json_;
  Status status_;
};

// JSON of described structs.
template <class T>
Json json_of(const T& value) {
  if constexpr (std::is_same_v<T, Token>) {
    return value.to_string();
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<std::uint64_t>(value);
  } else if constexpr (std::is_integral_v<T>) {
    return value;
  } else {
    Json json = Json::object();
    describe(value, [&](const char* name, const auto& field) { json[name] = json_of(field); });
    return json;
  }
}
Json json_of(const Layout& layout) {
  Json slabs = Json::array();
  for (const Slab& slab : layout.slabs) slabs.push_back(json_of(slab));
  return {{"page_tokens", layout.page_tokens}, {"slabs", std::move(slabs)}};
}
template <class T>
void read_described(ObjectReader& in, T& value) {
  describe(value, [&](const char* name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_enum_v<Field>) {
      field = static_cast<Field>(in.number<std::underlying_type_t<Field>>(name, 0));
    } else if constexpr (std::is_integral_v<Field>) {
      field = in.number<Field>(name, 0);
    } else {
      const Json* nested = in.find(name);
      if (nested == nullptr) return in.fail(name, "is missing");
      ObjectReader inner(*nested);
      read_described(inner, field);
      if (!inner.status().ok()) in.fail(name, inner.status().message());
    }
  });
}

Json native_json(const NativeRank& native) {
  return {{"life", native.life.to_string()},
          {"versions", {native.version_min, native.version_max}},
          {"capabilities", native.capabilities},
          {"plane", native.plane},
          {"layout", json_of(native.layout)},
          {"layout_hash", fmt::format("{:016x}", layout_hash(native.layout))}};
}

constexpr std::size_t kSlabsMax = 65536;

Result<NativeRank> read_native(const Json& json) {
  ObjectReader in(json);
  NativeRank native;
  native.life = token_from_string(in.text("life"));
  if (native.life.is_zero()) in.fail("life", "is not 32 hex digits");
  const Json* versions = in.find("versions");
  if (versions == nullptr || !versions->is_array() || versions->size() != 2) {
    in.fail("versions", "is not [min, max]");
  } else {
    const auto low = ObjectReader::integer<std::uint16_t>((*versions)[0], 1, 65535);
    const auto high = ObjectReader::integer<std::uint16_t>((*versions)[1], 1, 65535);
    if (!low || !high || *low > *high) in.fail("versions", brief(*versions) + " is no range");
    native.version_min = low.value_or(1);
    native.version_max = high.value_or(1);
  }
  if (const Json* list = in.find("capabilities"); list != nullptr && list->is_array()) {
    for (const Json& item : *list) {
      if (item.is_string()) native.capabilities.push_back(item.get<std::string>());
    }
  }
  native.plane = in.text("plane");
  if (const Json* layout = in.find("layout"); layout == nullptr) {
    in.fail("layout", "is missing");
  } else {
    ObjectReader inside(*layout);
    native.layout.page_tokens = inside.number<std::uint32_t>("page_tokens", 1);
    const Json* slabs = inside.find("slabs");
    if (slabs == nullptr || !slabs->is_array() || slabs->size() > kSlabsMax) {
      inside.fail("slabs", "is no list of at most 65536 slabs");
    } else {
      for (const Json& item : *slabs) {
        ObjectReader slab(item);
        read_described(slab, native.layout.slabs.emplace_back());
        if (!slab.status().ok()) inside.fail("slabs", slab.status().message());
      }
    }
    if (!inside.status().ok()) in.fail("layout", inside.status().message());
  }
  if (!in.status().ok()) return in.status();
  KVF_RETURN_IF_ERROR(validate(native.layout));
  const std::string hash = fmt::format("{:016x}", layout_hash(native.layout));
  if (const std::string said = in.optional_text("layout_hash", hash); said != hash)
    in.fail("layout_hash", fmt::format("is {}, the layout beside it has {}", said, hash));
  if (!in.status().ok()) return in.status();
  return native;
}

constexpr std::uint32_t kSizeMax = 65536;

void check_rank(ObjectReader& in, std::string_view name, std::uint32_t rank, std::uint32_t size) {
  if (rank >= size) in.fail(name, fmt::format("rank {} of size {}", rank, size));
}

std::string spec_text(const Json* value) {
  return value == nullptr || value->is_null() ? std::string() : value->dump();
}

RoomId read_room(ObjectReader& in, std::string_view key, const Json& value) {
  const auto room = ObjectReader::integer<std::uint64_t>(value, 0, kRoomMax);
  if (!room) in.fail(key, fmt::format("{} is no room number (0 to 2^63-1)", brief(value)));
  return RoomId{room.value_or(0)};
}

}  // namespace

std::string to_json(const RankRegistration& r) {
  Json json = {
      {"attn_tp_size", r.place.tp_size},
      {"attn_tp_rank", r.place.tp_rank},
      {"attn_cp_size", r.place.cp_size},
      {"attn_cp_rank", r.place.cp_rank},
      {"attn_dp_size", r.place.dp_size},
      {"attn_dp_rank", r.place.dp_rank},
      {"pp_size", r.place.pp_size},
      {"pp_rank", r.place.pp_rank},
      {"system_dp_size", r.system_dp_size},
      {"system_dp_rank", r.system_dp_rank},
      {"rank_ip", r.address.host},
      {"rank_port", r.address.port},
      {"page_size", r.page_size},
      {"kv_cache_dtype", r.kv_cache_dtype},
      {"load_balance_method", r.load_balance_method},
      {"enable_dsa_cache_layer_split", r.layer_split},
      {"prefill_http_port", r.prefill_http_port ? Json(*r.prefill_http_port) : Json()},
  };
  if (!r.dsv41_spec_layout.empty())
    json["dsv41_spec_layout"] = Json::parse(r.dsv41_spec_layout, nullptr, false);
  if (!r.kv_layout.empty()) json["kv_layout"] = r.kv_layout;
  if (r.kv_cache_sharding) json["enable_kv_cache_sharding"] = true;
  if (r.decode_allocation_policy != "early")
    json["decode_allocation_policy"] = r.decode_allocation_policy;
  if (r.native) json["kvferry"] = native_json(*r.native);
  return json.dump();
}

Result<RankRegistration> parse_registration(std::string_view body) {
  ObjectReader in(body);
  RankRegistration r;
  r.place.tp_size = in.number<std::uint32_t>("attn_tp_size", 1, kSizeMax);
  r.place.tp_rank = in.number<std::uint32_t>("attn_tp_rank", 0, kSizeMax);
  r.place.cp_size = in.number<std::uint32_t>("attn_cp_size", 1, kSizeMax);
  r.place.cp_rank = in.number<std::uint32_t>("attn_cp_rank", 0, kSizeMax);
  r.place.dp_size = in.number<std::uint32_t>("attn_dp_size", 1, kSizeMax);
  r.place.dp_rank = in.number<std::uint32_t>("attn_dp_rank", 0, kSizeMax);
  r.place.pp_size = in.number<std::uint32_t>("pp_size", 1, kSizeMax);
  r.place.pp_rank = in.number<std::uint32_t>("pp_rank", 0, kSizeMax);
  r.system_dp_size = in.number<std::uint32_t>("system_dp_size", 1, kSizeMax);
  r.system_dp_rank = in.number<std::uint32_t>("system_dp_rank", 0, kSizeMax);
  check_rank(in, "attn_tp_rank", r.place.tp_rank, r.place.tp_size);
  check_rank(in, "attn_cp_rank", r.place.cp_rank, r.place.cp_size);
  check_rank(in, "attn_dp_rank", r.place.dp_rank, r.place.dp_size);
  check_rank(in, "pp_rank", r.place.pp_rank, r.place.pp_size);
  check_rank(in, "system_dp_rank", r.system_dp_rank, r.system_dp_size);
  r.address.host = std::string(without_brackets(in.text("rank_ip")));
  if (in.status().ok() && r.address.host.empty()) in.fail("rank_ip", "is empty");
  r.address.port = in.number<std::uint16_t>("rank_port", 1);
  r.page_size = in.number<std::uint32_t>("page_size", 1, 1U << 20);
  r.kv_cache_dtype = in.text("kv_cache_dtype");
  r.load_balance_method = in.optional_text("load_balance_method", "follow_bootstrap_room");
  r.layer_split = in.flag("enable_dsa_cache_layer_split", false);
  r.prefill_http_port = in.optional_number("prefill_http_port", 0, 65535);
  r.dsv41_spec_layout = spec_text(in.find("dsv41_spec_layout"));
  r.kv_layout = in.optional_text("kv_layout", "");
  r.kv_cache_sharding = in.flag("enable_kv_cache_sharding", false);
  r.decode_allocation_policy = in.optional_text("decode_allocation_policy", "early");
  if (!in.status().ok()) return in.status();
  if (const Json* native = in.find("kvferry"); native != nullptr && !native->is_null()) {
    auto parsed = read_native(*native);
    if (!parsed.ok()) return bad("key 'kvferry': " + parsed.status().message());
    r.native = std::move(*parsed);
  }
  return r;
}

std::string to_json(const Topology& t) {
  Json json = {
      {"attn_tp_size", t.tp_size},
      {"attn_cp_size", t.cp_size},
      {"dp_size", t.dp_size},
      {"pp_size", t.pp_size},
      {"page_size", t.page_size ? Json(*t.page_size) : Json()},
      {"kv_cache_dtype", t.kv_cache_dtype ? Json(*t.kv_cache_dtype) : Json()},
      {"follow_bootstrap_room", t.follow_bootstrap_room},
      {"enable_dsa_cache_layer_split", t.layer_split},
      {"prefill_http_port", t.prefill_http_port ? Json(*t.prefill_http_port) : Json()},
  };
  for (const char* key : {"target_tp_rank", "target_tp_ranks", "target_cp_ranks", "target_pp_ranks",
                          "required_dst_info_num", "required_prefill_response_num"}) {
    json[key] = nullptr;
  }
  if (!t.dsv41_spec_layout.empty())
    json["dsv41_spec_layout"] = Json::parse(t.dsv41_spec_layout, nullptr, false);
  if (!t.kv_layout.empty()) json["kv_layout"] = t.kv_layout;
  if (t.kv_cache_sharding) json["enable_kv_cache_sharding"] = true;
  if (t.decode_allocation_policy != "early")
    json["decode_allocation_policy"] = t.decode_allocation_policy;
  return json.dump();
}

Result<Topology> parse_topology(std::string_view body) {
  ObjectReader in(body);
  Topology t;
  t.tp_size = in.number<std::uint32_t>("attn_tp_size", 1, kSizeMax);
  t.cp_size = in.number<std::uint32_t>("attn_cp_size", 1, kSizeMax);
  t.dp_size = in.number<std::uint32_t>("dp_size", 1, kSizeMax);
  t.pp_size = in.number<std::uint32_t>("pp_size", 1, kSizeMax);
  if (const auto page = in.optional_number("page_size", 1, 1 << 20))
    t.page_size = static_cast<std::uint32_t>(*page);
  if (const Json* dtype = in.find("kv_cache_dtype"); dtype != nullptr && !dtype->is_null())
    t.kv_cache_dtype = in.text("kv_cache_dtype");
  t.follow_bootstrap_room = in.flag("follow_bootstrap_room", true);
  t.layer_split = in.flag("enable_dsa_cache_layer_split", false);
  t.prefill_http_port = in.optional_number("prefill_http_port", 0, 65535);
  t.dsv41_spec_layout = spec_text(in.find("dsv41_spec_layout"));
  t.kv_layout = in.optional_text("kv_layout", "");
  t.kv_cache_sharding = in.flag("enable_kv_cache_sharding", false);
  t.decode_allocation_policy = in.optional_text("decode_allocation_policy", "early");
  if (!in.status().ok()) return in.status();

  static const std::set<std::string, std::less<>> kKnown = {"attn_tp_size",
                                                            "attn_cp_size",
                                                            "dp_size",
                                                            "pp_size",
                                                            "page_size",
                                                            "kv_cache_dtype",
                                                            "follow_bootstrap_room",
                                                            "enable_dsa_cache_layer_split",
                                                            "prefill_http_port",
                                                            "target_tp_rank",
                                                            "target_tp_ranks",
                                                            "target_cp_ranks",
                                                            "target_pp_ranks",
                                                            "required_dst_info_num",
                                                            "required_prefill_response_num",
                                                            "kv_layout"};
  for (const auto& [key, value] : in.json().items()) {
    if (kKnown.contains(key)) continue;
    const bool harmless = value.is_null() || value == false || value == 0 || value == "" ||
                          value == "early" ||
                          ((value.is_object() || value.is_array()) && value.empty());
    if (!harmless) {
      return Status(Code::kRefused,
                    fmt::format("the prefill instance announces {} = {}, which is not supported",
                                key, brief(value)));
    }
  }
  return t;
}

std::string to_json(const Address& address) {
  return Json{{"rank_ip", address.host}, {"rank_port", address.port}}.dump();
}

Result<Address> parse_rank_address(std::string_view body) {
  ObjectReader in(body);
  Address address;
  address.host = std::string(without_brackets(in.text("rank_ip")));
  address.port = in.number<std::uint16_t>("rank_port", 1);
  if (!in.status().ok()) return in.status();
  return address;
}

std::string to_json(const DpRankEntry& entry) {
  return Json{{"bootstrap_room", value_of(entry.room)}, {"dp_rank", entry.dp_rank}}.dump();
}

Result<DpRankEntry> parse_dp_rank_entry(std::string_view body) {
  ObjectReader in(body);
  DpRankEntry entry;
  entry.room = RoomId{in.number<std::uint64_t>("bootstrap_room", 0, kRoomMax)};
  entry.dp_rank = in.number<std::uint32_t>("dp_rank", 0, kSizeMax);
  if (!in.status().ok()) return in.status();
  return entry;
}

std::string to_json_query(const std::vector<RoomId>& rooms) {
  Json list = Json::array();
  for (const RoomId room : rooms) list.push_back(value_of(room));
  return Json{{"bootstrap_rooms", std::move(list)}}.dump();
}

Result<std::vector<RoomId>> parse_dp_rank_query(std::string_view body) {
  ObjectReader in(body);
  std::vector<RoomId> rooms;
  const Json* list = in.find("bootstrap_rooms");
  if (list == nullptr || !list->is_array()) {
    in.fail("bootstrap_rooms", "is no list");
  } else {
    for (const Json& item : *list) rooms.push_back(read_room(in, "bootstrap_rooms", item));
  }
  if (!in.status().ok()) return in.status();
  return rooms;
}

std::string to_json(const std::map<RoomId, std::uint32_t>& ranks) {
  Json json = Json::object();
  for (const auto& [room, rank] : ranks) json[std::to_string(value_of(room))] = rank;
  return json.dump();
}

Result<std::map<RoomId, std::uint32_t>> parse_dp_ranks(std::string_view body) {
  ObjectReader in(body);
  std::map<RoomId, std::uint32_t> ranks;
  if (in.status().ok()) {
    for (const auto& [key, value] : in.json().items()) {
      const auto rank = ObjectReader::integer<std::uint32_t>(value, 0, kSizeMax);
      if (!rank) in.fail(key, fmt::format("{} is no dp rank", brief(value)));
      ranks[read_room(in, key, Json(key))] = rank.value_or(0);
    }
  }
  if (!in.status().ok()) return in.status();
  return ranks;
}

std::string to_json(const Instance& instance) {
  const auto list = [](const std::vector<InstanceRank>& all, bool native) {
    Json ranks = Json::array();
    for (const InstanceRank& rank : all) {
      Json one = {{"dp_rank", rank.dp_rank},
                  {"place", json_of(rank.place)},
                  {"rank_ip", rank.address.host},
                  {"rank_port", rank.address.port}};
      if (native) one["kvferry"] = native_json(rank.native);
      ranks.push_back(std::move(one));
    }
    return ranks;
  };
  return Json{{"life", instance.life.to_string()},
              {"ranks", list(instance.ranks, true)},
              {"foreign_ranks", list(instance.foreign, false)}}
      .dump();
}

namespace {

void read_ranks(ObjectReader& in, std::string_view key, bool native,
                std::vector<InstanceRank>& out) {
  const Json* ranks = in.find(key);
  if (ranks == nullptr || !ranks->is_array()) return in.fail(key, "is no list");
  for (const Json& item : *ranks) {
    ObjectReader one(item);
    InstanceRank rank;
    rank.dp_rank = one.number<std::uint32_t>("dp_rank", 0, kSizeMax);
    if (const Json* place = one.find("place")) {
      ObjectReader inside(*place);
      read_described(inside, rank.place);
      if (!inside.status().ok()) one.fail("place", inside.status().message());
    } else {
      one.fail("place", "is missing");
    }
    rank.address.host = one.text("rank_ip");
    rank.address.port = one.number<std::uint16_t>("rank_port", 1);
    if (native) {
      const Json* extra = one.find("kvferry");
      if (extra == nullptr) {
        one.fail("kvferry", "is missing");
      } else if (auto parsed = read_native(*extra); parsed.ok()) {
        rank.native = std::move(*parsed);
      } else {
        one.fail("kvferry", parsed.status().message());
      }
    }
    if (!one.status().ok()) in.fail(key, one.status().message());
    out.push_back(std::move(rank));
  }
}

}  // namespace

Result<Instance> parse_instance(std::string_view body) {
  ObjectReader in(body);
  Instance instance;
  instance.life = token_from_string(in.text("life"));
  read_ranks(in, "ranks", true, instance.ranks);
  read_ranks(in, "foreign_ranks", false, instance.foreign);
  if (!in.status().ok()) return in.status();
  return instance;
}

}  // namespace kvferry::wire
