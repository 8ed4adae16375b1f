#include "src/wire/sglang_codec.h"

#include <bit>
#include <cstring>

#include <fmt/format.h>

#include "src/base/parse.h"

namespace kvferry::wire {
namespace {

template <class T>
void put_little_endian(std::string& out, T value) {
  auto raw = static_cast<std::make_unsigned_t<T>>(value);
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out.push_back(static_cast<char>(raw & 0xFF));
    if constexpr (sizeof(T) > 1) raw = static_cast<std::make_unsigned_t<T>>(raw >> 8);
  }
}

template <class T>
T get_little_endian(std::string_view bytes) {
  std::uint64_t raw = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i)
    raw |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return static_cast<T>(raw);
}

template <class T>
std::string plain(const std::vector<T>& list) {
  std::string out;
  out.reserve(list.size() * sizeof(T));
  for (const T item : list) put_little_endian(out, item);
  return out;
}

template <class T>
std::string pack_lists(const Lists<T>& lists) {
  if (lists.empty()) return {};
  std::string out;
  put_little_endian(out, static_cast<std::uint32_t>(lists.size()));
  for (const auto& list : lists)
    put_little_endian(out, static_cast<std::uint32_t>(list.size() * sizeof(T)));
  for (const auto& list : lists) {
    for (const T item : list) put_little_endian(out, item);
  }
  return out;
}

Status bad(std::string message) {
  return Status(Code::kProtocol, std::move(message));
}

template <class T>
Result<Lists<T>> unpack_lists(std::string_view bytes) {
  Lists<T> lists;
  if (bytes.empty()) return lists;
  if (bytes.size() < 4)
    return bad(fmt::format("packed lists: {} bytes have no count", bytes.size()));
  const auto count = get_little_endian<std::uint32_t>(bytes);
  if (std::uint64_t{count} * 4 + 4 > bytes.size()) {
    return bad(fmt::format("packed lists: {} lists claimed in {} bytes", count, bytes.size()));
  }
  std::string_view body = bytes.substr(4 + std::size_t{count} * 4);
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto size = get_little_endian<std::uint32_t>(bytes.substr(4 + std::size_t{i} * 4));
    if (size > body.size() || size % sizeof(T) != 0) {
      return bad(fmt::format("packed lists: list {} has {} bytes, {} are left, elements have {}", i,
                             size, body.size(), sizeof(T)));
    }
    auto& list = lists.emplace_back();
    list.reserve(size / sizeof(T));
    for (std::uint32_t at = 0; at < size; at += sizeof(T))
      list.push_back(get_little_endian<T>(body.substr(at)));
    body.remove_prefix(size);
  }
  return lists;
}

// Reads the frames of one message; remembers the first thing that is wrong.
class FrameReader {
 public:
  FrameReader(std::string_view kind, const Frames& frames) : kind_(kind), frames_(frames) {}

  [[nodiscard]] bool has(std::size_t i) const { return i < frames_.size(); }
  [[nodiscard]] bool empty(std::size_t i) const { return !has(i) || frames_[i].empty(); }
  [[nodiscard]] const Status& status() const { return status_; }
  void fail(std::size_t i, std::string_view why) {
    if (!status_.ok()) return;
    std::string value;
    for (const char c : has(i) ? std::string_view(frames_[i]).substr(0, 32) : std::string_view()) {
      value += c >= 0x20 && c < 0x7F ? c : '?';
    }
    status_ = bad(
        fmt::format("{} of {} frames: frame {} '{}': {}", kind_, frames_.size(), i, value, why));
  }

  std::string text(std::size_t i) {
    if (!has(i)) return fail(i, "is missing"), std::string();
    for (const char c : frames_[i]) {
      if (static_cast<unsigned char>(c) >= 0x80) return fail(i, "is not ASCII"), std::string();
    }
    return frames_[i];
  }
  template <class T>
  T number(std::size_t i, T least = 0, T most = std::numeric_limits<T>::max()) {
    if (!has(i)) return fail(i, "is missing"), T{};
    const auto value = parse_int<T>(frames_[i]);
    if (!value || *value < least || *value > most) {
      return fail(i, fmt::format("is not a number from {} to {}", least, most)), T{};
    }
    return *value;
  }
  RoomId room(std::size_t i) { return RoomId{number<std::uint64_t>(i, 0, kRoomMax)}; }
  Address address(std::size_t i) {
    Address address;
    address.host = text(i);
    address.port = number<std::uint16_t>(i + 1, 1);
    if (address.host.empty() && status_.ok()) fail(i, "is an empty host");
    address.host = without_brackets(address.host);
    return address;
  }
  template <class T>
  std::vector<T> array(std::size_t i) {
    std::vector<T> list;
    if (!has(i)) return fail(i, "is missing"), list;
    const std::string_view bytes = frames_[i];
    if (bytes.size() % sizeof(T) != 0) {
      return fail(i, fmt::format("{} bytes are no whole number of elements of {}", bytes.size(),
                                 sizeof(T))),
             list;
    }
    list.reserve(bytes.size() / sizeof(T));
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(T))
      list.push_back(get_little_endian<T>(bytes.substr(at)));
    return list;
  }
  template <class T>
  Lists<T> lists(std::size_t i) {
    auto result = unpack_lists<T>(has(i) ? std::string_view(frames_[i]) : std::string_view());
    if (!result.ok()) return fail(i, result.status().message()), Lists<T>{};
    return std::move(*result);
  }
  std::vector<PageIndex> pages(std::size_t i) {
    auto list = array<PageIndex>(i);
    for (const PageIndex page : list) {
      if (page < 0)
        return fail(i, fmt::format("page index {} is negative", page)), std::vector<PageIndex>{};
    }
    return list;
  }
  const std::string& raw(std::size_t i) { return frames_[i]; }

 private:
  std::string kind_;
  const Frames& frames_;
  Status status_;
};

Result<Message> decode_register(const Frames& frames) {
  FrameReader in("registration", frames);
  Register m;
  m.reply = in.address(1);
  m.session_name = in.text(3);
  if (in.status().ok()) {
    // The reference takes the session apart to choose a queue; a name that is no address is of no
    // use to anybody.
    if (const auto parsed = parse_address(m.session_name); !parsed.ok())
      in.fail(3, parsed.status().message());
  }
  m.pools.kv_pointers = in.array<std::uint64_t>(4);
  m.pools.aux_pointers = in.array<std::uint64_t>(5);
  m.pools.state_pointers = in.lists<std::uint64_t>(6);
  m.tp_rank = in.number<std::uint32_t>(7);
  m.tp_size = in.number<std::uint32_t>(8, 1);
  m.pools.kv_item_length = in.number<std::uint64_t>(9);
  m.pools.state_item_lengths = in.lists<std::uint32_t>(10);
  m.pools.state_dims = in.lists<std::uint32_t>(11);
  // 14 frames: the layout up to 0.5.16, where 12 and 13 are the staging region. 15 and more: layer
  // ids there, staging behind them. Fewer than 14: neither.
  const bool old_layout = frames.size() == 14;
  const std::size_t staging = old_layout ? 12 : 14;
  if (frames.size() >= 14 && !in.empty(staging)) {
    StagingRegion region;
    if (in.raw(staging).size() != 8) {
      in.fail(staging, "the staging address has not 8 bytes");
    } else {
      region.base = get_little_endian<std::uint64_t>(in.raw(staging));
      region.bytes = in.empty(staging + 1) ? 0 : in.number<std::uint64_t>(staging + 1);
      m.staging = region;
    }
  } else if (frames.size() >= 14 && !in.empty(staging + 1)) {
    (void)in.number<std::uint64_t>(
        staging + 1);  // a size without an address says nothing, but must be a number
  }
  if (frames.size() > 14) {
    m.pools.kv_layer_ids = in.array<std::uint32_t>(12);
    m.pools.state_layer_ids = in.lists<std::uint32_t>(13);
    if (!in.empty(16)) m.pools.dcp_size = in.number<std::uint32_t>(16, 1);
    if (!in.empty(17)) m.pools.dcp_rank = in.number<std::uint32_t>(17);
    if (!in.empty(18)) m.pools.staging_slot_layers = in.array<std::uint64_t>(18);
    if (!in.empty(19)) m.pools.kv_item_lengths = in.array<std::uint64_t>(19);
  }
  if (!in.status().ok()) return in.status();
  return Message(std::move(m));
}

Result<Message> decode_metadata(const Frames& frames) {
  FrameReader in("room message", frames);
  Metadata m;
  m.room = in.room(0);
  m.reply = in.address(1);
  m.session_name = in.text(3);
  if (in.status().ok()) {
    if (const auto parsed = parse_address(m.session_name); !parsed.ok())
      in.fail(3, parsed.status().message());
  }
  m.pages = in.pages(4);
  m.dummy = in.empty(4) && in.has(5) && in.empty(5);
  if (!m.dummy) {
    m.aux_row = in.number<std::uint32_t>(5, 0, std::numeric_limits<std::int32_t>::max());
    m.states = in.lists<std::int32_t>(6);
  }
  m.writes_aux = !m.dummy;
  m.required_destinations = in.number<std::uint32_t>(7, 1);
  if (!in.empty(8)) m.prefix_tokens = in.number<std::uint64_t>(8);
  if (!in.empty(9)) m.device_pages = in.pages(9);
  if (!in.status().ok()) return in.status();
  return Message(std::move(m));
}

template <class... T>
Frames texts(const T&... values) {
  return {fmt::format("{}", values)...};
}

}  // namespace

Dialect dialect_from_release(std::string_view release) {
  if (release == "seed") return Dialect::kSeed;
  if (release == "0.5.16") return Dialect::k0516;
  if (release == "0.5.17") return Dialect::k0517;
  if (release == "0.5.18") return Dialect::k0518;
  if (release == "0.5.20") return Dialect::k0520;
  if (release == "0.5.21") return Dialect::k0521;
  if (release == "0.5.23") return Dialect::k0523;
  return Dialect::kUnknown;
}

std::string pack(const Lists<std::uint32_t>& lists) {
  return pack_lists(lists);
}
std::string pack(const Lists<std::int32_t>& lists) {
  return pack_lists(lists);
}
std::string pack(const Lists<std::uint64_t>& lists) {
  return pack_lists(lists);
}
Result<Lists<std::uint32_t>> unpack_u32(std::string_view bytes) {
  return unpack_lists<std::uint32_t>(bytes);
}
Result<Lists<std::int32_t>> unpack_i32(std::string_view bytes) {
  return unpack_lists<std::int32_t>(bytes);
}
Result<Lists<std::uint64_t>> unpack_u64(std::string_view bytes) {
  return unpack_lists<std::uint64_t>(bytes);
}

Result<Frames> encode_to_prefill(const Message& message, Dialect peer) {
  const bool old = peer == Dialect::kSeed || peer == Dialect::k0516;
  if (const auto* m = std::get_if<Register>(&message)) {
    const PositionalPools& p = m->pools;
    Frames f = texts("None", m->reply.host, m->reply.port, m->session_name);
    f.push_back(plain(p.kv_pointers));
    f.push_back(plain(p.aux_pointers));
    f.push_back(pack(p.state_pointers));
    f.push_back(fmt::format("{}", m->tp_rank));
    f.push_back(fmt::format("{}", m->tp_size));
    f.push_back(fmt::format("{}", p.kv_pointers.empty() && !old ? 0 : p.kv_item_length));
    f.push_back(pack(p.state_item_lengths));
    f.push_back(pack(p.state_dims));
    std::string base;
    if (m->staging) put_little_endian(base, m->staging->base);
    const std::string size = m->staging ? fmt::format("{}", m->staging->bytes) : "";
    if (!old) {
      // Layer ids only to a peer that is known to understand them: an older one takes them for a
      // staging region.
      const bool ids = peer != Dialect::kUnknown;
      f.push_back(ids ? plain(p.kv_layer_ids) : "");
      f.push_back(ids ? pack(p.state_layer_ids) : "");
    }
    f.push_back(base);
    f.push_back(size);
    if (!old) {
      f.push_back(fmt::format("{}", p.dcp_size));
      f.push_back(fmt::format("{}", p.dcp_rank));
      if (peer == Dialect::kUnknown || peer >= Dialect::k0520)
        f.push_back(plain(p.staging_slot_layers));
      if (peer == Dialect::kUnknown || peer >= Dialect::k0521)
        f.push_back(plain(p.kv_item_lengths));
    }
    return f;
  }
  if (const auto* m = std::get_if<Metadata>(&message)) {
    Frames f = texts(value_of(m->room), m->reply.host, m->reply.port, m->session_name);
    if (m->dummy) {
      f.insert(f.end(), {"", "", ""});
    } else {
      if (!m->aux_row)
        return Status(Code::kInvalidArgument,
                      fmt::format("room {}: the reference needs an aux row", value_of(m->room)));
      f.push_back(plain(m->pages));
      f.push_back(fmt::format("{}", *m->aux_row));
      f.push_back(pack(m->states));
    }
    f.push_back(fmt::format("{}", m->required_destinations));
    f.push_back(fmt::format("{}", m->prefix_tokens.value_or(0)));
    if (!old) f.push_back(peer >= Dialect::k0517 ? plain(m->device_pages) : "");
    return f;
  }
  if (const auto* m = std::get_if<Abort>(&message)) {
    Frames f = texts("ABORT", value_of(m->room), m->reply.host, m->reply.port);
    // Older releases ignore a fifth frame, so an unknown one gets it too.
    if (m->generation && (peer == Dialect::kUnknown || peer == Dialect::k0523))
      f.push_back(fmt::format("{}", *m->generation));
    return f;
  }
  if (const auto* m = std::get_if<StagingGrant>(&message)) {
    return texts("STAGING_RSP", value_of(m->room), m->chunk, m->offset, m->round, m->end,
                 m->session_name);
  }
  if (const auto* m = std::get_if<Watermark>(&message)) {
    return texts("WATERMARK", m->round, m->tail, m->session_name);
  }
  return Status(Code::kInvalidArgument,
                fmt::format("{} does not go to an sglang prefill rank", name_of(message)));
}

Result<Message> decode_at_prefill(const Frames& frames) {
  if (frames.empty()) return bad("message without frames");
  const std::string& kind = frames[0];
  if (kind == "None") return decode_register(frames);
  if (kind == "ABORT") {
    FrameReader in("ABORT", frames);
    Abort m;
    m.room = in.room(1);
    m.reply = in.address(2);
    if (!in.empty(4)) m.generation = in.number<std::uint64_t>(4);
    if (!in.status().ok()) return in.status();
    return Message(std::move(m));
  }
  if (kind == "STAGING_RSP") {
    FrameReader in("STAGING_RSP", frames);
    StagingGrant m;
    m.room = in.room(1);
    m.chunk = in.number<std::uint32_t>(2);
    m.offset = in.number<std::int64_t>(3, kStagingNeverFits);
    m.round = in.number<std::uint64_t>(4);
    m.end = in.number<std::int64_t>(5, kStagingNeverFits);
    m.session_name = in.text(6);
    if (!in.status().ok()) return in.status();
    return Message(std::move(m));
  }
  if (kind == "WATERMARK") {
    FrameReader in("WATERMARK", frames);
    Watermark m;
    m.round = in.number<std::uint64_t>(1);
    m.tail = in.number<std::uint64_t>(2);
    if (in.has(3)) m.session_name = in.text(3);
    if (!in.status().ok()) return in.status();
    return Message(std::move(m));
  }
  if (!kind.empty() && kind[0] >= 'A' && kind[0] <= 'Z')
    return bad(fmt::format("message kind '{:.32}' is not known", kind));
  return decode_metadata(frames);
}

Result<Frames> encode_to_decode(const Message& message, Dialect peer) {
  if (const auto* m = std::get_if<Done>(&message)) {
    return texts(value_of(m->room), static_cast<unsigned>(m->state), m->unique_rank);
  }
  if (const auto* m = std::get_if<AuxData>(&message)) {
    Frames f = texts("AUX_DATA", value_of(m->room), m->buffer, m->row);
    std::string length;
    for (int shift = 24; shift >= 0; shift -= 8)
      length.push_back(static_cast<char>((m->bytes.size() >> shift) & 0xFF));
    f.push_back(std::move(length));
    f.push_back(m->bytes);
    return f;
  }
  if (const auto* m = std::get_if<ChunkReady>(&message)) {
    return texts("CHUNK_READY", value_of(m->room), m->chunk, m->page_begin, m->pages,
                 m->session_name, m->unique_rank);
  }
  if (const auto* m = std::get_if<StagingRequest>(&message)) {
    Frames f = texts("STAGING_REQ", value_of(m->room), m->chunk, m->pages, m->session_name);
    // Peers that know five frames ignore the sixth.
    const bool five = peer == Dialect::kSeed || peer == Dialect::k0516 || peer == Dialect::k0517;
    if (m->pp_rank && !five) f.push_back(fmt::format("{}", *m->pp_rank));
    return f;
  }
  if (const auto* m = std::get_if<AbortAck>(&message)) {
    Frames f = texts("ABORT_ACK", value_of(m->room));
    const bool two = peer != Dialect::kUnknown && peer < Dialect::k0520;
    if (m->unique_rank && !two) {
      f.push_back(fmt::format("{}", *m->unique_rank));
      if (m->generation) f.push_back(fmt::format("{}", *m->generation));
    }
    return f;
  }
  return Status(Code::kInvalidArgument,
                fmt::format("{} does not go to an sglang decode rank", name_of(message)));
}

Result<Message> decode_at_decode(const Frames& frames) {
  if (frames.empty()) return bad("message without frames");
  const std::string& kind = frames[0];
  if (kind == "AUX_DATA") {
    FrameReader in("AUX_DATA", frames);
    AuxData m;
    m.room = in.room(1);
    m.buffer = in.number<std::uint32_t>(2);
    m.row = in.number<std::uint32_t>(3);
    if (!in.has(5)) {
      in.fail(5, "is missing");
    } else if (in.raw(4).size() != 4) {
      in.fail(4, "the length has not 4 bytes");
    } else {
      std::uint32_t length = 0;
      for (const char c : in.raw(4)) length = length << 8 | static_cast<unsigned char>(c);
      m.bytes = in.raw(5);
      if (length != m.bytes.size())
        in.fail(4, fmt::format("the length is {}, the data has {} bytes", length, m.bytes.size()));
    }
    if (!in.status().ok()) return in.status();
    return Message(std::move(m));
  }
  if (kind == "CHUNK_READY") {
    FrameReader in("CHUNK_READY", frames);
    ChunkReady m;
    m.room = in.room(1);
    m.chunk = in.number<std::uint32_t>(2);
    m.page_begin = in.number<std::uint32_t>(3);
    m.pages = in.number<std::uint32_t>(4);
    m.session_name = in.text(5);
    m.unique_rank = in.number<std::uint32_t>(6);
    if (!in.status().ok()) return in.status();
    return Message(std::move(m));
  }
  if (kind == "STAGING_REQ") {
    FrameReader in("STAGING_REQ", frames);
    StagingRequest m;
    m.room = in.room(1);
    m.chunk = in.number<std::uint32_t>(2);
    m.pages = in.number<std::uint32_t>(3);
    m.session_name = in.text(4);
    if (!in.empty(5)) m.pp_rank = in.number<std::uint32_t>(5);
    if (!in.status().ok()) return in.status();
    return Message(std::move(m));
  }
  if (kind == "ABORT_ACK") {
    FrameReader in("ABORT_ACK", frames);
    AbortAck m;
    m.room = in.room(1);
    if (!in.empty(2)) m.unique_rank = in.number<std::uint32_t>(2);
    if (!in.empty(3)) m.generation = in.number<std::uint64_t>(3);
    if (!in.status().ok()) return in.status();
    return Message(std::move(m));
  }
  if (!kind.empty() && kind[0] >= 'A' && kind[0] <= 'Z')
    return bad(fmt::format("message kind '{:.32}' is not known", kind));
  FrameReader in("status", frames);
  // A fourth frame is a reason (0.5.20 and later read one); it is text and may be lost.
  if (frames.size() != 3 && frames.size() != 4) in.fail(0, "a status has 3 frames");
  Done m;
  m.room = in.room(0);
  m.state = static_cast<RoomState>(in.number<std::uint32_t>(1, 0, 4));
  m.unique_rank = in.number<std::uint32_t>(2);
  if (in.has(3)) m.reason = frames[3].substr(0, 1024);
  if (!in.status().ok()) return in.status();
  return Message(std::move(m));
}

}  // namespace kvferry::wire
