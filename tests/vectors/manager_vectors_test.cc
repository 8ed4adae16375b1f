// The managers against what the reference's threads and handles did. Each test states our rules as
// a small model over the input (README of the vectors: terminal states stay, malformed messages are
// dropped, one agreed number of destinations, every destination is told, distinct ranks are
// counted) and compares with the reference wherever no rule of ours applies.
#include <algorithm>
#include <iostream>
#include <set>

#include "src/plan/geometry.h"
#include "src/plan/planner.h"
#include "src/plan/positional.h"
#include "src/proto/decode.h"
#include "src/proto/prefill.h"
#include "src/wire/sglang_codec.h"
#include "tests/vectors/fake_world.h"
#include "tests/vectors/vectors.h"

namespace kvferry::vectors {
namespace {

using proto::DecodeManager;
using proto::PrefillManager;
using proto::UseId;

constexpr Time kStart = Time(std::chrono::seconds(1000));
const Address kServer{"127.0.0.1", 8998};

// The reference never uses Transferring.
int reference_state(RoomState state) {
  return state == RoomState::kTransferring ? 2 : static_cast<int>(state);
}

Slab pool(Component component, std::uint32_t layer, std::uint64_t base, std::uint64_t item,
          std::uint32_t count, std::uint32_t tokens = 1, plan::HeadRange heads = {0, 1}) {
  Slab slab;
  slab.component = component;
  slab.layer = layer;
  slab.base = base;
  slab.item_count = count;
  slab.item_bytes = slab.item_stride = item;
  slab.rows_per_item = tokens;
  slab.head_begin = heads.begin;
  slab.head_count = heads.count;
  slab.head_bytes = static_cast<std::uint32_t>(item / tokens / heads.count);
  slab.head_stride = slab.head_bytes;
  slab.row_stride = item / tokens;
  return slab;
}

// A reference decode rank as seen by a prefill rank under test.
wire::Frames registration(const std::string& session, const Address& reply,
                          std::vector<std::uint64_t> kv, std::vector<std::uint64_t> aux,
                          std::uint64_t item, std::uint32_t tp_rank, std::uint32_t tp_size) {
  wire::Register m;
  m.reply = reply;
  m.session_name = session;
  m.tp_rank = tp_rank;
  m.tp_size = tp_size;
  m.pools.kv_pointers = std::move(kv);
  m.pools.aux_pointers = std::move(aux);
  m.pools.kv_item_length = item;
  return *wire::encode_to_prefill(wire::Message(m), wire::Dialect::kSeed);
}
wire::Frames room_message(std::uint64_t room, const std::string& session, const Address& reply,
                          std::vector<PageIndex> pages, std::optional<std::uint32_t> aux_row,
                          std::uint32_t required, bool dummy = false) {
  wire::Metadata m;
  m.room = RoomId{room};
  m.reply = reply;
  m.session_name = session;
  m.pages = std::move(pages);
  m.aux_row = aux_row;
  m.required_destinations = required;
  m.dummy = dummy;
  return *wire::encode_to_prefill(wire::Message(m), wire::Dialect::kSeed);
}

struct Prefill {
  explicit Prefill(proto::PrefillSelf self, Settings s = {})
      : settings(s), manager(std::move(self), settings, world.ports()) {}
  static proto::PrefillSelf plain() {
    proto::PrefillSelf self;
    self.control = {"127.0.0.1", 7000};
    self.bootstrap = kServer;
    self.layout.slabs = {pool(Component::kKey, 0, 0x100000, 64, 1 << 16),
                         pool(Component::kValue, 0, 0x2000000, 64, 1 << 16),
                         pool(Component::kAux, 0, 0x4000000, 32, 4096)};
    self.total_kv_heads = 1;
    self.stage_layers = 1;
    return self;
  }
  void complete_all(bool ok = true) {
    while (!world.writes.empty()) {
      const WriteSpec write = world.writes.front();
      done.push_back(write);
      world.writes.erase(world.writes.begin());
      manager.on_completion(
          {Completion::Kind::kWrite, static_cast<std::uint64_t>(write.id),
           ok ? Status() : Status(Code::kPeerLost, "engine"), true, bytes_of(write.plan)},
          now);
    }
  }
  int state(UseId use) const { return reference_state(world.views.at(use).state); }

  FakeWorld world;
  const Settings settings;
  PrefillManager manager;
  Time now = kStart;
  std::vector<WriteSpec> done;
};

TEST(Vector, UpdateStatus) {
  each_case("update_status", [](const Json& in, const Json& expected) {
    // Failed and Success are final; in the reference a failed room can rise again, and a successful
    // one fail.
    std::optional<RoomState> ours;
    if (!in.at("initial").is_null()) ours = static_cast<RoomState>(in["initial"].get<int>());
    bool was_final = ours && is_terminal(*ours);
    for (std::size_t i = 0; i < in.at("updates").size(); ++i) {
      const auto update = static_cast<RoomState>(in["updates"][i].get<int>());
      const std::optional<RoomState> before = ours;
      if (!ours) {
        if (update != RoomState::kFailed)
          ours = update;  // a late failure of a room that is not known is dropped
      } else {
        proto::move_to(*ours, update);
      }
      const Json state = ours ? Json(static_cast<int>(*ours)) : Json();
      if (was_final) {
        EXPECT_EQ(ours, before);
      } else {
        EXPECT_EQ(state, expected.at(i));
      }
      was_final = was_final || (ours && is_terminal(*ours));
    }
  });
}

TEST(Vector, WatermarkMessages) {
  each_case("watermark_messages", [](const Json& in, const Json& expected) {
    Prefill p(Prefill::plain());
    for (std::size_t i = 0; i < in.at("messages").size(); ++i) {
      p.manager.on_frames(in["messages"][i].get<wire::Frames>(), p.now);
      if (expected.is_object()) {  // the reference's thread ends; ours counts and goes on
        EXPECT_EQ(p.manager.counters().malformed_messages, 1U);
        continue;
      }
      Json seen = Json::object();
      for (const auto& [session, mark] : p.manager.watermarks())
        seen[session] = {mark.first, mark.second};
      EXPECT_EQ(seen, expected.at(i));
    }
  });
}

TEST(Vector, ManagerFlags) {
  each_case("manager_flags", [](const Json& in, const Json& expected) {
    if (in.at("mode") != "prefill") return;  // the decode side's flag is seen in rank_mapping
    proto::PrefillSelf self = Prefill::plain();
    self.place.cp_size = in.at("attn_cp_size");
    self.place.cp_rank = in.at("attn_cp_rank");
    self.attention.hybrid_mla = in.at("is_hybrid_mla");
    self.layer_split = in.at("enable_dsa_cache_layer_split");
    Settings settings;
    settings.all_cp_ranks = in.at("all_cp_env");
    Prefill p(self, settings);
    EXPECT_EQ(p.manager.is_dummy_cp_rank(), expected.at("is_dummy_cp_rank").get<bool>());
    // With one CP rank the flag decides nothing.
    if (self.place.cp_size > 1) {
      EXPECT_EQ(p.manager.all_cp_ranks(),
                expected.at("enable_all_cp_ranks_for_transfer").get<bool>());
    }
  });
}

TEST(Vector, RegisterBuffers) {
  std::size_t with_state = 0;
  each_case("register_buffers", [&](const Json& in, const Json& expected) {
    Layout layout;
    const auto add = [&](Component component, const Json& pointers, const Json& lengths) {
      for (std::uint32_t i = 0; i < pointers.size(); ++i)
        layout.slabs.push_back(pool(component, i, pointers[i], lengths.at(i), 1));
    };
    add(Component::kLatent, in.at("kv_data_ptrs"), in.at("kv_data_lens"));
    add(Component::kAux, in.at("aux_data_ptrs"), in.at("aux_data_lens"));
    std::set<std::pair<std::uint64_t, std::uint64_t>> ours, theirs;
    for (const Region& region : plan::regions_of(layout)) ours.emplace(region.base, region.bytes);
    std::set<std::uint64_t> state;
    for (const Json& component : in.at("state_data_ptrs")) {
      for (const Json& pointer : component) state.insert(pointer.get<std::uint64_t>());
    }
    with_state += state.empty() ? 0 : 1;
    for (const Json& call : expected.at("register")) {
      for (std::size_t i = 0; i < call.at(0).size(); ++i) {
        if (!state.contains(call[0][i])) theirs.emplace(call[0][i], call.at(1).at(i));
      }
    }
    EXPECT_EQ(ours, theirs);
  });
  std::cout << "[ state    ] register_buffers: state pools of " << with_state
            << " cases are passed over\n";
}

TEST(Vector, SenderCtor) {
  each_case("sender_ctor", [](const Json& in, const Json& expected) {
    proto::PrefillSelf self = Prefill::plain();
    self.place.dp_size = in.at("dp_size");
    self.place.dp_rank = in.at("attn_dp_rank");
    self.load_balance_method = in.at("load_balance_method");
    if (in.at("dummy_cp").get<bool>()) {
      self.place.cp_size = 2;
      self.place.cp_rank = 1;
    }
    Settings settings;
    settings.force_query_dp_rank = in.at("force_query");
    Prefill p(self, settings);
    const auto use = p.manager.open(RoomId{in.at("room").get<std::uint64_t>()},
                                    {in.at("req_has_dp_rank").get<bool>()}, p.now);
    ASSERT_TRUE(use.ok());
    EXPECT_EQ(p.state(*use), expected.at("status"));
    EXPECT_EQ(p.world.views[*use].failure.status.ok(), expected.at("failure").is_null());
    const Json& http = expected.at("http");
    ASSERT_EQ(p.world.calls.size(), http.is_null() ? 0U : 1U);
    if (!http.is_null()) {
      const std::string path = http.at("path");
      EXPECT_TRUE(path.ends_with(p.world.calls[0].request.path)) << path;
      EXPECT_EQ(Json::parse(p.world.calls[0].request.body), http.at("body"));
    }
  });
}

TEST(Vector, SenderChunks) {
  each_case("sender_chunks", [](const Json& in, const Json& expected) {
    proto::PrefillSelf self = Prefill::plain();
    self.place.cp_size = in.at("cp_size");
    self.place.cp_rank = in.at("cp_rank");
    self.layer_split = in.at("dsa_split");
    Settings settings;
    settings.all_cp_ranks = in.at("all_cp");
    Prefill p(self, settings);
    const std::uint64_t total = in.at("num_kv_indices");
    const auto use = p.manager.open(RoomId{5}, {}, p.now);
    EXPECT_EQ(p.state(*use), expected.at("initial_status"));
    const Address decode{"10.0.0.9", 5555};
    p.manager.on_frames(
        registration("10.0.0.9:1", decode, {0x10000000, 0x20000000}, {0x30000000}, 64, 0, 1),
        p.now);
    std::vector<PageIndex> target;
    for (std::uint64_t i = 0; i < total; ++i)
      target.push_back(static_cast<PageIndex>(1000 + 2 * i));
    p.manager.on_frames(room_message(5, "10.0.0.9:1", decode, target, 3, 1), p.now);
    const std::uint32_t aux_row = in.at("aux_index");
    ASSERT_TRUE(p.manager.init(*use, total, aux_row, p.now).ok());
    PageIndex next = in.at("first_index");
    std::uint64_t sent = 0;
    bool was_last = false;
    for (std::size_t i = 0; i < in.at("chunks").size(); ++i) {
      const std::uint64_t length = in["chunks"][i];
      std::vector<PageIndex> pages;
      for (std::uint64_t k = 0; k < length; ++k) pages.push_back(next++);
      const bool too_many = sent + length > total;
      const Status status = p.manager.send(*use, pages, {}, p.now);
      p.complete_all();
      // Sending too much fails the room; an empty trailer says nothing any more.
      if (too_many) {
        EXPECT_FALSE(status.ok());
        EXPECT_EQ(p.state(*use), 0);
        return;
      }
      sent += length;
      const Json& queued = expected.at("sends").at(i).at("queued");
      std::uint64_t pages_written = 0;
      bool aux_written = false;
      std::vector<std::uint32_t> first_targets;
      for (const WriteSpec& write : p.done) {
        for (const CopyGroup& group : write.plan) {
          const bool aux = group.lanes[0].bytes == 32;
          aux_written = aux_written || aux;
          for (const kvferry::Run& run : group.runs) {
            if (aux) continue;
            pages_written += run.count;
            first_targets.push_back(run.target_first);
          }
        }
      }
      p.done.clear();
      const bool dummy = queued.is_null() || p.manager.is_dummy_cp_rank();
      EXPECT_EQ(pages_written, dummy ? 0 : queued.at("kv_len").get<std::uint64_t>());
      if (!dummy && pages_written > 0) {
        EXPECT_EQ(first_targets.front(), 1000 + 2 * queued.at("slice").at(0).get<std::uint32_t>());
      }
      if (!dummy) {
        EXPECT_EQ(aux_written, queued.at("is_last").get<bool>() && !was_last);
      }
      was_last = was_last || sent == total;
    }
    EXPECT_EQ(p.state(*use), sent == total ? 4 : 2);
  });
}

// --- the prefill rank's receiving thread
// --------------------------------------------------------------------------

TEST(Vector, PrefillBootstrapThread) {
  each_case("prefill_bootstrap_thread", [](const Json& in, const Json& expected) {
    Prefill p(Prefill::plain());
    const Address helper{"10.9.9.9", 999};
    // The rooms as they are at the beginning.
    struct Model {
      int state = 1;
      std::map<std::string, std::uint32_t> infos;
      bool opened = false;
    };
    std::map<std::uint64_t, Model> model;
    std::map<std::uint64_t, UseId> uses;
    bool differs = !expected.at("thread_dies").is_null();
    for (const auto& [key, value] : in.at("request_status").items()) {
      if (!is_plain_number(key, kRoomMax)) {
        differs = true;  // no such room can be opened
        continue;
      }
      const std::uint64_t room = std::stoull(key);
      const int wanted = value;
      const auto use = p.manager.open(RoomId{room}, {}, p.now);
      ASSERT_TRUE(use.ok());
      uses[room] = *use;
      Model& m = model[room];
      m.opened = true;
      m.state = wanted;
      if (wanted == 0) p.manager.abort(*use, Status(Code::kAborted, "before"), p.now);
      if (wanted == 2 || wanted == 4) {
        p.manager.on_frames(registration("10.9.9.9:9", helper, {0x10, 0x20}, {}, 64, 0, 1), p.now);
        p.manager.on_frames(room_message(room, "10.9.9.9:9", helper, {}, 0, 1), p.now);
        m.infos["10.9.9.9:9"] = 1;
      }
      if (wanted == 4) {
        ASSERT_TRUE(p.manager.init(*use, 0, 0, p.now).ok());
        ASSERT_TRUE(p.manager.send(*use, {}, {}, p.now).ok());
        p.complete_all();
      }
      EXPECT_EQ(p.state(*use), wanted);
    }
    p.world.sent.clear();
    const std::uint64_t malformed_before = p.manager.counters().malformed_messages;
    std::uint64_t malformed = malformed_before, aborts = 0;
    std::set<std::string> registered;
    for (const Json& raw : in.at("messages")) {
      const wire::Frames frames = frames_from_hex(raw);
      p.manager.on_frames(frames, p.now);
      const auto message = wire::decode_at_prefill(frames);
      if (!message.ok()) {
        ++malformed;
        differs = true;
        continue;
      }
      if (const auto* r = std::get_if<wire::Register>(&*message))
        registered.insert(r->session_name);
      if (const auto* a = std::get_if<wire::Abort>(&*message)) {
        ++aborts;
        const auto it = model.find(value_of(a->room));
        if (it != model.end() && it->second.opened && it->second.state != 4) it->second.state = 0;
      }
      if (const auto* m = std::get_if<wire::Metadata>(&*message)) {
        Model& room = model[value_of(m->room)];
        if (room.state == 0 || room.state == 4) {
          differs = true;  // a terminal room stays so
          continue;
        }
        room.infos[m->session_name] = m->required_destinations;
        const std::uint32_t agreed = room.infos.begin()->second;
        const bool one_number = std::all_of(room.infos.begin(), room.infos.end(),
                                            [&](const auto& i) { return i.second == agreed; });
        if (!one_number || room.infos.size() > agreed) {
          room.state = 0;
          differs = true;
        } else if (room.infos.size() == agreed) {
          room.state = 2;
        }
      }
    }
    EXPECT_EQ(p.manager.counters().malformed_messages, malformed);
    // Every abort is answered, where it came from.
    std::multiset<std::string> ours, theirs;
    for (const auto& sent : p.world.sent) {
      if (sent.frames[0] == "ABORT_ACK")
        ours.insert("tcp://" + sent.to.host_port() + " " + sent.frames[1]);
    }
    EXPECT_EQ(ours.size(), aborts);
    for (const Json& sent : expected.at("messages_sent"))
      theirs.insert(sent.at("to").get<std::string>() + " " +
                    sent.at("frames").at(1).get<std::string>());
    if (malformed == malformed_before) {
      EXPECT_EQ(ours, theirs);
    }
    // Rooms that only decode ranks have spoken of stand as soon as they are opened.
    for (auto& [room, m] : model) {
      if (!m.opened) {
        const auto use = p.manager.open(RoomId{room}, {}, p.now);
        ASSERT_TRUE(use.ok());
        uses[room] = *use;
      }
      EXPECT_EQ(p.state(uses[room]), m.state) << "room " << room;
      const std::string key = std::to_string(room);
      if (!differs && expected.at("request_status").contains(key)) {
        EXPECT_EQ(m.state, expected["request_status"][key]) << "room " << room;
      }
      if (!differs && expected.at("prefix_len").contains(key)) {
        EXPECT_EQ(p.world.views[uses[room]].prefix_tokens,
                  expected["prefix_len"][key].get<std::uint64_t>());
      }
    }
    if (malformed == malformed_before) {
      EXPECT_EQ(Json(registered),
                Json(std::set<std::string>(expected.at("registered_sessions").begin(),
                                           expected["registered_sessions"].end())));
    }
  });
}

// --- the transfer worker
// ------------------------------------------------------------------------------------------

TEST(Vector, TransferWorker) {
  std::size_t with_state = 0, compared = 0;
  each_case("transfer_worker", [&](const Json& in, const Json& expected) {
    const Json& config = in.at("config");
    bool state = !config.at("state_types").empty();
    for (const Json& chunk : in.at("chunks"))
      state = state || (!chunk.at("state_indices").is_null() && !chunk["state_indices"].empty());
    if (state) {
      ++with_state;
      return;
    }
    proto::PrefillSelf self;
    self.control = {"127.0.0.1", 7000};
    self.bootstrap = kServer;
    self.place = {.tp_rank = config.at("attn_tp_rank"),
                  .tp_size = config.at("attn_tp_size"),
                  .pp_rank = config.at("pp_rank"),
                  .pp_size = config.at("pp_size"),
                  .cp_rank = config.at("attn_cp_rank"),
                  .cp_size = config.at("attn_cp_size")};
    self.attention = {config.at("is_mla"), config.at("is_hybrid_mla")};
    const auto total = plan::resolve_total_kv_heads(config.at("total_kv_head_num"),
                                                    config.at("kv_head_num"), self.place.tp_size);
    self.total_kv_heads = *total;
    const auto pointers = config.at("kv_data_ptrs").get<std::vector<std::uint64_t>>();
    const auto items = config.at("kv_item_lens").get<std::vector<std::uint64_t>>();
    const bool latent = self.attention.mla || self.attention.hybrid_mla;
    const std::uint32_t page = config.at("page_size");
    self.layout.page_tokens = page;
    self.stage_layers = static_cast<std::uint32_t>(latent ? pointers.size() : pointers.size() / 2);
    const plan::HeadRange heads =
        latent ? plan::HeadRange{0, 1}
               : plan::heads_of_rank(*total, self.place.tp_size, self.place.tp_rank);
    for (std::uint32_t i = 0; i < pointers.size(); ++i) {
      const Component component = latent                  ? Component::kLatent
                                  : i < self.stage_layers ? Component::kKey
                                                          : Component::kValue;
      self.layout.slabs.push_back(
          pool(component, i % self.stage_layers, pointers[i], items[i], 1 << 20, page, heads));
    }
    for (std::uint32_t i = 0; i < config.at("aux_data_ptrs").size(); ++i)
      self.layout.slabs.push_back(pool(Component::kAux, i, config["aux_data_ptrs"][i],
                                       config.at("aux_item_lens").at(i), 1 << 16));
    Settings settings;
    settings.all_cp_ranks = true;  // a chunk in the worker's queue is meant for this rank
    Prefill p(self, settings);

    // Who is registered, and where each session of each room listens.
    std::map<std::string, Address> reply;
    for (const auto& [room, infos] : in.at("transfer_infos").items()) {
      for (const Json& info : infos)
        reply[info.at("session")] = {info.at("endpoint"), info.at("dst_port").get<std::uint16_t>()};
    }
    std::set<std::string> registered;
    bool sound = true, meet = true;
    for (const Json& r : in.at("registrations")) {
      const std::string session = r.at("session");
      // Decode ranks that the mapping never sends here share no heads with this rank: the planner
      // then has nothing to copy.
      const std::uint32_t d = r.at("dst_attn_tp_size"),
                          d_rank = r.at("dst_tp_rank").get<std::uint32_t>() % d,
                          own = self.place.tp_rank, size = self.place.tp_size;
      meet =
          meet && (latent || (size >= d ? own / (size / d) == d_rank : d_rank / (d / size) == own));
      registered.insert(session);
      const auto kv = r.at("dst_kv_ptrs").get<std::vector<std::uint64_t>>();
      sound = sound && kv.size() >= pointers.size();
      p.manager.on_frames(
          registration(session, reply[session], kv,
                       r.at("dst_aux_ptrs").get<std::vector<std::uint64_t>>(),
                       r.at("dst_kv_item_len"), r.at("dst_tp_rank"), r.at("dst_attn_tp_size")),
          p.now);
    }
    std::map<std::uint64_t, std::uint64_t> pages;  // of each room, from its chunks
    std::map<std::uint64_t, bool> has_last;
    for (const Json& chunk : in.at("chunks")) {
      pages[chunk.at("room")] =
          std::max(pages[chunk["room"]], chunk.at("slice").at(1).get<std::uint64_t>());
      has_last[chunk["room"]] = has_last[chunk["room"]] || chunk.at("is_last").get<bool>();
    }
    std::map<std::uint64_t, UseId> uses;
    std::map<std::uint64_t, bool> fault, dummy_only;
    std::map<std::uint64_t, std::set<std::string>> real;
    for (const auto& [key, infos] : in.at("transfer_infos").items()) {
      const std::uint64_t room = std::stoull(key);
      const bool known = in.at("request_status").contains(key);
      if (known && in["request_status"][key] != 2)
        sound = false;  // a room that has ended is over with us
      if (known) uses[room] = *p.manager.open(RoomId{room}, {}, p.now);
      if (!known) sound = false;
      dummy_only[room] = true;
      const std::uint32_t required = infos.at(0).at("required_dst_info_num");
      if (required != infos.size()) fault[room] = true;  // one agreed number
      for (const Json& info : infos) {
        const bool dummy = info.at("is_dummy");
        const std::string session = info.at("session");
        const bool aux = info.at("dst_aux_index").is_number_integer();
        if (!dummy) {
          dummy_only[room] = false;
          real[room].insert("tcp://" + reply[session].host_port());
          if (!registered.contains(session) || !aux) fault[room] = true;
          if (info.at("dst_kv_indices").size() < pages[room]) fault[room] = true;
        }
        if (info.at("required_dst_info_num") != required) fault[room] = true;
        if (!dummy && !aux) continue;  // such a message is refused by the decoder
        p.manager.on_frames(
            room_message(
                room, session, reply[session],
                dummy ? std::vector<PageIndex>{}
                      : info.at("dst_kv_indices").get<std::vector<PageIndex>>(),
                dummy ? std::nullopt
                      : std::optional<std::uint32_t>(info["dst_aux_index"].get<std::uint32_t>()),
                info.at("required_dst_info_num"), dummy),
            p.now);
      }
    }
    bool engine_fails = false;
    for (const Json& ret : in.at("engine_rets")) engine_fails = engine_fails || ret != 0;
    std::size_t next_ret = 0;
    std::map<std::uint64_t, bool> initialised;
    for (const Json& chunk : in.at("chunks")) {
      const std::uint64_t room = chunk.at("room");
      if (!uses.contains(room)) continue;
      if (!initialised[room]) {
        // A room whose last chunk is not among the vector's has more to come.
        initialised[room] = true;
        const std::uint32_t aux_row = 0;
        std::uint32_t row = aux_row;
        for (const Json& c : in["chunks"]) {
          if (c.at("room") == room && c.at("aux_index").is_number_integer()) row = c["aux_index"];
        }
        (void)p.manager.init(uses[room], pages[room] + (has_last[room] ? 0 : 1), row, p.now);
      }
      (void)p.manager.send(uses[room], chunk.at("kv_indices").get<std::vector<PageIndex>>(), {},
                           p.now);
      while (!p.world.writes.empty()) {
        const WriteSpec write = p.world.writes.front();
        p.world.writes.erase(p.world.writes.begin());
        p.done.push_back(write);
        bool ok = true;  // the reference makes one call for the KV and one for the aux row
        for (std::size_t g = 0; g < write.plan.size(); ++g) {
          const Json ret =
              next_ret < in["engine_rets"].size() ? in["engine_rets"][next_ret] : Json(0);
          ++next_ret;
          ok = ok && ret == 0;
        }
        p.manager.on_completion(
            {Completion::Kind::kWrite, static_cast<std::uint64_t>(write.id),
             ok ? Status() : Status(Code::kPeerLost, "engine"), true, bytes_of(write.plan)},
            p.now);
      }
    }
    // What each room became and who was told.
    std::map<std::uint64_t, std::multiset<std::string>> told_ok, told_failed;
    std::multiset<std::string> ours, theirs;
    for (const auto& sent : p.world.sent) {
      if (sent.frames.size() != 3) continue;
      const std::string to = "tcp://" + sent.to.host_port();
      ours.insert(to + " " + sent.frames[0] + " " + sent.frames[1] + " " + sent.frames[2]);
      (sent.frames[1] == "4" ? told_ok : told_failed)[std::stoull(sent.frames[0])].insert(to);
    }
    for (const auto& [room, use] : uses) {
      const int state_now = p.state(use);
      if (fault[room]) {
        EXPECT_NE(state_now, 4) << "room " << room << " succeeded in spite of its fault";
        EXPECT_TRUE(told_ok[room].empty());
      }
      if (state_now == 4 && !dummy_only[room]) {
        EXPECT_EQ(told_ok[room], std::multiset<std::string>(real[room].begin(), real[room].end()));
      }
      if (state_now == 0) {  // every destination that has spoken is told once, and none of success
        EXPECT_TRUE(told_ok[room].empty());
        for (const std::string& to : told_failed[room]) EXPECT_EQ(told_failed[room].count(to), 1U);
        if (engine_fails && !fault[room]) {
          EXPECT_EQ(told_failed[room],
                    std::multiset<std::string>(real[room].begin(), real[room].end()));
        }
      }
    }
    const bool any_fault =
        std::any_of(fault.begin(), fault.end(), [](const auto& f) { return f.second; });
    const bool clean = sound && !any_fault && !engine_fails && in.at("failed_sessions").empty() &&
                       expected.at("worker_dies").is_null();
    if (!clean) return;
    ++compared;
    for (const auto& [room, use] : uses)
      EXPECT_EQ(p.state(use), expected.at("request_status").at(std::to_string(room)))
          << "room " << room;
    for (const Json& message : expected.at("messages")) {
      std::string line = message.at("to");
      for (const Json& frame : message.at("frames")) line += " " + frame.get<std::string>();
      theirs.insert(line);
    }
    EXPECT_EQ(ours, theirs);
    std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t>> our_bytes, their_bytes;
    for (const WriteSpec& write : p.done) {
      for (const plan::Block& b : plan::expand(write.plan)) {
        for (std::uint64_t i = 0; i < b.bytes; ++i)
          our_bytes.emplace_back(write.to, b.source + i, b.target + i);
      }
    }
    for (const Json& call : expected.at("engine_calls")) {
      for (const Json& b : call.at("blocks")) {
        for (std::uint64_t i = 0; i < b.at(2).get<std::uint64_t>(); ++i)
          their_bytes.emplace_back(call.at("session").get<std::string>(),
                                   b.at(0).get<std::uint64_t>() + i,
                                   b.at(1).get<std::uint64_t>() + i);
      }
    }
    std::sort(our_bytes.begin(), our_bytes.end());
    std::sort(their_bytes.begin(), their_bytes.end());
    if (!meet) return;
    EXPECT_EQ(our_bytes.size(), their_bytes.size());
    EXPECT_TRUE(our_bytes == their_bytes);
  });
  if (!IsSkipped()) {
    EXPECT_GT(compared, 0U);
    std::cout << "[ compared ] transfer_worker: " << compared << " byte for byte; " << with_state
              << " with state components passed over\n";
  }
}

// --- the decode rank
// ----------------------------------------------------------------------------------------------

struct Decode {
  explicit Decode(proto::DecodeSelf self, Settings s = {})
      : settings(s), manager(std::move(self), settings, world.ports()) {}
  static proto::DecodeSelf plain() {
    proto::DecodeSelf self;
    self.control = {"127.0.0.1", 6000};
    self.layout.slabs = {pool(Component::kKey, 0, 0x100000, 64, 1 << 16),
                         pool(Component::kValue, 0, 0x2000000, 64, 1 << 16)};
    self.session_name = "127.0.0.1:6001";
    self.total_kv_heads = 1;
    return self;
  }
  // Answers calls as a server of the reference with this topology would: `rank` gives a rank's
  // port, 0 for 404.
  void serve(const wire::Topology& topology,
             const std::function<std::uint16_t(const std::string& path)>& rank) {
    while (!world.calls.empty()) {
      const FakeWorld::Call call = world.calls.front();
      world.calls.erase(world.calls.begin());
      answered.push_back(call.request.path);
      proto::HttpResponse response{404, "not found"};
      if (call.request.path.find("=-1") != std::string::npos) {
        response = {200, wire::to_json(topology)};
      } else if (call.request.path.starts_with("/route?")) {
        if (const std::uint16_t port = rank(call.request.path); port != 0)
          response = {200, wire::to_json(Address{"127.0.0.1", port})};
      }
      manager.on_http(call.id, response, now);
    }
  }
  int state(UseId use) const { return reference_state(world.views.at(use).state); }

  FakeWorld world;
  const Settings settings;
  DecodeManager manager;
  Time now = kStart;
  std::vector<std::string> answered;
};

TEST(Vector, DecodeThread) {
  each_case("decode_thread", [](const Json& in, const Json& expected) {
    const Json& aux = in.at("aux");
    const std::uint32_t slots = aux.at("slots");
    proto::DecodeSelf self = Decode::plain();
    std::vector<std::uint64_t> bases;
    for (std::uint32_t i = 0; i < aux.at("item_lens").size(); ++i) {
      bases.push_back(0x8000000 + i * 0x100000);
      self.layout.slabs.push_back(
          pool(Component::kAux, i, bases.back(), aux["item_lens"][i], slots));
    }
    Decode d(self);
    // The row that each room lends: that of the first aux message about it.
    std::map<std::uint64_t, std::uint32_t> row;
    for (const Json& raw : in.at("messages")) {
      const auto message = wire::decode_at_decode(frames_from_hex(raw));
      if (const auto* m = message.ok() ? std::get_if<wire::AuxData>(&*message) : nullptr;
          m != nullptr && m->row < slots)
        row.emplace(value_of(m->room), m->row);
    }
    struct Model {
      int state = 2;
      std::uint64_t required = 1;
      std::set<std::uint32_t> ranks;
      bool lent = false;
    };
    std::map<std::uint64_t, Model> model;
    std::map<std::uint64_t, UseId> uses;
    std::uint16_t port = 9000;
    for (const auto& [key, value] : in.at("request_status").items()) {
      const std::uint64_t room = std::stoull(key);
      Model& m = model[room];
      m.state = value;
      m.required = in.at("required_responses").value(key, std::uint64_t{1});
      // Each room has an instance of its own, of as many ranks as it needs answers.
      wire::Topology topology;
      topology.tp_size = static_cast<std::uint32_t>(m.required);
      topology.page_size = 1;
      topology.kv_cache_dtype = "auto";
      const auto use = d.manager.open(RoomId{room}, {"127.0.0.1", port++}, d.now);
      ASSERT_TRUE(use.ok());
      uses[room] = *use;
      if (m.state == 1) continue;
      ASSERT_TRUE(d.manager.init(*use, 0, d.now).ok());
      d.serve(topology, [](const std::string&) { return std::uint16_t{1000}; });
      ASSERT_TRUE(
          d.manager.send_metadata(*use, {{1}, row.contains(room) ? row[room] : 0, 0}, d.now).ok());
      m.lent = true;
      if (m.state == 0) d.manager.abort(*use, Status(Code::kAborted, "before"), d.now);
      if (m.state == 4) {
        for (std::uint32_t rank = 0; rank < m.required; ++rank)
          d.manager.on_frames({key, "4", std::to_string(rank)}, d.now);
      }
      EXPECT_EQ(d.state(*use), m.state);
    }
    std::vector<std::string> memory;
    for (const Json& length : aux.at("item_lens"))
      memory.emplace_back(length.get<std::size_t>() * slots, '\0');
    std::uint64_t malformed = 0;
    bool differs = !expected.at("thread_dies").is_null();
    for (const Json& raw : in.at("messages")) {
      const wire::Frames frames = frames_from_hex(raw);
      d.manager.on_frames(frames, d.now);
      const auto message = wire::decode_at_decode(frames);
      if (!message.ok()) {
        ++malformed;
        differs = true;
        continue;
      }
      if (const auto* m = std::get_if<wire::Done>(&*message)) {
        const auto it = model.find(value_of(m->room));
        if (it == model.end()) continue;
        Model& room = it->second;
        if (room.state == 0 || room.state == 4) {
          differs =
              differs || m->state == RoomState::kFailed || room.state == 0;  // final states stay
          continue;
        }
        if (m->state == RoomState::kFailed) room.state = 0;
        if (m->state == RoomState::kSuccess) {
          if (!room.lent) {
            differs = true;  // of an earlier use of the number
            continue;
          }
          room.ranks.insert(m->unique_rank);
          if (room.ranks.size() >= room.required) room.state = 4;
        }
      }
      if (const auto* m = std::get_if<wire::AuxData>(&*message)) {
        const auto it = model.find(value_of(m->room));
        const bool fits = it != model.end() && it->second.lent && it->second.state == 2 &&
                          m->buffer < memory.size() && m->row < slots &&
                          row[value_of(m->room)] == m->row &&
                          m->bytes.size() == aux["item_lens"][m->buffer].get<std::size_t>();
        if (fits) {
          memory[m->buffer].replace(m->row * m->bytes.size(), m->bytes.size(), m->bytes);
        } else {
          differs = true;
        }
      }
    }
    EXPECT_EQ(d.manager.counters().malformed_messages, malformed);
    for (const auto& [room, m] : model) {
      EXPECT_EQ(d.state(uses[room]), m.state) << "room " << room;
      if (!differs) {
        EXPECT_EQ(m.state, expected.at("request_status").at(std::to_string(room)))
            << "room " << room;
      }
    }
    std::vector<std::string> ours;
    for (std::size_t i = 0; i < memory.size(); ++i) {
      ours.emplace_back(memory[i].size(), '\0');
      for (const auto& [address, bytes] : d.world.stored) {
        if (address >= bases[i] && address < bases[i] + memory[i].size())
          ours[i].replace(address - bases[i], bytes.size(), bytes);
      }
      EXPECT_EQ(to_hex(ours[i]), to_hex(memory[i]));
      if (!differs) {
        EXPECT_EQ(to_hex(ours[i]), expected.at("aux_memory_hex").at(i));
      }
    }
  });
}

TEST(Vector, ReceiverSetup) {
  each_case("receiver_setup", [](const Json& in, const Json& expected) {
    const Json& info = in.at("prefill_info");
    const auto tp = info.at("target_tp_ranks").get<std::vector<std::uint32_t>>();
    const std::size_t cp = info.at("target_cp_ranks").size(),
                      pp = info.at("target_pp_ranks").size();
    // No topology leads to such a mapping.
    if (pp == 0 || tp[0] % tp.size() != 0 || info.at("target_tp_rank").is_null() ||
        !info.value("known", true))
      return;
    const auto ratio = static_cast<std::uint32_t>(tp.size());
    proto::DecodeSelf self = Decode::plain();
    self.place.tp_rank = tp[0] / ratio;
    self.place.tp_size = self.place.tp_rank + 1;
    self.attention.mla = in.at("is_mla");
    self.total_kv_heads = 64;
    Settings settings;
    settings.all_cp_ranks = cp > 1;
    Decode d(self, settings);
    wire::Topology topology;
    topology.tp_size = self.place.tp_size * ratio;
    topology.cp_size = static_cast<std::uint32_t>(cp);
    topology.pp_size = static_cast<std::uint32_t>(pp);
    const std::uint32_t dp = in.at("prefill_dp_rank");
    topology.dp_size = dp + 1;
    topology.page_size = 1;
    topology.kv_cache_dtype = "auto";
    // The vector's ranks listen on ports that tell their place: read them off where they are given.
    const auto place_of = [](const std::string& path) {
      Json place = Json::array();
      for (std::size_t at = path.find('='); at != std::string::npos; at = path.find('=', at + 1))
        place.push_back(std::stoi(path.substr(at + 1)));
      return place;
    };
    std::vector<Json> lookups;
    const auto rank = [&](const std::string& path) -> std::uint16_t {
      const Json place = place_of(path);
      lookups.push_back(place);
      for (const Json& missing : in.at("missing")) {
        if (missing == place) return 0;
      }
      return static_cast<std::uint16_t>(1000 + place[1].get<int>() * 100 +
                                        place[2].get<int>() * 10 + place[3].get<int>());
    };
    for (std::size_t i = 0; i < in.at("rooms").size(); ++i) {
      const Json& want = expected.at("rooms").at(i);
      lookups.clear();
      d.world.sent.clear();
      const std::uint64_t room = in["rooms"][i];
      const auto use = d.manager.open(RoomId{room}, kServer, d.now);
      ASSERT_TRUE(use.ok());
      ASSERT_TRUE(d.manager.init(*use, dp, d.now).ok());
      d.serve(topology, rank);
      EXPECT_EQ(d.state(*use), want.at("status"));
      // The same ranks in the same order; where one is missing the reference stops there.
      for (std::size_t k = 0; k < want.at("lookups").size() && k < lookups.size() && i == 0; ++k)
        EXPECT_EQ(lookups[k], want["lookups"][k]);
      if (in.at("missing").empty()) {
        EXPECT_EQ(lookups.size(), want.at("lookups").size());
      }
      std::vector<Address> registered;
      for (const auto& sent : d.world.sent) {
        if (sent.frames[0] == "None") registered.push_back(sent.to);
      }
      // Nobody is registered with before all ranks of the room are known.
      ASSERT_EQ(registered.size(), in.at("missing").empty() ? want.at("registrations").size() : 0U);
      if (!in.at("missing").empty()) continue;
      ASSERT_TRUE(d.manager.send_metadata(*use, {{1}, 0, 0}, d.now).code() != Code::kInternal);
      const auto sources = d.manager.sources(*use);
      if (sources.empty()) continue;  // no aux pool in this layout: refused above
      ASSERT_EQ(sources.size(), want.at("bootstrap_infos").size());
      for (std::size_t k = 0; k < sources.size(); ++k)
        EXPECT_EQ(sources[k].dummy, want["bootstrap_infos"][k].at(2).get<bool>());
    }
  });
}

TEST(Vector, ParallelInfoChecks) {
  each_case("parallel_info_checks", [](const Json& in, const Json& expected) {
    proto::DecodeSelf self = Decode::plain();
    self.layout.page_tokens = in.at("decode").at("page_size");
    self.layout.slabs = {pool(Component::kKey, 0, 0x100000, 64, 16, self.layout.page_tokens),
                         pool(Component::kValue, 0, 0x200000, 64, 16, self.layout.page_tokens)};
    self.kv_cache_dtype = in["decode"].at("kv_cache_dtype");
    self.place.tp_size = in["decode"].at("attn_tp_size");
    Decode d(self);
    const auto use = d.manager.open(RoomId{5}, kServer, d.now);
    ASSERT_TRUE(d.manager.init(*use, 0, d.now).ok());
    const int status = in.at("http_status");
    const std::string body = in.at("server_json").is_null() ? "" : in["server_json"].dump();
    for (int i = 0; i < 8 && !d.world.calls.empty(); ++i) {
      const FakeWorld::Call call = d.world.calls.front();
      d.world.calls.erase(d.world.calls.begin());
      proto::HttpResponse response{404, ""};
      if (call.request.path.find("=-1") != std::string::npos) response = {status, body};
      if (call.request.path.find("=-1") == std::string::npos &&
          call.request.path.starts_with("/route?"))
        response = {200, wire::to_json(Address{"127.0.0.1", 1000})};
      d.manager.on_http(call.id, response, d.now);
    }
    // Sizes are whole numbers of at least 1. A key that is not known is harmless only with a
    // harmless value.
    const Json& s = in["server_json"];
    bool sound = true;
    for (const char* key : {"attn_tp_size", "attn_cp_size", "pp_size", "dp_size"}) {
      if (!s.contains(key)) continue;
      const bool whole = s[key].is_number_integer() ||
                         (s[key].is_string() && is_plain_number(s[key].get<std::string>()));
      sound = sound && whole && s[key] != 0;
    }
    const bool reference_ok = expected.value("ok", false);
    const bool ours = d.state(*use) == 2;
    if (expected.contains("raises") || !sound) {
      EXPECT_FALSE(ours);
    } else if (status != 200) {
      EXPECT_EQ(d.state(*use), 1) << "asked again later";
    } else if (reference_ok) {
      EXPECT_TRUE(ours) << d.world.views[*use].failure.status.to_string();
    } else {
      EXPECT_EQ(d.state(*use), 0) << "an unknown key with a value that may matter";
      EXPECT_FALSE(d.world.views[*use].failure.status.message().empty());
    }
  });
}

// --- the life of a handle
// -----------------------------------------------------------------------------------------

TEST(Vector, SenderReceiverLifecycle) {
  each_case("sender_receiver_lifecycle", [](const Json& in, const Json& expected) {
    const bool sender = in.at("side") == "sender";
    Settings settings;
    settings.bootstrap_timeout = settings.waiting_timeout =
        std::chrono::seconds(in.at("timeout_s").get<int>());
    // The room in the state of the vector. What the reference sets from outside (set:N) is not
    // possible with us.
    if (in.at("status_in_manager").is_null()) return;
    const int initial = in["status_in_manager"];
    Prefill p(Prefill::plain(), settings);
    Decode d(Decode::plain(), settings);
    UseId use{};
    const Address decode{"10.0.0.9", 5555};
    if (sender) {
      use = *p.manager.open(RoomId{5}, {}, p.now);
      p.manager.on_frames(
          registration("10.0.0.9:1", decode, {0x10000000, 0x20000000}, {0x30000000}, 64, 0, 1),
          p.now);
      if (initial >= 2)
        p.manager.on_frames(room_message(5, "10.0.0.9:1", decode, {4}, 0, 1), p.now);
      if (initial >= 3) {
        ASSERT_TRUE(p.manager.init(use, 1, 0, p.now).ok() &&
                    p.manager.send(use, {1}, {}, p.now).ok());
      }
      if (initial == 4) p.complete_all();
      if (initial == 0) p.manager.abort(use, Status(Code::kAborted, "boom"), p.now);
    } else {
      wire::Topology topology;
      topology.page_size = 1;
      topology.kv_cache_dtype = "auto";
      use = *d.manager.open(RoomId{5}, kServer, d.now);
      if (initial != 1) {
        ASSERT_TRUE(d.manager.init(use, 0, d.now).ok());
        d.serve(topology, [](const std::string&) { return std::uint16_t{1000}; });
      }
      if (initial >= 3) {
        ASSERT_TRUE(d.manager.send_metadata(use, {{1}, {}, 0}, d.now).ok());
      }
      if (initial == 4) d.manager.on_frames({"5", "4", "0"}, d.now);
      if (initial == 0) d.manager.abort(use, Status(Code::kAborted, "boom"), d.now);
    }
    const auto state = [&] {
      return sender ? p.world.views.at(use).state : d.world.views.at(use).state;
    };
    if (initial != 3) {
      EXPECT_EQ(reference_state(state()), initial);
    }
    if (initial == 3) return;  // never used by the reference; ours has its own deadline of progress
    const double age = in.at("age_s").is_null() ? 0 : in["age_s"].get<double>();
    const Time later = kStart + std::chrono::milliseconds(static_cast<std::int64_t>(age * 1000));
    if (sender) p.manager.advance(later);
    if (!sender) d.manager.advance(later);
    bool cleared = false;
    for (std::size_t i = 0; i < in.at("ops").size(); ++i) {
      const std::string op = in["ops"][i];
      const RoomState before = state();
      if (op == "abort") {
        if (sender) p.manager.abort(use, Status(Code::kAborted, "Aborted by AbortReq."), later);
        if (!sender) d.manager.abort(use, Status(Code::kAborted, "Aborted by AbortReq."), later);
        // An abort after the end changes nothing; the reference turns a success into a failure.
        if (!cleared) {
          EXPECT_EQ(state(), is_terminal(before) ? before : RoomState::kFailed);
        }
      } else if (op == "failure_exception" && !is_terminal(before)) {
        return;  // asking why a room failed that has not failed ends it in the reference
      } else if (op == "clear") {
        if (sender) p.manager.clear(use, later);
        if (!sender) d.manager.clear(use, later);
        cleared = true;
      } else if (op == "poll" && !cleared && !expected.at(i).contains("raises")) {
        // The reference times out Bootstrapping on the sender and WaitingForInput on the receiver;
        // we also a receiver that is not served at all. It also turns Success into Failed by a
        // later abort.
        const bool receiver_bootstrapping =
            !sender && initial == 1 && age >= in["timeout_s"].get<double>();
        const bool waits_for_engine = sender && initial == 2;
        if (is_terminal(before)) {
          EXPECT_EQ(state(), before);
        } else if (!receiver_bootstrapping && !waits_for_engine) {
          EXPECT_EQ(reference_state(state()), expected[i].at("result"));
        }
      }
    }
    if (age >= in["timeout_s"].get<double>() &&
        ((sender && initial == 1) || (!sender && initial == 2))) {
      EXPECT_EQ(state(), RoomState::kFailed);
    }
  });
}

}  // namespace
}  // namespace kvferry::vectors
