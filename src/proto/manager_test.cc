// Rules between the managers and peers that are late, restarted or confused. The world is recorded,
// not simulated.
#include <fmt/format.h>
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
    answer_calls({0, 1});
  }
  // The bootstrap server answers what was asked: of two dp groups with one rank each, those of
  // `groups` are registered.
  void answer_calls(const std::vector<std::uint32_t>& groups) {
    while (!world_.calls.empty()) {
      const auto call = world_.calls.front();
      world_.calls.erase(world_.calls.begin());
      HttpResponse response{404, ""};
      if (call.request.path == "/kvferry/v1/instance") {
        wire::Instance instance{{2, 2}, {}, {}};
        for (const std::uint32_t group : groups) {
          wire::InstanceRank rank;
          rank.address = kPrefill;
          rank.dp_rank = group;
          rank.native = {.life = {1, group + 1},
                         .version_min = 1,
                         .version_max = 1,
                         .capabilities = {},
                         .plane = "fake",
                         .layout = pools(0x10000)};
          instance.ranks.push_back(rank);
        }
        response = {200, wire::to_json(instance)};
      } else if (call.request.path.starts_with("/route")) {
        wire::Topology topology;
        topology.dp_size = 2;
        response = {200, wire::to_json(topology)};
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

TEST_F(NativeRoom, ItSaysByWhichLayoutItElectedWriters) {
  const auto frame = *wire::decode_native(world_.sent.front().frames);
  const auto* m = std::get_if<wire::Register>(&frame.message);
  ASSERT_NE(m, nullptr);
  EXPECT_EQ(m->expected_layout, layout_hash(pools(0x10000)));
}

// A rank that speaks newer versions alone is met as the reference's ranks are.
TEST(Versions, T30ARankOfANewerVersionIsSpokenToAsAForeignOne) {
  vectors::FakeWorld world;
  Settings settings;
  DecodeSelf self;
  self.control = kDecode;
  self.layout = pools(0x100000);
  self.total_kv_heads = 1;
  self.session_name = "127.0.0.1:6001";
  DecodeManager manager(self, settings, world.ports());
  const UseId use = *manager.open(RoomId{5}, kServer, kNow);
  ASSERT_TRUE(manager.init(use, 0, kNow).ok());
  for (std::size_t i = 0; i < world.calls.size(); ++i) {
    const auto call = world.calls[i];
    HttpResponse response{404, ""};
    if (call.request.path == "/kvferry/v1/instance") {
      wire::Instance instance{{2, 2}, {}, {}};
      wire::InstanceRank rank;
      rank.address = kPrefill;
      rank.native = {.life = {1, 1},
                     .version_min = wire::kNativeVersion + 1,
                     .version_max = wire::kNativeVersion + 1,
                     .capabilities = {},
                     .plane = "fake",
                     .layout = pools(0x10000)};
      instance.ranks.push_back(rank);
      response = {200, wire::to_json(instance)};
    } else if (call.request.path.starts_with("/route")) {
      response = {200, wire::to_json(wire::Topology{})};
    }
    manager.on_http(call.id, response, kNow);
  }
  EXPECT_EQ(world.views.at(use).state, RoomState::kWaitingForInput);
  ASSERT_TRUE(manager.send_metadata(use, {{1}, 0, 0}, kNow).ok());
  ASSERT_EQ(world.sent.size(), 2U) << "a registration and a room message";
  for (const auto& sent : world.sent) {
    EXPECT_FALSE(wire::is_native(sent.frames));
    EXPECT_EQ(sent.to, kPrefill);
  }
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

// An answer counts in the session and for the grant that it names, nowhere else.
TEST_F(NativeRoom, AnAckFromAnotherSessionDoesNotReleasePages) {
  ASSERT_TRUE(manager_.send_metadata(use_, {{1, 2}, 0, 0}, kNow).ok());
  const auto frame = *wire::decode_native(world_.sent.back().frames);
  const Token grant = std::get<wire::Metadata>(frame.message).grant;
  manager_.abort(use_, Status(Code::kAborted, "enough"), kNow);

  const auto says_ack = [&](Token session, Token of) {
    manager_.on_frames(wire::encode_native({.version = wire::kNativeVersion,
                                            .session = session,
                                            .reply = kPrefill,
                                            .message = wire::AbortAck{RoomId{5}, 0, {}, of}}),
                       kNow);
  };
  says_ack({9, 9}, grant);
  says_ack(frame.session, {7, 7});
  EXPECT_FALSE(world_.views.at(use_).pages_reusable);

  says_ack(frame.session, grant);
  EXPECT_TRUE(world_.views.at(use_).pages_reusable);
}

TEST_F(NativeRoom, T17ALateSuccessDoesNotBringAClearedRoomBack) {
  ASSERT_TRUE(manager_.send_metadata(use_, {{1}, 0, 0}, kNow).ok());
  const auto frame = *wire::decode_native(world_.sent.back().frames);
  const Token grant = std::get<wire::Metadata>(frame.message).grant;
  const auto says = [&](wire::Message message) {
    manager_.on_frames(wire::encode_native({.version = wire::kNativeVersion,
                                            .session = frame.session,
                                            .reply = kPrefill,
                                            .message = std::move(message)}),
                       kNow);
  };
  manager_.clear(use_, kNow);
  says(wire::AbortAck{RoomId{5}, 0, {}, grant});
  ASSERT_EQ(manager_.open_rooms(), 0U);

  const UseId next = *manager_.open(RoomId{5}, kServer, kNow);
  ASSERT_TRUE(manager_.init(next, 0, kNow).ok());
  EXPECT_EQ(world_.views.at(next).state, RoomState::kWaitingForInput);
  says(wire::Done{RoomId{5}, RoomState::kSuccess, 0, grant, {}});
  EXPECT_EQ(world_.views.at(next).state, RoomState::kWaitingForInput);
  EXPECT_EQ(manager_.open_rooms(), 1U);
}

// A rank that is registered no more would keep its session alive with its pings.
TEST_F(NativeRoom, ASessionEndsWhenItsRankIsNotRegisteredAnyMore) {
  const UseId other = *manager_.open(RoomId{6}, kServer, kNow);
  ASSERT_TRUE(manager_.init(other, 1, kNow).ok());
  ASSERT_EQ(manager_.sessions(), 2U);
  manager_.clear(use_, kNow);
  const auto frame = *wire::decode_native(world_.sent.back().frames);
  manager_.on_frames(wire::encode_native({.version = wire::kNativeVersion,
                                          .session = frame.session,
                                          .reply = kPrefill,
                                          .message = wire::Unknown{"restarted"}}),
                     kNow);
  ASSERT_EQ(manager_.sessions(), 1U) << "that of the rank in dp group 0 stands";

  (void)manager_.open(RoomId{7}, kServer, kNow);  // looks the instance up again
  answer_calls({1});
  EXPECT_EQ(manager_.sessions(), 0U);
}

// A prefill rank and one native decode rank whose session is open.
class NativeDecode : public testing::Test {
 protected:
  NativeDecode() : manager_(self(), settings_, world_.ports()) {
    wire::Register m;
    m.reply = kDecode;
    m.life = {8, 8};
    m.plane = "fake";
    m.layout = pools(0x100000);
    says(std::move(m));
    says(wire::Pong{static_cast<std::uint64_t>(kNow.time_since_epoch().count())});
  }
  static PrefillSelf self() {
    PrefillSelf self;
    self.control = kPrefill;
    self.bootstrap = kServer;
    self.layout = pools(0x10000);
    self.total_kv_heads = 1;
    self.stage_layers = 1;
    return self;
  }
  void says(wire::Message message) {
    manager_.on_frames(wire::encode_native({.version = wire::kNativeVersion,
                                            .session = kSession,
                                            .reply = kDecode,
                                            .message = std::move(message)}),
                       kNow);
  }
  void lends(Token grant, std::vector<PageIndex> pages) {
    wire::Metadata m;
    m.room = RoomId{5};
    m.reply = kDecode;
    m.grant = grant;
    m.pages = std::move(pages);
    m.aux_row = 0;
    m.writes_aux = true;
    says(std::move(m));
  }
  void lands(std::size_t write) {
    manager_.on_completion({Completion::Kind::kWrite,
                            static_cast<std::uint64_t>(world_.writes.at(write).id),
                            {},
                            true,
                            bytes_of(world_.writes.at(write).plan)},
                           kNow);
  }
  RoomState state(UseId use) const { return world_.views.at(use).state; }

  static constexpr Token kSession{6, 6}, kGrant{10, 1}, kNextGrant{10, 2};
  vectors::FakeWorld world_;
  Settings settings_;
  PrefillManager manager_;
};

TEST_F(NativeDecode, AnAbortOfAnotherUseOfTheNumberLeavesThisOneAlone) {
  const UseId use = *manager_.open(RoomId{5}, {}, kNow);
  lends(kGrant, {1});
  ASSERT_EQ(state(use), RoomState::kWaitingForInput);
  says(wire::Abort{RoomId{5}, {}, {}, kNextGrant, "of another use"});
  EXPECT_EQ(state(use), RoomState::kWaitingForInput);
  EXPECT_EQ(manager_.pending_rooms(), 0U) << "it is not kept for the next sender either";

  says(wire::Abort{RoomId{5}, {}, {}, kGrant, "of this one"});
  EXPECT_EQ(state(use), RoomState::kFailed);
}

TEST_F(NativeDecode, T17TheNextUseOfANumberWaitsForItsSender) {
  const UseId first = *manager_.open(RoomId{5}, {}, kNow);
  lends(kGrant, {1});
  ASSERT_TRUE(manager_.init(first, 1, 0, kNow).ok() && manager_.send(first, {1}, {}, kNow).ok());
  lands(0);
  ASSERT_EQ(state(first), RoomState::kSuccess);

  lends(kNextGrant, {2});  // the first is not cleared here yet
  EXPECT_EQ(manager_.pending_rooms(), 1U);
  EXPECT_EQ(manager_.open(RoomId{5}, {}, kNow).status().code(), Code::kAlreadyExists);
  manager_.clear(first, kNow);
  const UseId next = *manager_.open(RoomId{5}, {}, kNow);
  EXPECT_EQ(state(next), RoomState::kWaitingForInput);
  ASSERT_TRUE(manager_.init(next, 1, 0, kNow).ok() && manager_.send(next, {1}, {}, kNow).ok());
  ASSERT_EQ(world_.writes.size(), 2U);
  EXPECT_EQ(world_.writes[1].authority.token, kNextGrant);
}

TEST_F(NativeDecode, T11EmptyChunksReachNoPlaneAndTheRoomEndsOnce) {
  const UseId use = *manager_.open(RoomId{5}, {}, kNow);
  lends(kGrant, {1, 2});
  ASSERT_TRUE(manager_.init(use, 2, 0, kNow).ok());
  ASSERT_TRUE(manager_.send(use, {}, {}, kNow).ok() && manager_.send(use, {}, {}, kNow).ok());
  EXPECT_TRUE(world_.writes.empty());
  ASSERT_TRUE(manager_.send(use, {1, 2}, {}, kNow).ok());
  ASSERT_TRUE(manager_.send(use, {}, {}, kNow).ok());  // an empty trailer
  ASSERT_EQ(world_.writes.size(), 1U);

  const auto sent = world_.sent.size();
  lands(0);
  EXPECT_EQ(state(use), RoomState::kSuccess);
  EXPECT_EQ(world_.sent.size(), sent + 1) << "one word to one decode rank";
}

TEST_F(NativeDecode, T33NoChunkIsWrittenBeforeItsEventWhicheverItIs) {
  const UseId use = *manager_.open(RoomId{5}, {}, kNow);
  lends(kGrant, {1, 2, 3});
  ASSERT_TRUE(manager_.init(use, 3, 0, kNow).ok());
  ASSERT_TRUE(manager_.send(use, {1}, ReadyId{1}, kNow).ok());
  ASSERT_TRUE(manager_.send(use, {2}, ReadyId{2}, kNow).ok());
  ASSERT_TRUE(manager_.send(use, {3}, ReadyId{3}, kNow).ok());
  EXPECT_TRUE(world_.writes.empty());
  manager_.on_ready(ReadyId{3}, kNow);  // the last fires first: it waits for its turn
  EXPECT_TRUE(world_.writes.empty());
  manager_.on_ready(ReadyId{1}, kNow);
  EXPECT_EQ(world_.writes.size(), 1U);
  manager_.on_ready(ReadyId{2}, kNow);
  EXPECT_EQ(world_.writes.size(), 3U);
}

// A rank that was replaced between the lookup and the session: the shares were elected for another
// memory.
TEST_F(NativeDecode, ASessionWhoseWritersWereElectedByAnotherLayoutIsRefused) {
  wire::Register m;
  m.reply = kDecode;
  m.plane = "fake";
  m.layout = pools(0x200000);
  const auto registers = [&](std::uint64_t expected) {
    m.expected_layout = expected;
    manager_.on_frames(
        wire::encode_native(
            {.version = wire::kNativeVersion, .session = {6, 7}, .reply = kDecode, .message = m}),
        kNow);
  };
  Layout other = pools(0x10000);
  other.slabs[0].item_count += 1;
  registers(layout_hash(other));
  EXPECT_EQ(manager_.sessions(), 1U);
  const auto answer = *wire::decode_native(world_.sent.back().frames);
  const auto* unknown = std::get_if<wire::Unknown>(&answer.message);
  ASSERT_NE(unknown, nullptr);
  EXPECT_NE(unknown->reason.find(fmt::format("{:016x}", layout_hash(other))), std::string::npos);

  registers(layout_hash(pools(0x777)));  // wherever it lies
  EXPECT_EQ(manager_.sessions(), 2U);
}

// A rank that was replaced by one with another setting: pages would be missing, or come twice.
TEST(CpRanks, T28ARoomWhoseSidesDifferInWhoSendsFails) {
  for (const bool all : {false, true}) {
    vectors::FakeWorld world;
    Settings settings;
    settings.all_cp_ranks = all;
    PrefillSelf self;
    self.place = {.cp_rank = 1, .cp_size = 2};
    self.control = kPrefill;
    self.bootstrap = kServer;
    self.layout = pools(0x10000);
    self.total_kv_heads = 1;
    self.stage_layers = 1;
    PrefillManager manager(self, settings, world.ports());
    const auto says = [&](wire::Message message) {
      manager.on_frames(wire::encode_native({.version = wire::kNativeVersion,
                                             .session = {6, 6},
                                             .reply = kDecode,
                                             .message = std::move(message)}),
                        kNow);
    };
    wire::Register registration;
    registration.reply = kDecode;
    registration.plane = "fake";
    registration.layout = pools(0x100000);
    says(registration);
    says(wire::Pong{static_cast<std::uint64_t>(kNow.time_since_epoch().count())});
    for (const std::optional<bool> expected :
         {std::optional<bool>(!all), std::optional<bool>(all), std::optional<bool>()}) {
      const RoomId room{expected ? (*expected ? 1U : 2U) : 3U};
      const UseId use = *manager.open(room, {}, kNow);
      wire::Metadata m;
      m.room = room;
      m.grant = {10, static_cast<std::uint64_t>(room)};
      m.pages = {1};
      m.all_cp_ranks = expected;
      says(m);
      const bool differs = expected && *expected != all;
      EXPECT_EQ(world.views.at(use).state == RoomState::kFailed, differs) << all;
      if (differs) {
        EXPECT_NE(world.views.at(use).failure.status.message().find("(cp 1 of 2) sends"),
                  std::string::npos)
            << world.views.at(use).failure.status.to_string();
      }
    }
  }
}

// Nobody answers pings: the leave to write runs out, and the session with it.
TEST_F(NativeDecode, LeaveToWriteRunsOutWithoutAnswers) {
  const UseId use = *manager_.open(RoomId{5}, {}, kNow);
  lends(kGrant, {1});
  const Time later = kNow + settings_.write_lease;
  manager_.advance(later);
  EXPECT_EQ(manager_.sessions(), 0U);
  EXPECT_EQ(state(use), RoomState::kFailed);
  EXPECT_EQ(world_.views.at(use).failure.status.code(), Code::kPeerLost);
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

TEST_F(ForeignDecode, ASecondPageListIsRefusedByName) {
  registers("10.0.0.9:9", 0x200000);
  const UseId use = *manager_.open(RoomId{5}, {}, kNow);
  wire::Metadata m;
  m.room = RoomId{5};
  m.reply = kDecode;
  m.session_name = "10.0.0.9:9";
  m.pages = {1};
  m.aux_row = 0;
  m.device_pages = {7};
  manager_.on_frames(*wire::encode_to_prefill(wire::Message(m), wire::Dialect::k0523), kNow);
  const auto& view = world_.views.at(use);
  EXPECT_EQ(view.state, RoomState::kFailed);
  EXPECT_EQ(view.failure.status.code(), Code::kRefused);
  EXPECT_NE(view.failure.status.message().find("HiSparse"), std::string::npos);
  EXPECT_EQ(world_.sent.back().frames, (wire::Frames{"5", "0", "0"})) << "it is told";
}

// A former life at this address may have a write of the room on the wire still.
TEST_F(ForeignDecode, NoDrainedAnswerIsGivenForARoomThatAFormerLifeMayHaveWritten) {
  manager_.start(kNow);
  registers("10.0.0.9:9", 0x200000);
  aborts();
  EXPECT_EQ(answers(), 0U) << "room 5 was never heard of in this life";
  manager_.advance(kNow + settings_.bootstrap_timeout);  // the abort is forgotten

  speaks("10.0.0.9:9");  // this life heard of it, and has not written
  aborts();
  EXPECT_EQ(answers(), 1U);
  const Time later = kNow + settings_.hold_time;
  manager_.on_frames(
      *wire::encode_to_prefill(wire::Abort{RoomId{77}, kDecode, 78, {}, {}}, wire::Dialect::k0523),
      later);
  EXPECT_EQ(answers(), 2U) << "whatever a former life wrote has landed";
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

// A request of 1000 tokens in 16 pages of 64, in chunks of 4: what a reference rank holds already
// is left out, whole pages of it.
TEST(ForeignPrefix, T10APrefixInsideAPageIsFlooredAndThatPageIsSent) {
  constexpr std::uint32_t kTokens = 64;
  constexpr std::uint64_t kTarget = 0x40000000;
  const plan::Geometry model{
      .name = "one", .layers = 1, .key_head_bytes = 2, .value_head_bytes = 2, .aux_bytes = {8}};
  struct Case {
    std::uint64_t prefix;
    std::size_t lent;  // pages behind the whole pages of the prefix
  };
  for (const Case& c : {Case{0, 16}, {63, 16}, {64, 15}, {640, 6}, {1000, 1}, {1024, 0}}) {
    vectors::FakeWorld world;
    Settings settings;
    PrefillSelf self;
    self.control = kPrefill;
    self.bootstrap = kServer;
    self.layout = plan::layout_of_rank(model, {}, kTokens, 32, 2);
    plan::place_slabs(self.layout, 0x10000, 64);
    self.total_kv_heads = 1;
    self.stage_layers = 1;
    PrefillManager manager(self, settings, world.ports());
    const auto says = [&](const wire::Message& message) {
      manager.on_frames(*wire::encode_to_prefill(message, wire::Dialect::kSeed), kNow);
    };
    wire::Register registration;
    registration.reply = kDecode;
    registration.session_name = "10.0.0.9:9";
    registration.pools.kv_pointers = {kTarget, kTarget * 2};
    registration.pools.aux_pointers = {kTarget * 3};
    registration.pools.kv_item_length = kTokens * 2;
    says(registration);
    const UseId use = *manager.open(RoomId{5}, {}, kNow);
    ASSERT_TRUE(manager.init(use, 16, 0, kNow, true).ok());
    wire::Metadata m;
    m.room = RoomId{5};
    m.reply = kDecode;
    m.session_name = "10.0.0.9:9";
    for (std::size_t i = 0; i < c.lent; ++i) m.pages.push_back(static_cast<PageIndex>(100 + i));
    m.aux_row = 0;
    m.prefix_tokens = c.prefix;
    says(m);
    for (PageIndex chunk = 0; chunk < 4; ++chunk) {
      const std::vector<PageIndex> pages{4 * chunk, 4 * chunk + 1, 4 * chunk + 2, 4 * chunk + 3};
      ASSERT_TRUE(manager.send(use, pages, {}, kNow).ok());
    }
    // Page k of the request is page k of the source, and lands in the pages that were lent, in
    // order.
    std::map<std::uint64_t, std::uint64_t> moved;  // source page to target page, of the keys
    for (const auto& write : world.writes) {
      for (const plan::Block& block : plan::expand(write.plan)) {
        if (block.target < kTarget || block.target >= 2 * kTarget) continue;
        for (std::uint64_t at = 0; at < block.bytes; at += std::uint64_t{kTokens} * 2) {
          moved[(block.source - self.layout.slabs[0].base + at) / (kTokens * 2)] =
              (block.target - kTarget + at) / (kTokens * 2);
        }
      }
      manager.on_completion({Completion::Kind::kWrite,
                             static_cast<std::uint64_t>(write.id),
                             {},
                             true,
                             bytes_of(write.plan)},
                            kNow);
    }
    std::map<std::uint64_t, std::uint64_t> expected;
    for (std::size_t i = 0; i < c.lent; ++i) expected[16 - c.lent + i] = 100 + i;
    EXPECT_EQ(moved, expected) << "prefix " << c.prefix;
    EXPECT_EQ(world.views.at(use).state, RoomState::kSuccess) << "prefix " << c.prefix;
  }
}

}  // namespace
}  // namespace kvferry::proto
