#include "src/data/tcp/frames.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/data/plan_cursor.h"

namespace kvferry::data::tcp {
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

Status bad(std::string why) {
  return Status(Code::kProtocol, "tcp plane: " + std::move(why));
}

}  // namespace

void store_header(char* to, Header header) {
  store(to, static_cast<std::uint32_t>(header.kind));
  store(to + 4, header.length);
  store(to + 8, header.write);
}

bool parse_header(const char* bytes, Header& header) {
  const auto kind = load<std::uint32_t>(bytes);
  if (kind < 1 || kind > 7) return false;
  header.kind = static_cast<Kind>(kind);
  header.length = load<std::uint32_t>(bytes + 4);
  header.write = load<std::uint64_t>(bytes + 8);
  return true;
}

std::string encode_hello(Token life) {
  std::string out;
  put(out, kMagic);
  put(out, life.high);
  put(out, life.low);
  return out;
}

Result<Token> decode_hello(std::string_view payload) {
  Reader in(payload);
  const auto magic = in.get<std::uint64_t>();
  Token life;
  life.high = in.get<std::uint64_t>();
  life.low = in.get<std::uint64_t>();
  if (!in.ok() || magic != kMagic) return bad("the connection does not begin as version 1 does");
  return life;
}

std::string encode_begin(const Authority& authority, const CopyPlan& plan) {
  std::string out;
  std::size_t size = 24;
  for (const CopyGroup& group : plan)
    size += 8 + group.lanes.size() * kLaneBytes + group.runs.size() * kRunBytes;
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
    }
    for (const Run& run : group.runs) {
      put(out, run.target_first);
      put(out, run.count);
    }
  }
  return out;
}

Result<Begin> decode_begin(std::string_view payload) {
  Reader in(payload);
  Begin begin;
  const auto flags = in.get<std::uint32_t>();
  begin.authority.token.high = in.get<std::uint64_t>();
  begin.authority.token.low = in.get<std::uint64_t>();
  begin.authority.foreign = flags == 1;
  const auto groups = in.get<std::uint32_t>();
  if (!in.ok() || flags > 1 || groups > in.left() / 8) return bad("a begin frame is cut short");
  for (std::uint32_t g = 0; g < groups; ++g) {
    const auto lanes = in.get<std::uint32_t>();
    const auto runs = in.get<std::uint32_t>();
    if (!in.ok() ||
        std::uint64_t{lanes} * kLaneBytes + std::uint64_t{runs} * kRunBytes > in.left()) {
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
    }
    for (Run& run : group.runs) {
      run.target_first = in.get<std::uint32_t>();
      run.count = in.get<std::uint32_t>();
    }
  }
  if (!in.ok() || in.left() != 0) return bad("a begin frame has another length than its plan");
  if (!is_walkable(begin.plan)) return bad("a lane or run of size 0");
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

}  // namespace kvferry::data::tcp
