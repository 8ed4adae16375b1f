#include "src/data/stream/frames.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/data/plan_cursor.h"

namespace kvferry::data::stream {
namespace {

template <class T>
void store(char* at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<char>(value >> (8 * i));
}
template <class T>
T load(const char* at) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i)
    value |= std::uint64_t{static_cast<unsigned char>(at[i])} << (8 * i);
  return static_cast<T>(value);
}
template <class T>
void put(std::string& out, T value) {
  char bytes[sizeof(T)];
  store(bytes, value);
  out.append(bytes, sizeof(T));
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    if (bytes_.size() < sizeof(T)) {
      ok_ = false;
      return T{};
    }
    const T value = load<T>(bytes_.data());
    bytes_.remove_prefix(sizeof(T));
    return value;
  }
  [[nodiscard]] bool ok() const { return ok_; }
  [[nodiscard]] std::size_t left() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

constexpr std::size_t kLaneBytes = 28, kRunBytes = 8;
constexpr std::size_t kSourceLaneBytes = 20, kSourceRunBytes = 4;  // more of them in a Pull

Status bad(std::string why) {
  return Status(Code::kProtocol, "data stream: " + std::move(why));
}

}  // namespace

void store_header(char* to, Header header) {
  store(to, static_cast<std::uint32_t>(header.kind));
  store(to + 4, header.length);
  store(to + 8, header.write);
}

bool parse_header(const char* bytes, Header& header) {
  const auto kind = load<std::uint32_t>(bytes);
  if (kind < 1 || kind > 10) return false;
  header.kind = static_cast<Kind>(kind);
  header.length = load<std::uint32_t>(bytes + 4);
  header.write = load<std::uint64_t>(bytes + 8);
  return true;
}

bool may_come_from(bool source, Kind kind) {
  return kind == Kind::kSwitch || source == (kind <= Kind::kCancel || kind == Kind::kPull);
}

std::string encode_hello(const Hello& hello) {
  std::string out;
  put(out, kMagic);
  put(out, hello.life.high);
  put(out, hello.life.low);
  put(out, hello.ring_bytes);
  put(out, hello.pipe_bytes);
  put(out, hello.epoch_slots);
  put(out, static_cast<std::uint32_t>(hello.regions.size()));
  for (const SharedRegion& region : hello.regions) {
    put(out, region.base);
    put(out, region.bytes);
  }
  return out;
}

Result<Hello> decode_hello(std::string_view payload) {
  Reader in(payload);
  Hello hello;
  const auto magic = in.get<std::uint64_t>();
  hello.life.high = in.get<std::uint64_t>();
  hello.life.low = in.get<std::uint64_t>();
  hello.ring_bytes = in.get<std::uint64_t>();
  hello.pipe_bytes = in.get<std::uint64_t>();
  hello.epoch_slots = in.get<std::uint64_t>();
  const auto regions = in.get<std::uint32_t>();
  if (!in.ok() || magic != kMagic || in.left() != std::size_t{regions} * 16)
    return bad("the connection does not begin as version 2 does");
  hello.regions.resize(regions);
  for (SharedRegion& region : hello.regions) {
    region.base = in.get<std::uint64_t>();
    region.bytes = in.get<std::uint64_t>();
    if (region.bytes == 0 || region.base + region.bytes < region.base)
      return bad(fmt::format("a region of {} bytes at {:#x}", region.bytes, region.base));
  }
  return hello;
}

namespace {

// One shape for Begin and Pull; the latter says the source's side as well.
std::string encode_plan(const Authority& authority, const CopyPlan& plan, bool with_source) {
  std::string out;
  std::size_t size = 48;
  for (const CopyGroup& group : plan)
    size += 8 + group.lanes.size() * (kLaneBytes + kSourceLaneBytes) +
            group.runs.size() * (kRunBytes + kSourceRunBytes);
  out.reserve(size);
  put(out, static_cast<std::uint32_t>(authority.foreign ? 1 : 0));
  put(out, authority.token.high);
  put(out, authority.token.low);
  put(out, static_cast<std::uint32_t>(plan.size()));
  for (const CopyGroup& group : plan) {
    put(out, static_cast<std::uint32_t>(group.lanes.size()));
    put(out, static_cast<std::uint32_t>(group.runs.size()));
    for (const Lane& lane : group.lanes) {
      put(out, lane.target);
      put(out, lane.target_item);
      put(out, lane.rows);
      put(out, lane.bytes);
      put(out, lane.target_row);
      if (!with_source) continue;
      put(out, lane.source);
      put(out, lane.source_item);
      put(out, lane.source_row);
    }
    for (const Run& run : group.runs) {
      put(out, run.target_first);
      put(out, run.count);
      if (with_source) put(out, run.source_first);
    }
  }
  return out;
}

Status decode_plan(Reader& in, bool with_source, Begin& begin) {
  const auto flags = in.get<std::uint32_t>();
  begin.authority.token.high = in.get<std::uint64_t>();
  begin.authority.token.low = in.get<std::uint64_t>();
  begin.authority.foreign = flags == 1;
  const auto groups = in.get<std::uint32_t>();
  if (!in.ok() || flags > 1 || groups > in.left() / 8) return bad("a begin frame is cut short");
  const std::size_t lane_bytes = kLaneBytes + (with_source ? kSourceLaneBytes : 0);
  const std::size_t run_bytes = kRunBytes + (with_source ? kSourceRunBytes : 0);
  for (std::uint32_t g = 0; g < groups; ++g) {
    const auto lanes = in.get<std::uint32_t>();
    const auto runs = in.get<std::uint32_t>();
    if (!in.ok() ||
        std::uint64_t{lanes} * lane_bytes + std::uint64_t{runs} * run_bytes > in.left()) {
      return bad(
          fmt::format("group {} of {} lanes and {} runs is longer than its frame", g, lanes, runs));
    }
    CopyGroup& group = begin.plan.emplace_back();
    group.lanes.resize(lanes);
    group.runs.resize(runs);
    for (Lane& lane : group.lanes) {
      lane.target = in.get<std::uint64_t>();
      lane.target_item = lane.source_item = in.get<std::uint64_t>();
      lane.rows = in.get<std::uint32_t>();
      lane.bytes = in.get<std::uint32_t>();
      lane.target_row = in.get<std::uint32_t>();
      if (!with_source) continue;
      lane.source = in.get<std::uint64_t>();
      lane.source_item = in.get<std::uint64_t>();
      lane.source_row = in.get<std::uint32_t>();
    }
    for (Run& run : group.runs) {
      run.target_first = in.get<std::uint32_t>();
      run.count = in.get<std::uint32_t>();
      if (with_source) run.source_first = in.get<std::uint32_t>();
    }
  }
  if (!in.ok() || in.left() != 0) return bad("a begin frame has another length than its plan");
  if (!is_walkable(begin.plan)) return bad("a lane or run of size 0");
  return {};
}

}  // namespace

std::string encode_begin(const Authority& authority, const CopyPlan& plan) {
  return encode_plan(authority, plan, false);
}

Result<Begin> decode_begin(std::string_view payload) {
  Reader in(payload);
  Begin begin;
  KVF_RETURN_IF_ERROR(decode_plan(in, false, begin));
  return begin;
}

std::string encode_pull(const Begin& begin) {
  std::string out;
  put(out, begin.flow);
  put(out, begin.epoch);
  put(out, begin.epoch_slot);
  return out + encode_plan(begin.authority, begin.plan, true);
}

Result<Begin> decode_pull(std::string_view payload) {
  Reader in(payload);
  Begin begin;
  begin.flow = in.get<std::uint64_t>();
  begin.epoch = in.get<std::uint64_t>();
  begin.epoch_slot = in.get<std::uint32_t>();
  KVF_RETURN_IF_ERROR(decode_plan(in, true, begin));
  return begin;
}

std::string encode_done(const Status& status) {
  std::string out;
  put(out, static_cast<std::uint8_t>(status.code()));
  out += status.message().substr(0, 1024);
  return out;
}

Status decode_done(std::string_view payload) {
  if (payload.empty()) return bad("an answer without a code");
  const auto code = static_cast<std::uint8_t>(payload[0]);
  if (code == 0) return {};
  if (code > static_cast<std::uint8_t>(Code::kInternal))
    return bad(fmt::format("an answer with code {}", code));
  return Status(static_cast<Code>(code), std::string(payload.substr(1)));
}

}  // namespace kvferry::data::stream
