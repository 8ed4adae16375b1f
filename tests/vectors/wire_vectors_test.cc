// The sglang codec against the reference's bytes.
#include <filesystem>
#include <fstream>
#include <iostream>

#include "src/base/parse.h"
#include "src/proto/directory.h"
#include "src/wire/bodies.h"
#include "src/wire/sglang_codec.h"
#include "tests/vectors/vectors.h"

namespace kvferry::vectors {
namespace {

using namespace wire;

template <class T>
Lists<T> lists_of(const Json& json) {
  return json.is_null() ? Lists<T>{} : json.get<Lists<T>>();
}

bool all_within(const Json& lists, std::int64_t least, std::uint64_t most) {
  for (const Json& list : lists) {
    for (const Json& item : list) {
      if (item.is_number_float()) return false;
      if (item.is_number_unsigned() ? item.get<std::uint64_t>() > most
                                    : item.get<std::int64_t>() < least)
        return false;
    }
  }
  return true;
}

TEST(Vector, PackIntLists) {
  each_case("pack_int_lists", [](const Json& in, const Json& expected) {
    const std::string format = in.at("fmt");
    // An element that the format cannot carry never becomes a list of ours: it is refused where it
    // enters.
    const bool fits = format == "Q"   ? all_within(in["lists"], 0, ~std::uint64_t{0})
                      : format == "I" ? all_within(in["lists"], 0, 0xFFFFFFFF)
                                      : all_within(in["lists"], -2147483648LL, 0x7FFFFFFF);
    EXPECT_EQ(fits, !expected.contains("raises"));
    if (!fits) return;
    const std::string bytes = format == "Q"   ? pack(lists_of<std::uint64_t>(in["lists"]))
                              : format == "I" ? pack(lists_of<std::uint32_t>(in["lists"]))
                                              : pack(lists_of<std::int32_t>(in["lists"]));
    EXPECT_EQ(to_hex(bytes), expected.at("hex"));
  });
}

TEST(Vector, UnpackIntLists) {
  each_case("unpack_int_lists", [](const Json& in, const Json& expected) {
    const std::string bytes = from_hex(in.at("hex")), format = in.at("fmt");
    const auto compare = [&](const auto& result) {
      if (!result.ok()) {
        if (expected.contains("raises")) return;
        // The reference shortens a list whose end is missing; we refuse it. Then the claimed
        // lengths are above what is there.
        std::uint64_t claimed = 0;
        const auto u32 = [&](std::size_t at) {
          return static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[at]) |
                                            static_cast<unsigned char>(bytes[at + 1]) << 8 |
                                            static_cast<unsigned char>(bytes[at + 2]) << 16) |
                 static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[at + 3])) << 24;
        };
        const std::uint32_t count = u32(0);
        for (std::uint32_t i = 0; i < count; ++i) claimed += u32(4 + std::size_t{i} * 4);
        EXPECT_GT(4 + 4 * std::uint64_t{count} + claimed, bytes.size())
            << "refused without reason: " << result.status().to_string();
        return;
      }
      ASSERT_FALSE(expected.contains("raises")) << "accepted what the reference cannot read";
      EXPECT_EQ(Json(*result), expected.at("lists"));
    };
    if (format == "Q") compare(unpack_u64(bytes));
    if (format == "I") compare(unpack_u32(bytes));
    if (format == "i") compare(unpack_i32(bytes));
  });
}

TEST(Vector, WireRegisterEncode) {
  each_case("wire_register_encode", [](const Json& in, const Json& expected) {
    const bool fits = all_within(in.at("state_item_lens"), 0, 0xFFFFFFFF) &&
                      all_within(in.at("state_dim_per_tensor"), 0, 0xFFFFFFFF);
    EXPECT_EQ(fits, !expected.contains("raises"));
    if (!fits) return;
    Register m;
    m.reply = {in.at("local_ip"), in.at("rank_port").get<std::uint16_t>()};
    m.session_name = in.at("session_id");
    m.tp_rank = in.at("engine_rank");
    m.tp_size = in.at("attn_tp_size");
    m.pools.kv_pointers = in.at("kv_data_ptrs").get<std::vector<std::uint64_t>>();
    m.pools.aux_pointers = in.at("aux_data_ptrs").get<std::vector<std::uint64_t>>();
    m.pools.state_pointers = lists_of<std::uint64_t>(in.at("state_data_ptrs"));
    m.pools.kv_item_length = in.at("kv_item_lens").at(0);
    m.pools.state_item_lengths = lists_of<std::uint32_t>(in.at("state_item_lens"));
    m.pools.state_dims = lists_of<std::uint32_t>(in.at("state_dim_per_tensor"));
    if (!in.at("staging").is_null())
      m.staging = StagingRegion{in["staging"].at("base_ptr"), in["staging"].at("total_size")};
    const auto frames = encode_to_prefill(Message(m), Dialect::kSeed);
    ASSERT_TRUE(frames.ok());
    const Json& want = expected.contains("frames") ? expected["frames"]
                                                   : expected.at("messages").at(0).at("frames");
    EXPECT_EQ(frames_to_hex(*frames), want);
  });
}

TEST(Vector, WireRegisterDecode) {
  each_case("wire_register_decode", [](const Json& in, const Json& expected) {
    const Frames frames = frames_from_hex(in.at("frames"));
    const auto message = decode_at_prefill(frames);
    if (expected.contains("raises")) {
      EXPECT_FALSE(message.ok());
      return;
    }
    // What the reference accepts and we refuse: numbers that are no plain numbers of their range, a
    // staging address that is none, and from 15 frames on the layout of 0.5.17 and later, where the
    // surplus means something.
    const bool numbers = is_plain_number(frames.at(2), 65535) &&
                         is_plain_number(frames.at(7), 0xFFFFFFFF) &&
                         is_plain_number(frames.at(8), 0xFFFFFFFF) && frames[8] != "0" &&
                         is_plain_number(frames.at(9));
    const bool staging = frames.size() != 14 || frames[12].empty() || frames[12].size() == 8;
    const bool old_layout = frames.size() <= 14;
    if (!numbers || !staging) {
      EXPECT_FALSE(message.ok());
      return;
    }
    if (!old_layout) return;
    ASSERT_TRUE(message.ok()) << message.status().to_string();
    const auto& m = std::get<Register>(*message);
    EXPECT_EQ(m.reply.host, without_brackets(expected.at("endpoint").get<std::string>()));
    EXPECT_EQ(m.reply.port, expected.at("dst_port"));
    EXPECT_EQ(m.session_name, expected.at("mooncake_session_id"));
    EXPECT_EQ(Json(m.pools.kv_pointers), expected.at("dst_kv_ptrs"));
    EXPECT_EQ(Json(m.pools.aux_pointers), expected.at("dst_aux_ptrs"));
    EXPECT_EQ(Json(m.pools.state_pointers), expected.at("dst_state_data_ptrs"));
    EXPECT_EQ(m.tp_rank, expected.at("dst_tp_rank"));
    EXPECT_EQ(m.tp_size, expected.at("dst_attn_tp_size"));
    EXPECT_EQ(m.pools.kv_item_length, expected.at("dst_kv_item_len"));
    EXPECT_EQ(Json(m.pools.state_item_lengths), expected.at("dst_state_item_lens"));
    EXPECT_EQ(Json(m.pools.state_dims), expected.at("dst_state_dim_per_tensor"));
    const Json& region = expected.at("staging");
    // A size without an address is no region.
    const bool has_address = frames.size() > 12 && !frames[12].empty();
    EXPECT_EQ(m.staging.has_value(), has_address);
    if (m.staging && region.is_object()) {
      EXPECT_EQ(m.staging->base, region.at("base_ptr"));
      EXPECT_EQ(m.staging->bytes, region.at("total_size"));
    }
  });
}

TEST(Vector, WireTransferInfoEncode) {
  each_case("wire_transfer_info_encode", [](const Json& in, const Json& expected) {
    // Our lists are int32, and the reference cannot read a message without an aux row: both are
    // refused where they enter.
    const bool encodable = in.at("kv_dtype") == "int32";
    const Json& messages = expected.at("messages");
    for (std::size_t i = 0; i < in.at("infos").size(); ++i) {
      const Json& info = in["infos"][i];
      Metadata m;
      m.room = RoomId{in.at("room").get<std::uint64_t>()};
      m.reply = {in.at("local_ip"), in.at("rank_port").get<std::uint16_t>()};
      m.session_name = in.at("session_id");
      m.dummy = info.at("is_dummy");
      m.required_destinations = in.at("required_dst_info_num");
      if (!in.at("decode_prefix_len").is_null()) m.prefix_tokens = in["decode_prefix_len"];
      if (!encodable && !m.dummy) continue;
      if (!m.dummy) {
        m.pages = in.at("kv_indices").get<std::vector<PageIndex>>();
        if (!in.at("aux_index").is_null()) m.aux_row = in["aux_index"].get<std::uint32_t>();
        m.states = lists_of<std::int32_t>(in.at("state_indices"));
      }
      const auto frames = encode_to_prefill(Message(m), Dialect::kSeed);
      if (!m.dummy && !m.aux_row) {
        EXPECT_FALSE(frames.ok());
        continue;
      }
      ASSERT_TRUE(frames.ok());
      EXPECT_EQ(frames_to_hex(*frames), messages.at(i).at("frames"));
      const Address to{std::string(without_brackets(info.at("rank_ip").get<std::string>())),
                       info.at("rank_port").get<std::uint16_t>()};
      EXPECT_EQ(messages[i].at("to"), "tcp://" + to.host_port());
    }
  });
}

TEST(Vector, WireTransferInfoDecode) {
  each_case("wire_transfer_info_decode", [](const Json& in, const Json& expected) {
    const Frames frames = frames_from_hex(in.at("frames"));
    const auto message = decode_at_prefill(frames);
    if (expected.contains("raises")) {
      EXPECT_FALSE(message.ok());
      return;
    }
    const bool dummy = frames.at(4).empty() && frames.at(5).empty();
    bool sound = is_plain_number(frames.at(0), kRoomMax) && is_plain_number(frames.at(2), 65535) &&
                 frames[2] != "0" && is_plain_number(frames.at(7), 0xFFFFFFFF) &&
                 frames[7] != "0" && (dummy || is_plain_number(frames[5], 0x7FFFFFFF)) &&
                 (frames.size() < 9 || frames[8].empty() || is_plain_number(frames[8]));
    for (const Json& page : expected.at("dst_kv_indices"))
      sound = sound && page.get<std::int64_t>() >= 0;
    if (!sound) {
      EXPECT_FALSE(message.ok());
      return;
    }
    ASSERT_TRUE(message.ok()) << message.status().to_string();
    const auto& m = std::get<Metadata>(*message);
    EXPECT_EQ(value_of(m.room), expected.at("room"));
    EXPECT_EQ(m.reply.host, without_brackets(expected.at("endpoint").get<std::string>()));
    EXPECT_EQ(m.reply.port, expected.at("dst_port"));
    EXPECT_EQ(m.session_name, expected.at("mooncake_session_id"));
    EXPECT_EQ(Json(m.pages), expected.at("dst_kv_indices"));
    EXPECT_EQ(m.aux_row ? Json(*m.aux_row) : Json(), expected.at("dst_aux_index"));
    EXPECT_EQ(Json(m.states), expected.at("dst_state_indices"));
    EXPECT_EQ(m.required_destinations, expected.at("required_dst_info_num"));
    EXPECT_EQ(m.dummy, expected.at("is_dummy"));
    EXPECT_EQ(m.prefix_tokens ? Json(*m.prefix_tokens) : Json(), expected.at("decode_prefix_len"));
  });
}

TEST(Vector, WireSmallMessages) {
  each_case("wire_small_messages", [](const Json& in, const Json& expected) {
    const std::string kind = in.at("kind");
    const Json& f = in.at("fields");
    const RoomId room{f.at("room").get<std::uint64_t>()};
    Result<Frames> frames(Status(Code::kInternal, "kind " + kind + " is not known to the test"));
    if (kind == "STATUS") {
      frames = encode_to_decode(Done{room,
                                     static_cast<RoomState>(f.at("status").get<int>()),
                                     f.at("prefill_rank"),
                                     {},
                                     {}},
                                Dialect::kSeed);
    } else if (kind == "AUX_DATA") {
      frames = encode_to_decode(
          AuxData{room, f.at("buffer_index"), f.at("aux_index"), from_hex(f.at("data_hex")), {}},
          Dialect::kSeed);
    } else if (kind == "CHUNK_READY") {
      frames = encode_to_decode(
          ChunkReady{room, f.at("chunk_idx"), f.at("page_start"), f.at("num_pages"),
                     f.at("session"), f.at("prefill_unique_rank")},
          Dialect::kSeed);
    } else if (kind == "ABORT") {
      frames = encode_to_prefill(
          Abort{room, {f.at("local_ip"), f.at("local_port").get<std::uint16_t>()}, {}, {}, {}},
          Dialect::kSeed);
    } else if (kind == "ABORT_ACK") {
      frames = encode_to_decode(AbortAck{room, 3, {}, {}}, Dialect::kSeed);
    }
    ASSERT_TRUE(frames.ok()) << frames.status().to_string();
    EXPECT_EQ(frames_to_hex(*frames), expected.at("messages").at(0).at("frames"));
  });
}

// wire/*.json: whole exchanges. Every control message must decode, and the encoder of that
// release's dialect must give the same number and kind of frames for what was decoded.
Dialect dialect_of(const std::string& stem, const Json& json) {
  if (json.contains("release")) return dialect_from_release(json["release"].get<std::string>());
  return stem.starts_with("wire_") ? Dialect::kSeed : Dialect::kUnknown;
}

TEST(Vector, WireCaptures) {
  namespace fs = std::filesystem;
  const fs::path folder_path = fs::path(folder()) / "wire";
  if (!fs::is_directory(folder_path)) GTEST_SKIP() << folder_path << " is absent";
  std::size_t files = 0, messages = 0, staging_or_state = 0;
  for (const auto& entry : fs::directory_iterator(folder_path)) {
    const std::string stem = entry.path().stem().string();
    if (entry.path().extension() != ".json" || stem == "http_bootstrap_cases") continue;
    std::ifstream stream(entry.path());
    const Json json = Json::parse(stream, nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << entry.path();
    if (!json.contains("events")) continue;  // raw byte streams have a test of their own
    ++files;
    const Dialect dialect = dialect_of(stem, json);
    for (const Json& event : json["events"]) {
      if (event.at("transport") != "zmq") {
        if (event.value("method", "") == "PUT" && event.contains("request_body") &&
            event["request_body"].is_object() && event.at("status") == 200) {
          EXPECT_TRUE(parse_registration(event["request_body"].dump()).ok()) << stem;
        }
        if (event.contains("response_json") && event["response_json"].contains("attn_tp_size")) {
          EXPECT_TRUE(parse_topology(event["response_json"].dump()).ok())
              << stem << event["response_json"];
        }
        continue;
      }
      ++messages;
      SCOPED_TRACE(stem + " seq " + event.at("seq").dump());
      const Frames frames = frames_from_hex(event.at("frames"));
      const bool to_prefill = event.at("to").get<std::string>().starts_with("prefill");
      const auto message = to_prefill ? decode_at_prefill(frames) : decode_at_decode(frames);
      ASSERT_TRUE(message.ok()) << message.status().to_string();
      const auto again =
          to_prefill ? encode_to_prefill(*message, dialect) : encode_to_decode(*message, dialect);
      ASSERT_TRUE(again.ok()) << again.status().to_string();
      if (std::holds_alternative<AbortAck>(*message) && dialect != Dialect::kSeed &&
          again->size() > frames.size()) {
        ++staging_or_state;
        continue;
      }
      EXPECT_EQ(again->size(), frames.size());
      // Byte for byte, but for what the release writes in more than one way.
      for (std::size_t i = 0; i < frames.size() && i < again->size(); ++i) {
        if (frames[i] == (*again)[i]) continue;
        const bool empty_lists =
            frames[i].size() >= 4 && (*again)[i].empty();  // a packed list of empty lists
        EXPECT_TRUE(empty_lists) << "frame " << i << ": " << to_hex(frames[i]) << " became "
                                 << to_hex((*again)[i]);
      }
    }
  }
  EXPECT_GT(files, 0U) << "no captures in " << folder_path;
  std::cout << "[ cases    ] wire/: " << files << " captures, " << messages << " messages, "
            << staging_or_state << " acknowledgements in a shorter form\n";
}

// --- bootstrap
// ----------------------------------------------------------------------------------------------------

TEST(Vector, BootstrapRegistration) {
  each_case("bootstrap_registration", [](const Json& in, const Json& expected) {
    RankRegistration r;
    r.place = {.tp_rank = in.at("attn_tp_rank"),
               .tp_size = in.at("attn_tp_size"),
               .pp_rank = in.at("pp_rank"),
               .pp_size = in.at("pp_size"),
               .cp_rank = in.at("attn_cp_rank"),
               .cp_size = in.at("attn_cp_size")};
    const Json& payload = expected.at("payload");
    r.place.dp_rank = payload.at("attn_dp_rank");
    r.place.dp_size = payload.at("attn_dp_size");
    r.system_dp_rank = payload.at("system_dp_rank");
    r.system_dp_size = payload.at("system_dp_size");
    r.address = {in.at("local_ip"), in.at("rank_port").get<std::uint16_t>()};
    r.page_size = in.at("page_size");
    r.kv_cache_dtype = in.at("kv_cache_dtype");
    r.load_balance_method = in.at("load_balance_method");
    r.layer_split = in.at("enable_dsa_cache_layer_split");
    r.prefill_http_port = in.at("http_port");
    EXPECT_EQ(Json::parse(to_json(r)), payload);
    const auto back = parse_registration(payload.dump());
    ASSERT_TRUE(back.ok()) << back.status().to_string();
    EXPECT_EQ(*back, r);
    // Where it goes: the multi-node head's host, else the server's own; a wildcard host means this
    // machine. Hosts compare without brackets ("[::]" is as much a wildcard as "::").
    const std::string head =
        in.at("dist_init_addr").is_null() ? "" : in["dist_init_addr"].get<std::string>();
    std::string host;
    if (!head.empty()) {
      const auto address = parse_address(head);
      host = address.ok() ? address->host : head;
    } else {
      host = std::string(without_brackets(in.at("host").get<std::string>()));
      if (is_wildcard(host)) host = is_ipv6(host) ? "::1" : "127.0.0.1";
    }
    const bool bracketed_wildcard = head.empty() &&
                                    in.at("host").get<std::string>().starts_with("[") &&
                                    is_wildcard(in.at("host").get<std::string>());
    const std::string url =
        "http://" + Address{host, in.at("bootstrap_port").get<std::uint16_t>()}.host_port() +
        "/route";
    if (!bracketed_wildcard) {
      EXPECT_EQ(url, expected.at("url"));
    }
  });
}

TEST(Vector, HttpBootstrapCases) {
  const Json json = load("wire/http_bootstrap_cases");
  if (json.is_null()) GTEST_SKIP();
  ASSERT_TRUE(json.contains("cases") && !json["cases"].empty());
  const Settings settings;
  std::map<std::string, std::unique_ptr<proto::Directory>> servers;
  Random random(1);
  std::size_t number = 0;
  for (const Json& one : json["cases"]) {
    ++number;
    SCOPED_TRACE(one.at("name").get<std::string>());
    auto& server = servers[one.contains("server") && one["server"].is_string()
                               ? one["server"].get<std::string>()
                               : "default"];
    if (!server) server = std::make_unique<proto::Directory>(settings, random);
    const Json& request = one.at("request");
    const Json& expected = one.at("response");
    const std::string method = request.at("method"), path = request.at("path");
    const std::string body = request.contains("raw_body") && request["raw_body"].is_string()
                                 ? request["raw_body"].get<std::string>()
                             : !request.contains("json") || request["json"].is_null()
                                 ? ""
                                 : request["json"].dump();
    if (body.size() > proto::kBodyBytesMax) {
      EXPECT_EQ(proto::Directory::too_large(body.size()).status, expected.at("status"));
      continue;
    }
    const std::size_t before = server->registered_ranks();
    auto answer = server->handle(method, path, body, Time{});
    // The old ranks of these cases live: a conflicting registration is refused.
    bool conflict = false;
    if (const auto* probe = std::get_if<proto::DirectoryProbe>(&answer)) {
      conflict = true;
      answer = server->finish(probe->ticket, probe->addresses, Time{});
    }
    const auto& response = std::get<proto::DirectoryResponse>(answer);
    int status = expected.at("status");
    // Our rules over the input: what the reference answers with 500 is a bad request; so is a
    // number that is none (blanks, underscores); a conflicting topology gets 409.
    const auto query_is_plain = [&] {
      const auto mark = path.find('?');
      if (mark == std::string::npos) return true;
      return path.find_first_not_of("0123456789-abcdefghijklmnopqrstuvwxyz_=&", mark + 1) ==
                 std::string::npos &&
             path.find("0_0") == std::string::npos;
    };
    if (status == 500 || (status == 200 && !query_is_plain())) status = 400;
    if (conflict) status = 409;
    // The reference counts registrations, so that it calls an instance complete whose ranks are not
    // all there.
    const bool ready_by_counting =
        status == 200 && method == "GET" && path.starts_with("/route") && response.status == 503;
    if (ready_by_counting || (status == 404 && response.status == 503)) {
      EXPECT_NE(response.body.find("not fully registered"), std::string::npos);
      continue;
    }
    EXPECT_EQ(response.status, status) << response.body;
    if (status == 400 || status == 409) {
      EXPECT_FALSE(response.body.empty()) << "the reason is missing";
    }
    if (status == 409) {
      EXPECT_EQ(server->registered_ranks(), before);
    }
    if (response.status != expected.at("status").get<int>()) continue;
    if (expected.contains("json") && !expected["json"].is_null()) {
      EXPECT_EQ(Json::parse(response.body), expected["json"]);
    } else if (response.status == 200 || response.status == 404) {
      EXPECT_EQ(response.body, expected.value("text", ""));
    }
    if (expected.contains("allow") && expected["allow"].is_string()) {
      EXPECT_EQ(response.allow, expected["allow"]);
    }
    EXPECT_EQ(response.content_type, expected.at("content_type"));
  }
  std::cout << "[ cases    ] wire/http_bootstrap_cases: " << number << "\n";
}

TEST(Vector, NetworkAddress) {
  each_case("network_address", [](const Json& in, const Json& expected) {
    if (in.at("op") == "format") {
      const std::int64_t port = in.at("port");
      const std::string raw = in.at("host");
      // A port is a 16-bit number and a host has no blanks: others never become an Address of ours.
      if (port < 0 || port > 65535 || raw.find_first_of(" \t\n") != std::string::npos) return;
      const Address address{std::string(without_brackets(raw)), static_cast<std::uint16_t>(port)};
      EXPECT_EQ(address.host, expected.at("host"));
      EXPECT_EQ(is_ipv6(address.host), expected.at("is_ipv6"));
      EXPECT_EQ(address.host_port(), expected.at("host_port"));
      EXPECT_EQ("tcp://" + address.host_port(), expected.at("to_tcp"));
      EXPECT_EQ("http://" + address.host_port(), expected.at("to_url"));
      return;
    }
    const std::string text = in.at("addr");
    const auto address = parse_address(text);
    if (expected.contains("raises")) {
      EXPECT_FALSE(address.ok()) << text;
      return;
    }
    // Ports in plain digits up to 65535, hosts that are not empty, IPv6 in brackets.
    const std::string port = text.substr(text.rfind(':') + 1);
    const std::string host = expected.at("host");
    if (!is_plain_number(port, 65535) || host.empty() ||
        (text.starts_with("[") && !is_ipv6(host)) || (is_ipv6(host) && !text.starts_with("["))) {
      EXPECT_FALSE(address.ok()) << text;
      return;
    }
    ASSERT_TRUE(address.ok()) << address.status().to_string();
    EXPECT_EQ(address->host, host);
    EXPECT_EQ(address->port, expected.at("port"));
  });
}

}  // namespace
}  // namespace kvferry::vectors
