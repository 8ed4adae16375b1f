// Rules between the managers and peers that are late, restarted or confused. The world is recorded,
// not simulated.
#include <gtest/gtest.h>

#include "src/plan/geometry.h"
#include "src/proto/decode.h"
#include "src/proto/prefill.h"
#include "src/wire/sglang_codec.h"
#include "tests/vectors/fake_world.h"

namespace kvferry::proto {
namespace {

constexpr Time kNow = Time(std::chrono::seconds(1000));
const Address kServer{"127.0.0.1", 8998};
const Address kPrefill{"127.0.0.1", 7000};
const Address kDecode{"127.0.0.1", 6000};

Layout pools(std::uint64_t base) {
  const plan::Geometry geometry{.name = "t",
                                .layers = 1,
                                .attention = {},
                                .kv_heads = 1,
                                .key_head_bytes = 16,
                                .value_head_bytes = 16,
                                .dtype = DType::kUnknown,
                                .aux_bytes = {8}};
  Layout layout = plan::layout_of_rank(geometry, {}, 1, 64, 8);
  plan::place_slabs(layout, base, 64);
  return layout;
}

// A decode rank with one room at a native prefill rank; its pages are lent.
class NativeRoom : public testing::Test {
 protected:
  NativeRoom() : manager_(self(), settings_, world_.ports()) {
    use_ = *manager_.open(RoomId{5}, kServer, kNow);
    EXPECT_TRUE(manager_.init(use_, 0, kNow).ok());
    while (!world_.calls.empty()) {
      const auto call = world_.calls.front();
      world_.calls.erase(world_.calls.begin());
      HttpResponse response{404, ""};
      if (call.request.path == "/kvferry/v1/instance") {
        wire::InstanceRank rank;
        rank.address = kPrefill;
        rank.native = {.life = {1, 1},
                       .version_min = 1,
                       .version_max = 1,
                       .capabilities = {},
                       .plane = "fake",
                       .layout = pools(0x10000)};
        response = {200, wire::to_json(wire::Instance{{2, 2}, {rank}, {}})};
      } else if (call.request.path.starts_with("/route")) {
        response = {200, wire::to_json(wire::Topology{})};
      }
      manager_.on_http(call.id, response, kNow);
    }
  }
  static DecodeSelf self() {
    DecodeSelf self;
    self.control = kDecode;
    self.layout = pools(0x100000);
    self.total_kv_heads = 1;
    self.session_name = "127.0.0.1:6001";
    return self;
  }
  RoomState state() const { return world_.views.at(use_).state; }

  vectors::FakeWorld world_;
  Settings settings_;
  DecodeManager manager_;
  UseId use_{};
};

TEST_F(NativeRoom, AStatusOfTheReferenceSaysNothingToIt) {
  ASSERT_TRUE(manager_.send_metadata(use_, {{1, 2}, 0, 0}, kNow).ok());
  manager_.on_frames({"5", "4", "0"}, kNow);
  EXPECT_EQ(state(), RoomState::kTransferring);
  manager_.on_frames({"5", "0", "0"}, kNow);
  EXPECT_EQ(state(), RoomState::kTransferring);
  EXPECT_FALSE(world_.views.at(use_).pages_reusable);
}

TEST_F(NativeRoom, AnAuxRowThatIsNotLentIsRefused) {
  const auto aux =
      *wire::encode_to_decode(wire::AuxData{RoomId{5}, 0, 3, "12345678", {}}, wire::Dialect::kSeed);
  manager_.on_frames(aux, kNow);  // nothing is lent yet
  ASSERT_TRUE(manager_.send_metadata(use_, {{1}, 3, 0}, kNow).ok());
  manager_.on_frames(aux, kNow);  // lent, but to a native rank
  EXPECT_TRUE(world_.stored.empty());
  EXPECT_EQ(manager_.counters().refused_aux, 2U);
}

// A prefill rank and one foreign decode rank.
class ForeignDecode : public testing::Test {
 protected:
  ForeignDecode() : manager_(self(), settings_, world_.ports()) {}
  static PrefillSelf self() {
    PrefillSelf self;
    self.control = kPrefill;
    self.bootstrap = kServer;
    self.layout = pools(0x10000);
    self.total_kv_heads = 1;
    self.stage_layers = 1;
    return self;
  }
  void registers(const std::string& session, std::uint64_t base) {
    wire::Register m;
    m.reply = kDecode;
    m.session_name = session;
    m.pools.kv_pointers = {base, base + 0x1000};
    m.pools.aux_pointers = {base + 0x2000};
    m.pools.kv_item_length = 16;
    manager_.on_frames(*wire::encode_to_prefill(wire::Message(m), wire::Dialect::kSeed), kNow);
  }
  void speaks(const std::string& session, std::uint64_t room = 5) {
    wire::Metadata m;
    m.room = RoomId{room};
    m.reply = kDecode;
    m.session_name = session;
    m.pages = {1};
    m.aux_row = 0;
    manager_.on_frames(*wire::encode_to_prefill(wire::Message(m), wire::Dialect::kSeed), kNow);
  }
  void aborts() {
    manager_.on_frames(
        *wire::encode_to_prefill(wire::Abort{RoomId{5}, kDecode, 77, {}, {}}, wire::Dialect::k0523),
        kNow);
  }
  std::size_t answers() const {
    return static_cast<std::size_t>(
        std::count_if(world_.sent.begin(), world_.sent.end(),
                      [](const auto& s) { return s.frames[0] == "ABORT_ACK"; }));
  }

  vectors::FakeWorld world_;
  Settings settings_;
  PrefillManager manager_;
};

// A restarted decode rank listens where its former life did, under another session name.
TEST_F(ForeignDecode, AnAbortIsAnsweredOnlyWhenItsWritesHaveEndedWhateverItsNameIs) {
  registers("10.0.0.1:1", 0x100000);
  (void)manager_.open(RoomId{6}, {}, kNow);
  speaks("10.0.0.1:1", 6);  // a room of the former life keeps its name known
  registers("10.0.0.9:9", 0x200000);
  const UseId use = *manager_.open(RoomId{5}, {}, kNow);
  speaks("10.0.0.9:9");
  ASSERT_TRUE(manager_.init(use, 1, 0, kNow).ok() && manager_.send(use, {1}, {}, kNow).ok());
  ASSERT_EQ(world_.writes.size(), 1U);

  aborts();
  EXPECT_EQ(world_.views.at(use).state, RoomState::kFailed);
  EXPECT_EQ(answers(), 0U) << "a write is in flight";

  manager_.on_completion({Completion::Kind::kWrite, static_cast<std::uint64_t>(world_.writes[0].id),
                          Status(Code::kAborted, "cancelled"), true, 0},
                         kNow);
  EXPECT_EQ(answers(), 1U);
  EXPECT_TRUE(world_.views.at(use).pages_reusable);
}

TEST_F(ForeignDecode, NoDrainedAnswerIsGivenForAWriteThatEndedUnsettled) {
  registers("10.0.0.9:9", 0x200000);
  const UseId use = *manager_.open(RoomId{5}, {}, kNow);
  speaks("10.0.0.9:9");
  ASSERT_TRUE(manager_.init(use, 1, 0, kNow).ok() && manager_.send(use, {1}, {}, kNow).ok());
  manager_.on_completion({Completion::Kind::kWrite, static_cast<std::uint64_t>(world_.writes[0].id),
                          Status(Code::kPeerLost, "reset"), false, 0},
                         kNow);
  manager_.clear(use, kNow);
  aborts();
  EXPECT_EQ(answers(), 0U);
  manager_.advance(kNow + settings_.hold_time);
  aborts();
  EXPECT_EQ(answers(), 1U);
}

TEST_F(ForeignDecode, ARoomMessageWithoutARegistrationFailsItsRoom) {
  const UseId use = *manager_.open(RoomId{5}, {}, kNow);
  speaks("10.0.0.9:9");
  registers("10.0.0.9:9", 0x200000);  // of another life, perhaps
  ASSERT_TRUE(manager_.init(use, 1, 0, kNow).ok());
  (void)manager_.send(use, {1}, {}, kNow);
  EXPECT_EQ(world_.views.at(use).state, RoomState::kFailed);
  EXPECT_TRUE(world_.writes.empty());
}

}  // namespace
}  // namespace kvferry::proto
