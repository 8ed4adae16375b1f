// Every message between a prefill rank and a decode rank, said once. Two codecs put them into
// frames: `sglang` (the reference's) and `native` (ours). Fields that only one codec carries say
// so.
//
// describe(message, f) names the fields in wire order for the native codec, the dump, the fuzzer
// and the generators. Fields are only ever appended (docs/PROTOCOL.md, "compatibility").
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kvferry/data_plane.h"
#include "kvferry/layout.h"
#include "kvferry/types.h"

namespace kvferry::wire {

using Frames = std::vector<std::string>;
template <class T>
using Lists = std::vector<std::vector<T>>;

// Staging ring of a decode rank, as the reference's registration carries it.
struct StagingRegion {
  std::uint64_t base = 0, bytes = 0;
  friend bool operator==(const StagingRegion&, const StagingRegion&) = default;
};

// What only a reference peer says of its memory: pointers whose meaning is their position (sglang).
struct PositionalPools {
  std::vector<std::uint64_t> kv_pointers, aux_pointers;
  Lists<std::uint64_t> state_pointers;
  std::uint64_t kv_item_length = 0;
  Lists<std::uint32_t> state_item_lengths, state_dims;
  std::vector<std::uint32_t> kv_layer_ids;         // 0.5.17 and later; empty: by position
  Lists<std::uint32_t> state_layer_ids;            // 0.5.17 and later
  std::uint32_t dcp_size = 1, dcp_rank = 0;        // 0.5.17 and later
  std::vector<std::uint64_t> staging_slot_layers;  // 0.5.20 and later
  std::vector<std::uint64_t> kv_item_lengths;  // 0.5.21 and later; empty: kv_item_length for all
  friend bool operator==(const PositionalPools&, const PositionalPools&) = default;
};

// Decode rank -> prefill rank, once for each pair and session: here is my memory.
struct Register {
  Address reply;             // where the decode rank listens
  std::string session_name;  // data plane address, "host:port" (sglang)
  std::uint32_t tp_rank = 0, tp_size = 1;
  PositionalPools pools;                 // sglang
  std::optional<StagingRegion> staging;  // sglang
  Token life;                            // native: of the decode process
  PlaneAddress plane;                    // native
  RankPlace place;                       // native
  Layout layout;                         // native
  // Native, since version 3: layout_hash() of the prefill rank's layout, as the bootstrap server
  // gave it and the writers were elected by it; 0: not said.
  std::uint64_t expected_layout = 0;
  friend bool operator==(const Register&, const Register&) = default;
};

// Decode rank -> prefill rank, once for each room: here are the pages that take the KV.
struct Metadata {
  RoomId room{};
  Address reply;             // sglang
  std::string session_name;  // sglang
  Token grant;  // native: the right to write, and the name of this use of the room number
  std::vector<PageIndex> pages;
  std::optional<std::uint32_t> aux_row;
  Lists<std::int32_t> states;
  std::uint32_t required_destinations = 1;
  std::optional<std::uint64_t> prefix_tokens;  // already held by the decode side
  bool dummy = false;                          // nothing to send; the sender's room only has to end
  bool writes_aux = true;  // native: this prefill rank is the elected writer of the aux row
  std::vector<PageIndex> device_pages;  // 0.5.17 and later (sglang)
  // Native, since version 2: the shares (plan/planner.h) that this prefill rank was elected to
  // write. `states` is by the kinds' numbers there; in sglang by the order of the rank's pools.
  std::uint32_t writes = ~std::uint32_t{0};
  // Native, since version 3, where the prefill side has CP ranks: the decode rank waits for a part
  // from each of them; false: for all from the first.
  std::optional<bool> all_cp_ranks;
  friend bool operator==(const Metadata&, const Metadata&) = default;
};

// Prefill -> decode: this rank has nothing in flight for the room any more, and this is how it
// ended.
struct Done {
  RoomId room{};
  RoomState state = RoomState::kSuccess;  // Failed or Success
  std::uint32_t unique_rank = 0;
  Token grant;         // native
  std::string reason;  // native
  friend bool operator==(const Done&, const Done&) = default;
};

// Either way: the room has failed here. Says nothing about writes in flight.
struct Abort {
  RoomId room{};
  Address reply;                            // sglang
  std::optional<std::uint64_t> generation;  // sglang, 0.5.23
  Token grant;                              // native
  std::string reason;                       // native
  friend bool operator==(const Abort&, const Abort&) = default;
};

// Prefill -> decode: answer to Abort. Drained (nothing writes any more) if it carries the rank.
struct AbortAck {
  RoomId room{};
  std::optional<std::uint32_t> unique_rank;
  std::optional<std::uint64_t> generation;
  Token grant;  // native
  friend bool operator==(const AbortAck&, const AbortAck&) = default;
};

// Prefill -> decode: one aux row over the control plane. The reference has it; native ranks write
// aux rows over the data plane alone, because a lost control message would leave a row missing in a
// room that succeeds.
struct AuxData {
  RoomId room{};
  std::uint32_t buffer = 0, row = 0;
  std::string bytes;
  Token grant;  // not used
  friend bool operator==(const AuxData&, const AuxData&) = default;
};

struct ChunkReady {
  RoomId room{};
  std::uint32_t chunk = 0, page_begin = 0, pages = 0;
  std::string session_name;
  std::uint32_t unique_rank = 0;
  friend bool operator==(const ChunkReady&, const ChunkReady&) = default;
};

struct StagingRequest {
  RoomId room{};
  std::uint32_t chunk = 0, pages = 0;
  std::string session_name;
  std::optional<std::uint32_t> pp_rank;  // 0.5.18 and later
  friend bool operator==(const StagingRequest&, const StagingRequest&) = default;
};

inline constexpr std::int64_t kStagingNeverFits = -2;

struct StagingGrant {
  RoomId room{};
  std::uint32_t chunk = 0;
  std::int64_t offset = 0;  // kStagingNeverFits: refused for good
  std::uint64_t round = 0;
  std::int64_t end = 0;
  std::string session_name;
  friend bool operator==(const StagingGrant&, const StagingGrant&) = default;
};

struct Watermark {
  std::uint64_t round = 0, tail = 0;
  std::string session_name;  // may be empty
  friend bool operator==(const Watermark&, const Watermark&) = default;
};

// Prefill -> decode (native): may I go on writing? The answer permits it until asked_at + write
// lease, on the asker's clock.
struct Ping {
  std::uint64_t asked_at_ns = 0;
  friend bool operator==(const Ping&, const Ping&) = default;
};
struct Pong {
  std::uint64_t asked_at_ns = 0;
  friend bool operator==(const Pong&, const Pong&) = default;
};

// Either way (native): the session of this message is not known here, or is over. Never answered.
struct Unknown {
  std::string reason;
  friend bool operator==(const Unknown&, const Unknown&) = default;
};

// Kinds are numbered by their place here: append only.
using Message = std::variant<Register, Metadata, StagingRequest, StagingGrant, ChunkReady, Done,
                             Abort, AbortAck, Ping, Pong, Unknown, AuxData, Watermark>;

const char* name_of(const Message& message);

// --- fields
// -------------------------------------------------------------------------------------------------------
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Address>
void describe(M& m, F&& f) {
  f("host", m.host), f("port", m.port);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Token>
void describe(M& m, F&& f) {
  f("high", m.high), f("low", m.low);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, RankPlace>
void describe(M& m, F&& f) {
  f("tp_rank", m.tp_rank), f("tp_size", m.tp_size), f("pp_rank", m.pp_rank),
      f("pp_size", m.pp_size);
  f("cp_rank", m.cp_rank), f("cp_size", m.cp_size), f("dp_rank", m.dp_rank),
      f("dp_size", m.dp_size);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Memory>
void describe(M& m, F&& f) {
  f("kind", m.kind), f("device", m.device);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Slab>
void describe(M& m, F&& f) {
  f("component", m.component), f("layer", m.layer), f("dtype", m.dtype), f("memory", m.memory),
      f("base", m.base);
  f("item_count", m.item_count), f("item_bytes", m.item_bytes), f("item_stride", m.item_stride);
  f("rows_per_item", m.rows_per_item), f("row_stride", m.row_stride), f("head_begin", m.head_begin);
  f("head_count", m.head_count), f("head_bytes", m.head_bytes), f("head_stride", m.head_stride);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Layout>
void describe(M& m, F&& f) {
  f("page_tokens", m.page_tokens), f("slabs", m.slabs);
}

template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, StagingRegion>
void describe(M& m, F&& f) {
  f("base", m.base), f("bytes", m.bytes);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, PositionalPools>
void describe(M& m, F&& f) {
  f("kv_pointers", m.kv_pointers), f("aux_pointers", m.aux_pointers),
      f("state_pointers", m.state_pointers);
  f("kv_item_length", m.kv_item_length), f("state_item_lengths", m.state_item_lengths),
      f("state_dims", m.state_dims);
  f("kv_layer_ids", m.kv_layer_ids), f("state_layer_ids", m.state_layer_ids),
      f("dcp_size", m.dcp_size);
  f("dcp_rank", m.dcp_rank), f("staging_slot_layers", m.staging_slot_layers),
      f("kv_item_lengths", m.kv_item_lengths);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Register>
void describe(M& m, F&& f) {
  f("reply", m.reply), f("session_name", m.session_name), f("tp_rank", m.tp_rank),
      f("tp_size", m.tp_size);
  f("pools", m.pools), f("staging", m.staging), f("life", m.life), f("plane", m.plane),
      f("place", m.place);
  f("layout", m.layout), f("expected_layout", m.expected_layout);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Metadata>
void describe(M& m, F&& f) {
  f("room", m.room), f("reply", m.reply), f("session_name", m.session_name), f("grant", m.grant),
      f("pages", m.pages);
  f("aux_row", m.aux_row), f("states", m.states),
      f("required_destinations", m.required_destinations);
  f("prefix_tokens", m.prefix_tokens), f("dummy", m.dummy), f("writes_aux", m.writes_aux);
  f("device_pages", m.device_pages), f("writes", m.writes), f("all_cp_ranks", m.all_cp_ranks);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Done>
void describe(M& m, F&& f) {
  f("room", m.room), f("state", m.state), f("unique_rank", m.unique_rank), f("grant", m.grant),
      f("reason", m.reason);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Abort>
void describe(M& m, F&& f) {
  f("room", m.room), f("reply", m.reply), f("generation", m.generation), f("grant", m.grant),
      f("reason", m.reason);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, AbortAck>
void describe(M& m, F&& f) {
  f("room", m.room), f("unique_rank", m.unique_rank), f("generation", m.generation),
      f("grant", m.grant);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, AuxData>
void describe(M& m, F&& f) {
  f("room", m.room), f("buffer", m.buffer), f("row", m.row), f("bytes", m.bytes),
      f("grant", m.grant);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, ChunkReady>
void describe(M& m, F&& f) {
  f("room", m.room), f("chunk", m.chunk), f("page_begin", m.page_begin), f("pages", m.pages);
  f("session_name", m.session_name), f("unique_rank", m.unique_rank);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, StagingRequest>
void describe(M& m, F&& f) {
  f("room", m.room), f("chunk", m.chunk), f("pages", m.pages), f("session_name", m.session_name),
      f("pp_rank", m.pp_rank);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, StagingGrant>
void describe(M& m, F&& f) {
  f("room", m.room), f("chunk", m.chunk), f("offset", m.offset), f("round", m.round),
      f("end", m.end);
  f("session_name", m.session_name);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Watermark>
void describe(M& m, F&& f) {
  f("round", m.round), f("tail", m.tail), f("session_name", m.session_name);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Ping>
void describe(M& m, F&& f) {
  f("asked_at_ns", m.asked_at_ns);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Pong>
void describe(M& m, F&& f) {
  f("asked_at_ns", m.asked_at_ns);
}
template <class M, class F>
requires std::is_same_v<std::remove_const_t<M>, Unknown>
void describe(M& m, F&& f) {
  f("reason", m.reason);
}

template <class T>
concept Described = requires(T& t) {
  describe(t, [](const char*, auto&) {});
};

}  // namespace kvferry::wire
