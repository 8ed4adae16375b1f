// Endpoints of one process over real sockets: the API as an engine uses it.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include <gtest/gtest.h>

#include "kvferry/bootstrap_server.h"
#include "kvferry/endpoint.h"
#include "src/plan/geometry.h"

namespace kvferry {
namespace {

// Waits for an event of another thread; gives up after a long time, so that a defect shows as a
// failure and not as a hang.
bool eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < end) {
    if (condition()) return true;
    std::this_thread::yield();
  }
  return condition();
}

template <class T>
T made(Result<T> result) {
  EXPECT_TRUE(result.ok()) << result.status().to_string();
  return std::move(*result);
}

struct RankMemory {
  Layout layout;
  std::vector<std::uint8_t> bytes;
  RankMemory(const plan::Geometry& geometry, RankPlace place, std::uint32_t pages,
             std::uint8_t fill) {
    layout = plan::layout_of_rank(geometry, place, 4, pages, 8);
    bytes.assign(plan::place_slabs(layout, 0, 64), fill);
    plan::place_slabs(layout, reinterpret_cast<std::uint64_t>(bytes.data()), 64);
  }
  std::uint8_t& at(std::size_t slab, std::uint32_t item, std::uint32_t offset) {
    return *reinterpret_cast<std::uint8_t*>(layout.slabs[slab].base +
                                            item * layout.slabs[slab].item_stride + offset);
  }
};

class OneProcess : public testing::TestWithParam<std::tuple<PlaneKind, bool>> {
 protected:
  static constexpr std::uint32_t kPages = 32;
  OneProcess()
      : geometry_{.name = "t",
                  .layers = 2,
                  .attention = {},
                  .kv_heads = 2,
                  .key_head_bytes = 16,
                  .value_head_bytes = 16,
                  .dtype = DType::kBFloat16,
                  .aux_bytes = {32}},
        source_(geometry_, {}, kPages, 0),
        target_(geometry_, {}, kPages, 0xEE) {
    for (std::size_t i = 0; i < source_.bytes.size(); ++i)
      source_.bytes[i] = static_cast<std::uint8_t>(i * 7 + i / 251);
    auto server = BootstrapServer::create("127.0.0.1", 0, settings_);
    EXPECT_TRUE(server.ok()) << server.status().to_string();
    server_ = std::move(*server);
    bootstrap_ = {"127.0.0.1", server_->port()};
    fabric_ = make_loopback_fabric();
    prefill_ = make_prefill();
    decode_ = make_decode();
    EXPECT_TRUE(eventually([&] { return prefill_->registered(); }));
  }
  template <class Options>
  Options options(const RankMemory& memory) const {
    Options o;
    o.layout = memory.layout;
    o.total_kv_heads = 2;
    o.plane = std::get<0>(GetParam());
    o.native = std::get<1>(GetParam());
    o.loopback = fabric_;
    o.settings = settings_;
    o.log_level = LogLevel::kOff;
    return o;
  }
  std::unique_ptr<PrefillEndpoint> make_prefill() {
    auto o = options<PrefillOptions>(source_);
    o.bootstrap = bootstrap_;
    o.stage_layers = 2;
    auto endpoint = PrefillEndpoint::create(o);
    EXPECT_TRUE(endpoint.ok()) << endpoint.status().to_string();
    return std::move(*endpoint);
  }
  std::unique_ptr<DecodeEndpoint> make_decode() {
    auto endpoint = DecodeEndpoint::create(options<DecodeOptions>(target_));
    EXPECT_TRUE(endpoint.ok()) << endpoint.status().to_string();
    return std::move(*endpoint);
  }
  void expect_moved(const std::vector<PageIndex>& from, const std::vector<PageIndex>& to) {
    for (std::size_t slab = 0; slab < 4; ++slab) {
      for (std::size_t i = 0; i < from.size(); ++i) {
        EXPECT_EQ(0, std::memcmp(&source_.at(slab, static_cast<std::uint32_t>(from[i]), 0),
                                 &target_.at(slab, static_cast<std::uint32_t>(to[i]), 0),
                                 source_.layout.slabs[slab].item_bytes));
      }
    }
  }

  Settings settings_;
  plan::Geometry geometry_;
  RankMemory source_, target_;
  std::unique_ptr<BootstrapServer> server_;
  Address bootstrap_;
  std::shared_ptr<data::LoopbackFabric> fabric_;
  std::unique_ptr<PrefillEndpoint> prefill_;
  std::unique_ptr<DecodeEndpoint> decode_;
};

TEST_P(OneProcess, ARoomArrivesByteForByte) {
  auto receiver = decode_->open(RoomId{7}, bootstrap_);
  auto sender = prefill_->open(RoomId{7});
  ASSERT_TRUE(receiver.ok() && sender.ok());
  const std::vector<PageIndex> from{3, 4, 9}, to{20, 1, 2};
  ASSERT_TRUE(receiver->init().ok());
  ASSERT_TRUE(receiver->send_metadata(to, 5, 8).ok());
  ASSERT_TRUE(sender->init(3, 2).ok());
  ASSERT_TRUE(sender->send(std::vector<PageIndex>{3, 4}).ok());
  ASSERT_TRUE(sender->send(std::vector<PageIndex>{9}).ok());

  ASSERT_TRUE(
      eventually([&] { return is_terminal(receiver->poll()) && is_terminal(sender->poll()); }));
  EXPECT_EQ(receiver->poll(), RoomState::kSuccess) << receiver->failure().status.to_string();
  EXPECT_EQ(sender->poll(), RoomState::kSuccess) << sender->failure().status.to_string();
  expect_moved(from, to);
  EXPECT_EQ(0, std::memcmp(&source_.at(4, 2, 0), &target_.at(4, 5, 0), 32));
  EXPECT_EQ(sender->decode_prefix_length(), 8U);
  EXPECT_TRUE(eventually([&] { return receiver->pages_reusable() && sender->pages_reusable(); }));
}

// A hybrid model: state of every pairing beside the KV, in lists of its own.
class Hybrid : public OneProcess {
 protected:
  Hybrid() {
    prefill_->stop();
    decode_->stop();
    geometry_.states = {{Component::kMambaConv, {0}, {4, 4, 8}, 6, DType::kBFloat16},
                        {Component::kMambaTemporal, {0}, {2}, 64, DType::kFloat32},
                        {Component::kSlidingKey, {1}, {2}, 16, DType::kBFloat16},
                        {Component::kCompressedState, {1}, {}, 24, DType::kUnknown}};
    source_ = RankMemory(geometry_, {}, kPages, 0);
    target_ = RankMemory(geometry_, {}, kPages, 0xEE);
    for (std::size_t i = 0; i < source_.bytes.size(); ++i)
      source_.bytes[i] = static_cast<std::uint8_t>(i * 7 + i / 251);
    prefill_ = make_prefill();
    decode_ = make_decode();
    EXPECT_TRUE(eventually([&] { return prefill_->registered(); }));
  }
  void begin(std::uint64_t room, const std::vector<StateItems>& from,
             const std::vector<StateItems>& to) {
    receiver_ = *decode_->open(RoomId{room}, bootstrap_);
    sender_ = *prefill_->open(RoomId{room});
    ASSERT_TRUE(receiver_.init().ok());
    ASSERT_TRUE(receiver_.send_metadata(std::vector<PageIndex>{20}, 5, 0, to).ok());
    ASSERT_TRUE(sender_.init(1, 2).ok());
    ASSERT_TRUE(sender_.send(std::vector<PageIndex>{3}, from).ok());
    ASSERT_TRUE(
        eventually([&] { return is_terminal(receiver_.poll()) && is_terminal(sender_.poll()); }));
  }
  Receiver receiver_;
  Sender sender_;
};

TEST_P(Hybrid, StateOfEveryKindArrivesInItsOwnItems) {
  const std::vector<StateItems> from{{StateKind::kMamba, {7}},
                                     {StateKind::kSlidingWindow, {8, 30, 2}},
                                     {StateKind::kCompressed, {1, 2}}};
  const std::vector<StateItems> to{{StateKind::kCompressed, {6, 3}},
                                   {StateKind::kSlidingWindow, {1, 4, 5}},
                                   {StateKind::kMamba, {0}}};
  begin(7, from, to);
  ASSERT_EQ(receiver_.poll(), RoomState::kSuccess) << receiver_.failure().status.to_string();
  ASSERT_EQ(sender_.poll(), RoomState::kSuccess);
  std::uint64_t right = 0;
  const auto expect_item = [&](std::size_t slab, std::uint32_t source, std::uint32_t target) {
    ++right;
    EXPECT_EQ(0, std::memcmp(&source_.at(slab, source, 0), &target_.at(slab, target, 0),
                             source_.layout.slabs[slab].item_bytes))
        << "slab " << slab;
  };
  for (std::size_t slab = 0; slab < source_.layout.slabs.size(); ++slab) {
    switch (source_.layout.slabs[slab].component) {
      case Component::kMambaConv:
      case Component::kMambaTemporal:
        expect_item(slab, 7, 0);
        break;
      case Component::kSlidingKey:
        expect_item(slab, 8, 1), expect_item(slab, 30, 4), expect_item(slab, 2, 5);
        break;
      case Component::kCompressedState:
        expect_item(slab, 1, 6), expect_item(slab, 2, 3);
        break;
      case Component::kAux:
        expect_item(slab, 2, 5);
        break;
      default:
        expect_item(slab, 3, 20);
    }
  }
  EXPECT_EQ(right, 4U + 3 + 1 + 3 + 2 + 1) << "K, V, blocks, temporal, window, rows, aux";
  std::uint64_t touched = 0;
  for (const std::uint8_t byte : target_.bytes) touched += byte != 0xEE ? 1 : 0;
  std::uint64_t lent = 0;
  for (const Slab& slab : target_.layout.slabs) {
    const auto kind = state_of(slab.component);
    lent += slab.item_bytes * (kind == StateKind::kSlidingWindow ? 3
                               : kind == StateKind::kCompressed  ? 2
                                                                 : 1);
  }
  EXPECT_LE(touched, lent) << "nothing else is written";
}

TEST_P(Hybrid, T09ARoomWhoseStateDoesNotFitFailsAndTheNextOneGoesOn) {
  const std::vector<StateItems> rest{{StateKind::kMamba, {1}}};
  const auto with = [&](std::vector<PageIndex> window) {
    std::vector<StateItems> states = rest;
    if (!window.empty()) states.push_back({StateKind::kSlidingWindow, std::move(window)});
    return states;
  };
  begin(1, with({}), with({1, 2, 3}));
  EXPECT_EQ(receiver_.poll(), RoomState::kFailed);
  EXPECT_EQ(sender_.failure().status.code(), Code::kRefused);
  const std::string why = sender_.failure().status.message();
  EXPECT_NE(why.find("state swa: 0 items"), std::string::npos) << why;
  EXPECT_NE(why.find("and 3 on decode"), std::string::npos) << why;
  sender_.clear(), receiver_.clear();

  begin(2, {}, rest);  // no mamba slot
  EXPECT_EQ(sender_.failure().status.code(), Code::kRefused);
  sender_.clear(), receiver_.clear();

  begin(3, with({4, 5}), with({6}));  // a page for a sampled token
  EXPECT_EQ(receiver_.poll(), RoomState::kSuccess) << receiver_.failure().status.to_string();
  sender_.clear(), receiver_.clear();

  begin(4, rest, rest);  // nothing of the other kinds on both sides
  EXPECT_EQ(receiver_.poll(), RoomState::kSuccess) << receiver_.failure().status.to_string();
}

TEST_P(Hybrid, StateThatThisRankHasNotIsAnError) {
  auto sender = *prefill_->open(RoomId{9});
  ASSERT_TRUE(sender.init(1, 0).ok());
  const std::vector<StateItems> outside{{StateKind::kMamba, {8}}};
  ASSERT_TRUE(sender.send(std::vector<PageIndex>{1}, outside).ok());
  ASSERT_TRUE(eventually([&] { return is_terminal(sender.poll()); }));
  EXPECT_NE(sender.failure().status.message().find("state mamba: item 8 outside pool of 8"),
            std::string::npos)
      << sender.failure().status.message();

  auto receiver = *decode_->open(RoomId{10}, bootstrap_);
  const std::vector<StateItems> unknown{{StateKind::kMiniMaxIndex, {0}}};
  ASSERT_TRUE(receiver.send_metadata(std::vector<PageIndex>{1}, 0, 0, unknown).ok());
  ASSERT_TRUE(eventually([&] { return is_terminal(receiver.poll()); }));
  EXPECT_NE(receiver.failure().status.message().find("minimax_index_k: this rank has no such"),
            std::string::npos)
      << receiver.failure().status.message();
}

// A request of 16 pages in chunks of 4; the decode side holds 0, 10 or all of its pages.
TEST_P(OneProcess, T10ChunksOfAWholeRequestBeginBehindThePrefix) {
  std::uint64_t room = 100;
  for (const std::uint32_t held : {0U, 10U, 16U}) {
    std::vector<PageIndex> from, to;
    for (PageIndex i = 0; i < 16; ++i) from.push_back(15 - i);
    for (PageIndex i = static_cast<PageIndex>(held); i < 16; ++i) to.push_back(i * 2 + 1);
    const std::vector<std::uint8_t> before = target_.bytes;
    auto receiver = *decode_->open(RoomId{++room}, bootstrap_);
    auto sender = *prefill_->open(RoomId{room});
    ASSERT_TRUE(receiver.init().ok());
    ASSERT_TRUE(receiver.send_metadata(to, 5, std::uint64_t{held} * 4).ok());
    ASSERT_TRUE(sender.init(16, 2, PageBase::kWholeRequest).ok());
    for (std::size_t chunk = 0; chunk < 16; chunk += 4)
      ASSERT_TRUE(sender.send(std::span(from).subspan(chunk, 4)).ok());
    ASSERT_TRUE(
        eventually([&] { return is_terminal(receiver.poll()) && is_terminal(sender.poll()); }));
    EXPECT_EQ(receiver.poll(), RoomState::kSuccess) << receiver.failure().status.to_string();
    from.erase(from.begin(), from.begin() + held);
    expect_moved(from, to);
    EXPECT_EQ(0, std::memcmp(&source_.at(4, 2, 0), &target_.at(4, 5, 0), 32)) << "aux";
    EXPECT_EQ(sender.bytes_moved(), (16 - held) * 4 * 128 + 32);
    receiver.clear(), sender.clear();
  }
  auto receiver = *decode_->open(RoomId{++room}, bootstrap_);
  ASSERT_TRUE(receiver.init().ok());
  ASSERT_TRUE(receiver.send_metadata(std::vector<PageIndex>{1}, 5, 3).ok());
  ASSERT_TRUE(eventually([&] { return is_terminal(receiver.poll()); }));
  EXPECT_NE(
      receiver.failure().status.message().find("prefix of 3 tokens is no multiple of the page "
                                               "size 4"),
      std::string::npos);
}

// Eight context-parallel ranks: the first sends and the others end with nothing, or each its part.
TEST_P(OneProcess, T28ContextParallelRanksSendAllTogetherOrTheFirstAlone) {
  // The prefill side decides, where it is native: the decode side's own setting counts for others.
  struct Flags {
    bool prefill = false, decode = false;
  };
  for (const Flags flags : {Flags{false, false}, {true, true}, {true, false}, {false, true}}) {
    const bool native = std::get<1>(GetParam()), all = flags.prefill;
    if (!native && flags.prefill != flags.decode) continue;
    SCOPED_TRACE(flags.prefill);
    SCOPED_TRACE(flags.decode);
    auto server = made(BootstrapServer::create("127.0.0.1", 0, settings_));
    const Address bootstrap{"127.0.0.1", server->port()};
    std::vector<std::unique_ptr<PrefillEndpoint>> ranks;
    for (std::uint32_t cp = 0; cp < 8; ++cp) {
      auto o = options<PrefillOptions>(source_);
      o.bootstrap = bootstrap;
      o.stage_layers = 2;
      o.place.cp_rank = cp;
      o.place.cp_size = 8;
      o.settings.all_cp_ranks = all;
      ranks.push_back(made(PrefillEndpoint::create(o)));
    }
    auto decode_options = options<DecodeOptions>(target_);
    decode_options.settings.all_cp_ranks = flags.decode;
    auto decode = made(DecodeEndpoint::create(decode_options));
    ASSERT_TRUE(eventually([&] {
      return std::all_of(ranks.begin(), ranks.end(), [](const auto& r) { return r->registered(); });
    }));
    std::vector<PageIndex> from, to;
    for (PageIndex i = 0; i < 11; ++i) from.push_back(i), to.push_back(30 - i);
    auto receiver = *decode->open(RoomId{1}, bootstrap);
    ASSERT_TRUE(receiver.init().ok() && receiver.send_metadata(to, 5).ok());
    std::vector<Sender> senders;
    for (const auto& rank : ranks) {
      senders.push_back(*rank->open(RoomId{1}));
      ASSERT_TRUE(senders.back().init(11, 2).ok() && senders.back().send(from).ok());
    }
    ASSERT_TRUE(eventually([&] {
      return is_terminal(receiver.poll()) &&
             std::all_of(senders.begin(), senders.end(),
                         [](const Sender& s) { return is_terminal(s.poll()); });
    }));
    EXPECT_EQ(receiver.poll(), RoomState::kSuccess) << receiver.failure().status.to_string();
    expect_moved(from, to);
    std::uint64_t kv = 0;
    for (std::size_t cp = 0; cp < 8; ++cp) {
      EXPECT_EQ(senders[cp].poll(), RoomState::kSuccess) << cp;
      const std::uint64_t pages = all ? (cp < 3 ? 2 : 1) : cp == 0 ? 11 : 0;
      const std::uint64_t bytes = senders[cp].bytes_moved();
      // The aux row: of the first alone, or of all of the reference's.
      EXPECT_TRUE(bytes == pages * 512 || bytes == pages * 512 + 32) << cp << ": " << bytes;
      kv += bytes / 512;
    }
    EXPECT_EQ(kv, 11U);
  }
}

// A decode rank that does not fit is told why with both values; everybody else goes on.
TEST_P(OneProcess, T30ADecodeRankWithOtherPagesOrAnotherDtypeIsRefusedAlone) {
  std::uint64_t room = 200;
  const auto refused = [&](DecodeOptions o) {
    auto decode = made(DecodeEndpoint::create(std::move(o)));
    auto receiver = *decode->open(RoomId{++room}, bootstrap_);
    auto sender = *prefill_->open(RoomId{room});
    EXPECT_TRUE(receiver.init().ok() && receiver.send_metadata(std::vector<PageIndex>{1}, 0).ok());
    EXPECT_TRUE(sender.init(1, 0).ok() && sender.send(std::vector<PageIndex>{1}).ok());
    EXPECT_TRUE(eventually([&] { return is_terminal(receiver.poll()); }));
    EXPECT_EQ(receiver.poll(), RoomState::kFailed);
    const std::string why =
        receiver.failure().status.message() + " / " + sender.failure().status.message();
    sender.clear();
    return why;
  };
  RankMemory other(geometry_, {}, kPages, 0xEE);
  auto o = options<DecodeOptions>(other);
  o.kv_cache_dtype = "fp8_e4m3";
  std::string why = refused(o);
  EXPECT_NE(why.find("auto"), std::string::npos) << why;
  EXPECT_NE(why.find("fp8_e4m3"), std::string::npos) << why;

  o = options<DecodeOptions>(other);
  o.layout = plan::layout_of_rank(geometry_, {}, 8, kPages / 2, 8);
  plan::place_slabs(o.layout, reinterpret_cast<std::uint64_t>(other.bytes.data()), 64);
  if (!std::get<1>(GetParam())) {  // native peers can do that: the next test
    why = refused(o);
    EXPECT_NE(why.find("has 4, this decode rank has 8"), std::string::npos) << why;
  }

  plan::Geometry wide = geometry_;
  wide.key_head_bytes = wide.value_head_bytes = 32;
  RankMemory wider(wide, {}, kPages, 0xEE);
  why = refused(options<DecodeOptions>(wider));
  EXPECT_TRUE(why.find("is 16 on") != std::string::npos || why.find("failed") != std::string::npos)
      << why;

  auto receiver = *decode_->open(RoomId{++room}, bootstrap_);
  auto sender = *prefill_->open(RoomId{room});
  ASSERT_TRUE(receiver.init().ok() && receiver.send_metadata(std::vector<PageIndex>{7}, 0).ok());
  ASSERT_TRUE(sender.init(1, 0).ok() && sender.send(std::vector<PageIndex>{9}).ok());
  ASSERT_TRUE(eventually([&] { return is_terminal(receiver.poll()); }));
  EXPECT_EQ(receiver.poll(), RoomState::kSuccess) << receiver.failure().status.to_string();
  expect_moved({9}, {7});
}

TEST_P(OneProcess, NativePeersMayHavePagesOfDifferentSizes) {
  if (!std::get<1>(GetParam())) GTEST_SKIP() << "refused: T30";
  RankMemory large(geometry_, {}, kPages, 0xEE);
  large.layout = plan::layout_of_rank(geometry_, {}, 16, kPages / 4, 8);
  plan::place_slabs(large.layout, reinterpret_cast<std::uint64_t>(large.bytes.data()), 64);
  auto decode = made(DecodeEndpoint::create(options<DecodeOptions>(large)));
  // Five pages of 4 tokens here are one page of 16 and the first quarter of another there.
  const std::vector<PageIndex> from{9, 4, 5, 30, 11}, to{6, 2};
  auto receiver = *decode->open(RoomId{400}, bootstrap_);
  auto sender = *prefill_->open(RoomId{400});
  ASSERT_TRUE(receiver.init().ok() && receiver.send_metadata(to, 0).ok());
  ASSERT_TRUE(sender.init(from.size(), 0).ok());
  ASSERT_TRUE(sender.send(std::span(from).first(3)).ok());
  ASSERT_TRUE(sender.send(std::span(from).last(2)).ok());
  ASSERT_TRUE(eventually([&] { return is_terminal(receiver.poll()); }));
  ASSERT_EQ(receiver.poll(), RoomState::kSuccess) << receiver.failure().status.to_string();
  for (std::size_t slab = 0; slab < 4; ++slab) {
    const auto part = static_cast<std::uint32_t>(source_.layout.slabs[slab].item_bytes);
    for (std::uint32_t i = 0; i < 8; ++i) {
      std::uint8_t* is = &large.at(slab, static_cast<std::uint32_t>(to[i / 4]), i % 4 * part);
      if (i < from.size()) {
        EXPECT_EQ(0,
                  std::memcmp(is, &source_.at(slab, static_cast<std::uint32_t>(from[i]), 0), part));
      } else {
        EXPECT_EQ(std::vector<std::uint8_t>(is, is + part), std::vector<std::uint8_t>(part, 0xEE));
      }
    }
  }
  // Lists that cannot be of the same tokens are refused with both sides' numbers.
  auto other = *decode->open(RoomId{401}, bootstrap_);
  auto short_sender = *prefill_->open(RoomId{401});
  ASSERT_TRUE(other.init().ok() && other.send_metadata(to, 0).ok());
  ASSERT_TRUE(short_sender.init(3, 0).ok());
  ASSERT_TRUE(short_sender.send(std::span(from).first(3)).ok());
  ASSERT_TRUE(eventually([&] { return is_terminal(short_sender.poll()); }));
  EXPECT_NE(short_sender.failure().status.message().find("not the same tokens"), std::string::npos)
      << short_sender.failure().status.to_string();
}

TEST_P(OneProcess, T33NoSourceByteIsReadBeforeItsEventFires) {
  auto receiver = decode_->open(RoomId{8}, bootstrap_);
  auto sender = prefill_->open(RoomId{8});
  ASSERT_TRUE(receiver->init().ok());
  ASSERT_TRUE(receiver->send_metadata(std::vector<PageIndex>{11}, 1).ok());
  const int event = eventfd(0, EFD_CLOEXEC);
  ASSERT_TRUE(sender->init(1, 1).ok());
  ASSERT_TRUE(sender->send(std::vector<PageIndex>{6}, event).ok());
  ASSERT_TRUE(eventually([&] { return sender->poll() == RoomState::kWaitingForInput; }));

  for (std::size_t slab = 0; slab < 4; ++slab) {
    for (std::uint32_t i = 0; i < 128; ++i)
      source_.at(slab, 6, i) = static_cast<std::uint8_t>(200 + slab);
  }
  EXPECT_EQ(sender->poll(), RoomState::kWaitingForInput);
  // The thread sanitizer does not know that a descriptor that becomes readable orders memory; a
  // call through the inbox it sees.
  (void)prefill_->metrics();
  const std::uint64_t one = 1;
  ASSERT_EQ(write(event, &one, sizeof one), static_cast<ssize_t>(sizeof one));
  ASSERT_TRUE(eventually([&] { return receiver->poll() == RoomState::kSuccess; }))
      << receiver->failure().status.to_string();
  for (std::size_t slab = 0; slab < 4; ++slab) EXPECT_EQ(target_.at(slab, 11, 0), 200 + slab);
  EXPECT_TRUE(eventually([&] { return is_terminal(sender->poll()); }));
  close(event);
}

TEST_P(OneProcess, T17ANumberThatIsOpenIsRefusedAndTheFirstRoomGoesOn) {
  auto first = prefill_->open(RoomId{9});
  EXPECT_EQ(prefill_->open(RoomId{9}).status().code(), Code::kAlreadyExists);
  auto receiver = decode_->open(RoomId{9}, bootstrap_);
  EXPECT_EQ(decode_->open(RoomId{9}, bootstrap_).status().code(), Code::kAlreadyExists);
  ASSERT_TRUE(receiver->init().ok());
  ASSERT_TRUE(receiver->send_metadata(std::vector<PageIndex>{1}, 0).ok());
  ASSERT_TRUE(first->init(1, 0).ok());
  ASSERT_TRUE(first->send(std::vector<PageIndex>{1}).ok());
  EXPECT_TRUE(eventually([&] { return receiver->poll() == RoomState::kSuccess; }));
  EXPECT_TRUE(eventually([&] { return first->poll() == RoomState::kSuccess; }));
  first->clear();
  EXPECT_TRUE(eventually([&] { return prefill_->open(RoomId{9}).ok(); }))
      << "a cleared number is free";
}

TEST_P(OneProcess, AnAbortOnEitherSideEndsTheOther) {
  auto receiver = decode_->open(RoomId{10}, bootstrap_);
  auto sender = prefill_->open(RoomId{10});
  ASSERT_TRUE(receiver->init().ok());
  ASSERT_TRUE(receiver->send_metadata(std::vector<PageIndex>{1}, 0).ok());
  ASSERT_TRUE(eventually([&] { return sender->poll() == RoomState::kWaitingForInput; }));
  receiver->abort("the client went away");
  ASSERT_TRUE(eventually([&] {
    return sender->poll() == RoomState::kFailed && receiver->poll() == RoomState::kFailed;
  }));
  EXPECT_TRUE(sender->failure().from_other);
  EXPECT_FALSE(receiver->failure().from_other);
  EXPECT_EQ(receiver->failure().status.message(), "the client went away");
  EXPECT_TRUE(eventually([&] { return receiver->pages_reusable() && sender->pages_reusable(); }));

  auto receiver2 = decode_->open(RoomId{11}, bootstrap_);
  auto sender2 = prefill_->open(RoomId{11});
  ASSERT_TRUE(receiver2->init().ok());
  ASSERT_TRUE(receiver2->send_metadata(std::vector<PageIndex>{1}, 0).ok());
  ASSERT_TRUE(eventually([&] { return sender2->poll() == RoomState::kWaitingForInput; }));
  sender2->abort("out of memory");
  ASSERT_TRUE(eventually([&] { return receiver2->poll() == RoomState::kFailed; }));
  EXPECT_TRUE(receiver2->failure().from_other);
}

TEST_P(OneProcess, BadPagesAreRefusedByValueAndNothingIsLost) {
  auto sender = prefill_->open(RoomId{12});
  const Status status = sender->send(std::vector<PageIndex>{1, 99});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(), "room 12: page 99 outside pool of 32");
  EXPECT_EQ(sender->poll(), RoomState::kBootstrapping);
}

TEST_P(OneProcess, AStoppedEndpointFailsItsRoomsAndTellsTheOtherSide) {
  auto receiver = decode_->open(RoomId{13}, bootstrap_);
  auto sender = prefill_->open(RoomId{13});
  ASSERT_TRUE(receiver->init().ok());
  ASSERT_TRUE(receiver->send_metadata(std::vector<PageIndex>{1}, 0).ok());
  ASSERT_TRUE(eventually([&] { return sender->poll() == RoomState::kWaitingForInput; }));
  prefill_->stop();
  EXPECT_EQ(sender->poll(), RoomState::kFailed);
  EXPECT_TRUE(sender->pages_reusable());
  EXPECT_TRUE(eventually([&] { return receiver->poll() == RoomState::kFailed; }));
  EXPECT_EQ(prefill_->open(RoomId{14}).status().code(), Code::kAborted);
  prefill_->stop();
}

TEST_P(OneProcess, ARestartedPrefillRankIsFoundAgain) {
  // A foreign rank's silence is noticed by its room's deadline, which is long; that is tested in
  // the simulator.
  if (!std::get<1>(GetParam())) GTEST_SKIP();
  const auto run_room = [&](std::uint64_t number) {
    auto receiver = decode_->open(RoomId{number}, bootstrap_);
    auto sender = prefill_->open(RoomId{number});
    EXPECT_TRUE(receiver->init().ok() &&
                receiver->send_metadata(std::vector<PageIndex>{1}, 0).ok());
    EXPECT_TRUE(sender->init(1, 0).ok() && sender->send(std::vector<PageIndex>{1}).ok());
    EXPECT_TRUE(eventually([&] { return is_terminal(receiver->poll()); }));
    const RoomState state = receiver->poll();
    receiver->clear();
    sender->clear();
    return state;
  };
  EXPECT_EQ(run_room(20), RoomState::kSuccess);
  prefill_.reset();
  prefill_ = make_prefill();
  ASSERT_TRUE(eventually([&] { return prefill_->registered(); }));
  bool found = run_room(21) == RoomState::kSuccess;
  if (!found) found = run_room(22) == RoomState::kSuccess;
  EXPECT_TRUE(found) << "at most one room may fail";
}

TEST_P(OneProcess, MetricsAreTrue) {
  auto receiver = decode_->open(RoomId{30}, bootstrap_);
  auto sender = prefill_->open(RoomId{30});
  ASSERT_TRUE(receiver->init().ok() &&
              receiver->send_metadata(std::vector<PageIndex>{1, 2}, 0).ok());
  ASSERT_TRUE(sender->init(2, 0).ok() && sender->send(std::vector<PageIndex>{1, 2}).ok());
  ASSERT_TRUE(
      eventually([&] { return is_terminal(receiver->poll()) && is_terminal(sender->poll()); }));
  const std::string text = prefill_->metrics();
  EXPECT_NE(text.find("kvferry_prefill_rooms_succeeded_total 1\n"), std::string::npos) << text;
  EXPECT_NE(text.find("kvferry_prefill_bytes_moved_total 1056\n"), std::string::npos)
      << text;  // 2 pages x 4 slabs x 128 + 32
  EXPECT_NE(decode_->metrics().find("kvferry_decode_rooms_succeeded_total 1\n"), std::string::npos);
}

std::string case_name(const testing::TestParamInfo<OneProcess::ParamType>& param) {
  const PlaneKind plane = std::get<0>(param.param);
  const char* name = plane == PlaneKind::kTcp    ? "tcp"
                     : plane == PlaneKind::kShm  ? "shm"
                     : plane == PlaneKind::kAuto ? "auto"
                                                 : "loopback";
  return std::string(name) + (std::get<1>(param.param) ? "_native" : "_sglang");
}
INSTANTIATE_TEST_SUITE_P(
    Every, OneProcess,
    testing::Values(std::tuple{PlaneKind::kTcp, true}, std::tuple{PlaneKind::kTcp, false},
                    std::tuple{PlaneKind::kShm, true}, std::tuple{PlaneKind::kAuto, true},
                    std::tuple{PlaneKind::kAuto, false}, std::tuple{PlaneKind::kLoopback, true},
                    std::tuple{PlaneKind::kLoopback, false}),
    case_name);

INSTANTIATE_TEST_SUITE_P(Every, Hybrid,
                         testing::Values(std::tuple{PlaneKind::kTcp, true},
                                         std::tuple{PlaneKind::kTcp, false},
                                         std::tuple{PlaneKind::kShm, true},
                                         std::tuple{PlaneKind::kLoopback, true},
                                         std::tuple{PlaneKind::kLoopback, false}),
                         case_name);

// Which plane reaches whom is said at once, not by a room that waits.
TEST(Endpoints, OptionsThatContradictTheLayoutAreRefusedWithTheirValues) {
  const plan::Geometry model{.name = "hybrid",
                             .layers = 2,
                             .attention = {.mla = true, .hybrid_mla = false},
                             .key_head_bytes = 16,
                             .aux_bytes = {32},
                             .states = {{Component::kIndex, {0, 1}, {}, 8, DType::kUnknown}}};
  const RankMemory memory(model, {}, 4, 0);
  const auto why = [&](const std::function<void(PrefillOptions&)>& change) {
    PrefillOptions o;
    o.layout = memory.layout;
    o.mla = true;
    o.stage_layers = 2;
    o.bootstrap = {"127.0.0.1", 1};
    o.plane = PlaneKind::kTcp;
    o.log_level = LogLevel::kOff;
    change(o);
    const auto endpoint = PrefillEndpoint::create(o);
    return endpoint.ok() ? "accepted" : endpoint.status().to_string();
  };
  const auto expect = [&](const std::string& got, const std::string& part) {
    EXPECT_NE(got.find(part), std::string::npos) << got;
  };
  expect(why([](auto& o) { o.compression_ratios = {4, 64}; }), "64 is none of 0, 4 and 128");
  expect(why([](auto& o) { o.compression_ratios = {4}; }), "of 1 layers, the stage holds 0..2");
  expect(why([](auto& o) { o.compression_ratios = {4, 128}, o.mla = false; }), "only MLA");
  expect(why([](auto& o) { o.state_kinds = {StateKind::kMamba}; }), "dsa is missing");
  expect(why([](auto& o) {
           o.state_kinds = {StateKind::kSparseIndex, StateKind::kSparseIndex};
         }),
         "dsa is there twice");
  expect(why([](auto& o) {
           o.state_kinds = {StateKind::kMamba, StateKind::kSparseIndex};
           o.compression_ratios = {4, 128};
         }),
         "accepted");
}

TEST(Endpoints, TheShmPlaneIsRefusedToRanksOfTheReference) {
  const plan::Geometry geometry{.name = "t",
                                .layers = 1,
                                .attention = {},
                                .kv_heads = 1,
                                .key_head_bytes = 16,
                                .value_head_bytes = 16,
                                .dtype = DType::kBFloat16,
                                .aux_bytes = {8}};
  const RankMemory memory(geometry, {}, 4, 0);
  DecodeOptions o;
  o.layout = memory.layout;
  o.total_kv_heads = 1;
  o.plane = PlaneKind::kShm;
  o.native = false;
  EXPECT_EQ(DecodeEndpoint::create(o).status().code(), Code::kInvalidArgument);
  o.native = true;
  o.shared_directory = "/nowhere";
  EXPECT_EQ(DecodeEndpoint::create(o).status().code(), Code::kUnavailable);
}

}  // namespace
}  // namespace kvferry
