#include <fmt/format.h>
#include <gtest/gtest.h>

#include "src/base/random.h"
#include "src/plan/geometry.h"
#include "src/wire/bodies.h"
#include "src/wire/native_codec.h"
#include "src/wire/sglang_codec.h"

namespace kvferry::wire {
namespace {

// Counts the members of an aggregate, so that a field that describe() forgets shows.
struct Anything {
  template <class T>
  operator T() const {  // NOLINT: converts to whatever the member is
    return T{};
  }
};
template <class T, class... Args>
constexpr std::size_t count_members() {
  if constexpr (requires { T{Args{}..., Anything{}}; }) {
    return count_members<T, Args..., Anything>();
  } else {
    return sizeof...(Args);
  }
}
template <class T>
std::size_t count_described() {
  std::size_t count = 0;
  T value{};
  describe(value, [&count](const char*, auto&) { ++count; });
  return count;
}

template <class T>
void expect_described() {
  EXPECT_EQ(count_members<T>(), count_described<T>()) << typeid(T).name();
}
template <class... T>
void expect_all_members_described() {
  (expect_described<T>(), ...);
}

TEST(Messages, DescribeNamesEveryMember) {
  expect_all_members_described<Address, Token, RankPlace, Memory, Slab, Layout, StagingRegion,
                               PositionalPools, Register, Metadata, StagingRequest, StagingGrant,
                               ChunkReady, Done, Abort, AbortAck, Ping, Pong, Unknown, AuxData,
                               Watermark>();
}

// Fills any described struct with random values, so that a codec that drops or swaps a field shows.
class Filler {
 public:
  explicit Filler(std::uint64_t seed) : random_(seed) {}
  template <class T>
  void fill(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      value = random_.chance(50);
    } else if constexpr (std::is_enum_v<T>) {
      value = static_cast<T>(random_.below(5));
    } else if constexpr (std::is_integral_v<T>) {
      value = static_cast<T>(random_.next64() >> random_.below(60));
    } else {
      describe(value, [this](const char*, auto& field) { this->fill(field); });
    }
  }
  void fill(std::string& text) {
    text.clear();
    for (auto n = random_.below(12); n > 0; --n) text += static_cast<char>('a' + random_.below(26));
  }
  template <class T>
  void fill(std::vector<T>& list) {
    list.resize(random_.below(5));
    for (T& item : list) fill(item);
  }
  template <class T>
  void fill(std::optional<T>& maybe) {
    maybe.reset();
    if (random_.chance(50)) fill(maybe.emplace());
  }

 private:
  Random random_;
};

template <class T>
void round_trip(std::uint64_t seed) {
  Filler filler(seed);
  NativeFrame frame;
  filler.fill(frame.session);
  filler.fill(frame.reply);
  T message;
  filler.fill(message);
  frame.message = message;
  const Frames bytes = encode_native(frame);
  const auto back = decode_native(bytes);
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(*back, frame) << dump(frame) << "\n" << dump(*back);
  // Every prefix is refused, and nothing crashes on it.
  for (std::size_t cut = 0; cut < bytes[0].size(); ++cut) {
    EXPECT_FALSE(decode_native({bytes[0].substr(0, cut)}).ok())
        << name_of(frame.message) << " cut at " << cut;
  }
}

TEST(NativeCodec, EveryMessageSurvivesTheRoundTrip) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    round_trip<Register>(seed), round_trip<Metadata>(seed), round_trip<StagingRequest>(seed),
        round_trip<StagingGrant>(seed);
    round_trip<ChunkReady>(seed), round_trip<Done>(seed), round_trip<Abort>(seed),
        round_trip<AbortAck>(seed);
    round_trip<Ping>(seed), round_trip<Pong>(seed), round_trip<Unknown>(seed),
        round_trip<AuxData>(seed), round_trip<Watermark>(seed);
  }
}

TEST(NativeCodec, ANewerVersionMayHaveMoreAtTheEnd) {
  NativeFrame frame{
      .version = kNativeVersion, .session = {1, 2}, .reply = {"h", 1}, .message = Ping{7}};
  Frames bytes = encode_native(frame);
  bytes[0] += "more";
  EXPECT_FALSE(decode_native(bytes).ok());
  bytes[0][4] = static_cast<char>(kNativeVersion + 1);
  const auto decoded = decode_native(bytes);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(std::get<Ping>(decoded->message).asked_at_ns, 7U);
}

TEST(NativeCodec, AListLongerThanItsBytesIsRefusedBeforeItIsAllocated) {
  NativeFrame frame{.version = kNativeVersion,
                    .session = {1, 2},
                    .reply = {"h", 1},
                    .message = Unknown{std::string(4, 'x')}};
  Frames bytes = encode_native(frame);
  bytes[0].replace(bytes[0].size() - 8, 4, "\xff\xff\xff\x7f");
  EXPECT_FALSE(decode_native(bytes).ok());
}

// The bytes of version 1, so that a change of the format cannot happen by accident.
TEST(NativeCodec, TheBytesOfVersionOneAreFixed) {
  const NativeFrame frame{.version = 1,
                          .session = {0x0102030405060708ULL, 0x1112131415161718ULL},
                          .reply = {"10.0.0.9", 4242},
                          .message = Ping{0xABCD}};
  const std::string expected(
      "KVFN\x01\x00\x08"
      "\x08\x07\x06\x05\x04\x03\x02\x01"
      "\x18\x17\x16\x15\x14\x13\x12\x11"
      "\x08\x00\x00\x00"
      "10.0.0.9"
      "\x92\x10"
      "\xCD\xAB\x00\x00\x00\x00\x00\x00",
      4 + 2 + 1 + 16 + 4 + 8 + 2 + 8);
  EXPECT_EQ(encode_native(frame)[0], expected);
}

TEST(SglangCodec, RegistrationGoesInTheFormOfThePeersRelease) {
  Register m;
  m.reply = {"10.0.0.1", 5};
  m.session_name = "10.0.0.1:6";
  m.pools.kv_pointers = {1, 2};
  m.pools.kv_item_length = 64;
  const auto frames = [&](Dialect d) { return encode_to_prefill(Message(m), d)->size(); };
  EXPECT_EQ(frames(Dialect::kSeed), 14U);
  EXPECT_EQ(frames(Dialect::k0516), 14U);
  EXPECT_EQ(frames(Dialect::k0517), 18U);
  EXPECT_EQ(frames(Dialect::k0520), 19U);
  EXPECT_EQ(frames(Dialect::k0521), 20U);
  EXPECT_EQ(frames(Dialect::kUnknown), 20U);
  // Layer ids never reach a peer that would take them for a staging region.
  m.pools.kv_layer_ids = {3, 4};
  EXPECT_EQ((*encode_to_prefill(Message(m), Dialect::kUnknown))[12], "");
  EXPECT_NE((*encode_to_prefill(Message(m), Dialect::k0523))[12], "");
}

TEST(SglangCodec, AbortAckHasTheFormThatThePeerUnderstands) {
  AbortAck ack{.room = RoomId{5}, .unique_rank = 3, .generation = 9, .grant = {}};
  const auto frames = [&](Dialect d) { return encode_to_decode(Message(ack), d)->size(); };
  EXPECT_EQ(frames(Dialect::kSeed), 2U);
  EXPECT_EQ(frames(Dialect::k0518), 2U);
  EXPECT_EQ(frames(Dialect::kUnknown), 4U);
  ack.generation.reset();
  EXPECT_EQ(frames(Dialect::k0521), 3U);
}

TEST(SglangCodec, RandomFramesAreRefusedNotFatal) {
  Random random(3);
  const std::vector<std::string> kinds = {
      "None",        "ABORT",       "STAGING_RSP", "WATERMARK", "AUX_DATA",
      "CHUNK_READY", "STAGING_REQ", "ABORT_ACK",   "5",         ""};
  for (int i = 0; i < 200000; ++i) {
    Frames frames(random.below(22));
    for (std::size_t f = 0; f < frames.size(); ++f) {
      if (f == 0 && random.chance(90)) {
        frames[f] = kinds[random.below(kinds.size())];
      } else if (random.chance(50)) {
        frames[f] = std::to_string(random.below(1000));
      } else {
        for (auto n = random.below(20); n > 0; --n)
          frames[f] += static_cast<char>(random.below(256));
      }
    }
    (void)decode_at_prefill(frames);
    (void)decode_at_decode(frames);
    (void)decode_native(frames);
    if (!frames.empty()) (void)decode_native({"KVFN\x01" + frames[0]});
  }
}

TEST(Bodies, ARegistrationSurvivesTheRoundTrip) {
  RankRegistration r;
  r.place = {.tp_rank = 1,
             .tp_size = 2,
             .pp_rank = 0,
             .pp_size = 3,
             .cp_rank = 0,
             .cp_size = 1,
             .dp_rank = 0,
             .dp_size = 1};
  r.address = {"::1", 77};
  r.page_size = 16;
  r.kv_cache_dtype = "auto";
  r.prefill_http_port = 30000;
  const plan::Geometry geometry{.name = "g",
                                .layers = 2,
                                .attention = {},
                                .kv_heads = 2,
                                .key_head_bytes = 4,
                                .value_head_bytes = 4,
                                .dtype = DType::kBFloat16,
                                .aux_bytes = {8}};
  r.native = NativeRank{.life = {1, 2},
                        .version_min = 1,
                        .version_max = 1,
                        .capabilities = {"tcp"},
                        .plane = "tcp://x",
                        .layout = plan::layout_of_rank(geometry, {}, 16, 4, 2)};
  const auto back = parse_registration(to_json(r));
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(*back, r);

  // A layout that is not the one that was hashed did not arrive as it was sent.
  std::string body = to_json(r);
  const auto at = body.find("\"item_count\":4");
  ASSERT_NE(at, std::string::npos);
  body[at + 13] = '5';
  const auto changed = parse_registration(body);
  ASSERT_FALSE(changed.ok());
  EXPECT_NE(changed.status().message().find(fmt::format("{:016x}", layout_hash(r.native->layout))),
            std::string::npos)
      << changed.status().to_string();
}

TEST(Bodies, T30AnUnknownTopologyKeyIsIgnoredOnlyWhenItsValueIsHarmless) {
  const auto with = [](const std::string& key, const std::string& value) {
    std::string body = to_json(Topology{});
    body.back() = ',';
    return parse_topology(body + "\"" + key + "\": " + value + "}");
  };
  for (const char* harmless : {"null", "false", "0", "\"\"", "\"early\"", "{}"})
    EXPECT_TRUE(with("new_feature", harmless).ok()) << harmless;
  const auto refused = with("new_feature", "true");
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("new_feature = true"), std::string::npos);
  EXPECT_FALSE(with("enable_kv_cache_sharding", "true").ok());
  EXPECT_FALSE(with("decode_allocation_policy", "\"prefill_complete\"").ok());
}

}  // namespace
}  // namespace kvferry::wire
