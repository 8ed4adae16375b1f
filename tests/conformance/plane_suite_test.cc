#include <poll.h>

#include <cstring>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "kvferry/memory.h"
#include "src/base/random.h"
#include "src/data/choice/choice_plane.h"
#include "src/data/loopback/loopback_plane.h"
#include "src/data/shm/shm_plane.h"
#include "src/data/tcp/tcp_plane.h"
#include "src/plan/planner.h"
#include "src/sim/plane.h"
#include "tests/conformance/plane_suite.h"

namespace kvferry::conformance {
namespace {

void wait_for_either(DataPlane& a, DataPlane& b) {
  pollfd fds[2] = {{a.ready_fd(), POLLIN, 0}, {b.ready_fd(), POLLIN, 0}};
  ::poll(fds, 2, 50);
}

class LoopbackPair final : public PlanePair {
 public:
  LoopbackPair()
      : source_(fabric_, settings_),
        target_(std::make_unique<data::LoopbackPlane>(fabric_, settings_)) {}
  DataPlane& source() override { return source_; }
  DataPlane& target() override { return *target_; }
  void step() override { wait_for_either(source_, *target_); }
  void replace_target() override {
    target_ = std::make_unique<data::LoopbackPlane>(fabric_, settings_);
  }

 private:
  Settings settings_;
  data::LoopbackFabric fabric_;
  data::LoopbackPlane source_;
  std::unique_ptr<data::LoopbackPlane> target_;
};

class TcpPair final : public PlanePair {
 public:
  TcpPair() : source_(make(0)), target_(make(0)) {}
  DataPlane& source() override { return *source_; }
  DataPlane& target() override { return *target_; }
  void step() override { wait_for_either(*source_, *target_); }
  void replace_target() override {
    const std::string name = target_->session_name();
    const auto port = static_cast<std::uint16_t>(std::stoi(name.substr(name.rfind(':') + 1)));
    target_.reset();
    target_ = make(port);
  }

 private:
  std::unique_ptr<data::StreamPlane> make(std::uint16_t port) {
    auto plane = data::create_tcp_plane(
        {.listen_host = "127.0.0.1", .listen_port = port, .public_host = {}}, settings_, entropy_);
    EXPECT_TRUE(plane.ok()) << plane.status().to_string();
    return std::move(*plane);
  }
  Settings settings_;
  KernelEntropy entropy_;
  std::unique_ptr<data::StreamPlane> source_, target_;
};

// Two planes as `make` makes them; a new process is a new plane.
template <auto make>
class MadePair final : public PlanePair {
 public:
  explicit MadePair(const Settings& settings = {})
      : settings_(settings),
        source_(make(settings_, entropy_)),
        target_(make(settings_, entropy_)) {}
  DataPlane& source() override { return *source_; }
  DataPlane& target() override { return *target_; }
  void step() override { wait_for_either(*source_, *target_); }
  void replace_target() override {
    target_.reset();
    target_ = make(settings_, entropy_);
  }

 private:
  const Settings settings_;
  KernelEntropy entropy_;
  std::unique_ptr<DataPlane> source_, target_;
};

std::unique_ptr<DataPlane> make_shm(const Settings& settings, Entropy& entropy) {
  auto plane = data::create_shm_plane("/dev/shm", settings, entropy);
  EXPECT_TRUE(plane.ok()) << plane.status().to_string();
  return std::move(*plane);
}
// Both planes at either end; `in_reach` decides which one is taken.
template <bool (*in_reach)(const PlaneAddress&)>
std::unique_ptr<DataPlane> make_choice(const Settings& settings, Entropy& entropy) {
  auto tcp = data::create_tcp_plane({}, settings, entropy);
  EXPECT_TRUE(tcp.ok()) << tcp.status().to_string();
  return std::move(
      *data::ChoicePlane::create(make_shm(settings, entropy), std::move(*tcp), in_reach));
}
// Frames through the socket, or through a pipe that no frame fits into.
std::unique_ptr<PlanePair> piped_pair(std::uint64_t bytes) {
  Settings settings;
  settings.shm_pipe_bytes = bytes;
  return std::make_unique<MadePair<make_shm>>(settings);
}
bool never(const PlaneAddress&) {
  return false;
}

class SimPair final : public PlanePair {
 public:
  SimPair()
      : random_(77),
        queue_(random_),
        fabric_(queue_, random_),
        source_(fabric_, "p"),
        target_(std::make_unique<sim::SimPlane>(fabric_, "d")) {}
  DataPlane& source() override { return source_; }
  DataPlane& target() override { return *target_; }
  void step() override {
    for (int i = 0; i < 20; ++i) queue_.step();
  }
  void replace_target() override {
    target_.reset();
    target_ = std::make_unique<sim::SimPlane>(fabric_, "d");
  }

 private:
  Random random_;
  sim::EventQueue queue_;
  sim::SimFabric fabric_;
  sim::SimPlane source_;
  std::unique_ptr<sim::SimPlane> target_;
};

class Plane : public testing::TestWithParam<PlaneCase> {
 protected:
  static constexpr std::uint32_t kItems = 64, kItemBytes = 4096;
  // Runs of a write of gigabytes: no way of moving them is done before the next call comes.
  static constexpr int kEndless = 100000;
  Plane() : pair_(GetParam().make()), target_memory_(kItems * kItemBytes, 0xEE) {
    if (GetParam().shared_source) {
      shared_.emplace(std::move(*SharedMemory::create(kItems * kItemBytes)));
      source_memory_ = {static_cast<std::uint8_t*>(shared_->data()), shared_->size()};
    } else {
      private_.resize(kItems * kItemBytes);
      source_memory_ = private_;
    }
    for (std::size_t i = 0; i < source_memory_.size(); ++i)
      source_memory_[i] = static_cast<std::uint8_t>(i * 31 + i / 256);
    slabs_ = std::make_shared<const std::vector<GrantSlab>>(
        std::vector<GrantSlab>{{base(target_memory_), kItemBytes, kItemBytes, kItems}});
    const std::vector<Region> source_regions{
        shared_ ? shared_->region() : Region{base(source_memory_), source_memory_.size(), {}, -1}},
        target_regions{{base(target_memory_), target_memory_.size(), {}, -1}};
    EXPECT_TRUE(pair_->source().register_memory(source_regions).ok());
    EXPECT_TRUE(pair_->target().register_memory(target_regions).ok());
  }
  static std::uint64_t base(std::span<const std::uint8_t> memory) {
    return reinterpret_cast<std::uint64_t>(memory.data());
  }

  void lend(std::uint64_t id, Token token, std::vector<std::uint32_t> items, bool foreign = false) {
    EXPECT_TRUE(pair_->target()
                    .grant({GrantId{id}, token, foreign, {GrantGroup{slabs_, std::move(items)}}})
                    .ok());
  }
  // Rows of 256 bytes, packed at the source's item and spread over the whole of the target's.
  CopyPlan plan(std::uint32_t source_first, std::uint32_t target_first, std::uint32_t count,
                std::uint32_t bytes = kItemBytes) const {
    return {CopyGroup{{Lane{.source = base(source_memory_),
                            .target = base(target_memory_),
                            .source_item = kItemBytes,
                            .target_item = kItemBytes,
                            .rows = 1,
                            .bytes = bytes}},
                      {kvferry::Run{source_first, target_first, count}}}};
  }
  void write(std::uint64_t id, Authority authority, CopyPlan p, std::uint64_t flow = 1) {
    pair_->source().write({WriteId{id}, pair_->target().address(), authority, flow, std::move(p)});
  }
  void pump() {
    std::vector<Completion> source, target;
    pair_->source().poll(source);
    pair_->target().poll(target);
    for (auto& c : source) record(std::move(c));
    for (auto& c : target) record(std::move(c));
  }
  void record(Completion c) {
    auto& done = c.kind == Completion::Kind::kWrite ? writes_ : fences_;
    EXPECT_FALSE(done.contains(c.id)) << "a second completion for " << c.id;
    if (c.kind == Completion::Kind::kWrite) order_.push_back(c.id);
    done[c.id] = std::move(c);
  }
  const Completion& wait_write(std::uint64_t id) { return wait(writes_, id); }
  const Completion& wait_fence(std::uint64_t id) { return wait(fences_, id); }
  const Completion& wait(std::map<std::uint64_t, Completion>& done, std::uint64_t id) {
    for (int i = 0; i < 50000 && !done.contains(id); ++i) {
      pump();
      if (!done.contains(id)) pair_->step();
    }
    EXPECT_TRUE(done.contains(id)) << "no completion for " << id;
    return done[id];
  }
  void expect_landed(std::uint32_t source_first, std::uint32_t target_first, std::uint32_t count) {
    EXPECT_EQ(0, std::memcmp(&source_memory_[source_first * kItemBytes],
                             &target_memory_[target_first * kItemBytes], count * kItemBytes));
  }
  void expect_untouched(std::uint32_t first, std::uint32_t count) {
    for (std::uint32_t i = first * kItemBytes; i < (first + count) * kItemBytes; ++i)
      ASSERT_EQ(target_memory_[i], 0xEE) << "byte " << i << " was touched";
  }

  static constexpr Token kToken{11, 22};
  std::unique_ptr<PlanePair> pair_;
  std::vector<std::uint8_t> private_;
  std::optional<SharedMemory> shared_;
  std::span<std::uint8_t> source_memory_;
  std::vector<std::uint8_t> target_memory_;
  GrantSlabs slabs_;
  std::map<std::uint64_t, Completion> writes_, fences_;
  std::vector<std::uint64_t> order_;  // of the writes' completions
};

TEST_P(Plane, EveryByteOfAGrantedWriteLandsAndNoOther) {
  lend(1, kToken, {3, 4, 5, 9});
  write(1, {kToken, false}, plan(10, 3, 3));
  write(2, {kToken, false}, plan(20, 9, 1));
  EXPECT_TRUE(wait_write(1).status.ok()) << wait_write(1).status.to_string();
  EXPECT_TRUE(wait_write(2).status.ok());
  EXPECT_EQ(wait_write(1).bytes, 3U * kItemBytes);
  expect_landed(10, 3, 3);
  expect_landed(20, 9, 1);
  expect_untouched(0, 3);
  expect_untouched(6, 3);
  expect_untouched(10, 54);
}

TEST_P(Plane, RowsAreGatheredAndScattered) {
  lend(1, kToken, {0, 1, 2, 3, 4, 5, 6, 7});
  CopyPlan p = plan(0, 0, 8);
  p[0].lanes[0] = Lane{.source = base(source_memory_) + 100,
                       .target = base(target_memory_) + 7,
                       .source_item = kItemBytes,
                       .target_item = kItemBytes,
                       .rows = 16,
                       .bytes = 33,
                       .source_row = 200,
                       .target_row = 250};
  write(1, {kToken, false}, p);
  EXPECT_TRUE(wait_write(1).status.ok());
  std::vector<std::uint8_t> expected(target_memory_.size(), 0xEE);
  for (const plan::Block& block : plan::expand(p)) {
    std::memcpy(&expected[block.target - base(target_memory_)],
                reinterpret_cast<const void*>(block.source), block.bytes);
  }
  EXPECT_EQ(target_memory_, expected);
}

TEST_P(Plane, WhatIsNotLentIsRefusedAndNotTouched) {
  lend(1, kToken, {3, 4});
  write(1, {kToken, false}, plan(0, 4, 2));
  write(2, {Token{1, 1}, false}, plan(0, 3, 1));
  write(3, {Token{}, true}, plan(0, 3, 1));
  for (std::uint64_t id : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3}}) {
    EXPECT_EQ(wait_write(id).status.code(), Code::kRefused) << wait_write(id).status.to_string();
    EXPECT_TRUE(wait_write(id).settled);
  }
  expect_untouched(0, kItems);
  // The refusal concerns those writes alone.
  write(4, {kToken, false}, plan(0, 3, 2));
  EXPECT_TRUE(wait_write(4).status.ok());
}

TEST_P(Plane, AfterARevokesFenceNothingLands) {
  for (std::uint64_t round = 0; round < 8; ++round) {
    const Token token{100 + round, 1};
    lend(10 + round, token, {0, 1, 2, 3, 4, 5, 6, 7});
    CopyPlan p = plan(0, 0, 8);
    for (int i = 0; i < 32; ++i)
      p[0].runs.push_back(kvferry::Run{0, 0, 8});  // long enough to be caught midway
    write(1 + round, {token, false}, p);
    for (std::uint64_t i = 0; i < round * 2; ++i) pair_->step(), pump();
    pair_->target().revoke(GrantId{10 + round}, FenceId{500 + round});
    EXPECT_TRUE(wait_fence(500 + round).status.ok());
    std::fill(target_memory_.begin(), target_memory_.end(), 0xEE);
    const Status end = wait_write(1 + round).status;
    EXPECT_TRUE(end.ok() || end.code() == Code::kRefused) << end.to_string();
    for (int i = 0; i < 5; ++i) pump();
    expect_untouched(0, kItems);
  }
}

TEST_P(Plane, ACancelledWriteCompletesAndThenNothingOfItLands) {
  lend(1, kToken, {0, 1, 2, 3, 4, 5, 6, 7});
  CopyPlan p = plan(0, 0, 8);
  for (int i = 0; i < kEndless; ++i) p[0].runs.push_back(kvferry::Run{0, 0, 8});
  write(1, {kToken, false}, p, 1);
  write(9, {kToken, false}, plan(0, 0, 1), 2);
  wait_write(9);  // now the large one is on its way
  pair_->source().cancel(WriteId{1});
  const Completion& done = wait_write(1);
  EXPECT_FALSE(done.status.ok());
  if (done.settled) {
    std::fill(target_memory_.begin(), target_memory_.end(), 0xEE);
    write(2, {kToken, false}, plan(0, 7, 1));  // behind it on the same stream
    EXPECT_TRUE(wait_write(2).status.ok());
    expect_untouched(0, 7);
  }
}

TEST_P(Plane, ForgettingAPeerCompletesItsWritesAndSparesOthers) {
  lend(1, kToken, {0, 1, 2, 3});
  CopyPlan p = plan(0, 0, 4);
  for (int i = 0; i < kEndless; ++i) p[0].runs.push_back(kvferry::Run{0, 0, 4});
  write(1, {kToken, false}, p);
  pair_->source().forget(pair_->target().address(), FenceId{7});
  EXPECT_TRUE(wait_fence(7).status.ok());
  EXPECT_FALSE(wait_write(1).status.ok());
  write(2, {kToken, false}, plan(0, 0, 4));
  EXPECT_TRUE(wait_write(2).status.ok()) << wait_write(2).status.to_string();
}

TEST_P(Plane, AnAddressNamesOneLifeOnly) {
  const PlaneAddress old = pair_->target().address();
  pair_->replace_target();
  const std::vector<Region> regions{{base(target_memory_), target_memory_.size(), {}, -1}};
  EXPECT_TRUE(pair_->target().register_memory(regions).ok());
  lend(1, kToken, {0});
  pair_->source().write({WriteId{1}, old, {kToken, false}, 1, plan(0, 0, 1)});
  EXPECT_EQ(wait_write(1).status.code(), Code::kPeerLost) << wait_write(1).status.to_string();
  expect_untouched(0, kItems);
}

TEST_P(Plane, AWriteToNobodyCompletesWithItsError) {
  pair_->source().write({WriteId{1}, "nobody", {kToken, false}, 1, plan(0, 0, 1)});
  EXPECT_FALSE(wait_write(1).status.ok());
}

TEST_P(Plane, ForeignWritersReachWhatIsLentToThem) {
  lend(1, {}, {5, 6}, true);
  write(1, {Token{}, true}, plan(0, 5, 2));
  EXPECT_TRUE(wait_write(1).status.ok()) << wait_write(1).status.to_string();
  expect_landed(0, 5, 2);
  write(2, {Token{}, true}, plan(0, 6, 2));
  EXPECT_EQ(wait_write(2).status.code(), Code::kRefused);
}

TEST_P(Plane, ASmallRoomIsNotHeldUpByALargeOne) {
  lend(1, kToken, {0, 1, 2, 3, 4, 5, 6, 7});
  CopyPlan large = plan(0, 0, 8);
  for (int i = 0; i < 20000; ++i) large[0].runs.push_back(kvferry::Run{0, 0, 8});
  write(1, {kToken, false}, large, 1);
  write(2, {kToken, false}, plan(0, 7, 1), 2);
  EXPECT_TRUE(wait_write(2).status.ok());
  EXPECT_TRUE(wait_write(1).status.ok());
  EXPECT_EQ(order_, (std::vector<std::uint64_t>{2, 1}))
      << "the small write waited for the large one";
}

TEST_P(Plane, ManyWritesCompleteOnceEach) {
  Random random(9);
  std::vector<std::uint32_t> all(kItems);
  for (std::uint32_t i = 0; i < kItems; ++i) all[i] = i;
  lend(1, kToken, all);
  for (std::uint64_t id = 1; id <= 300; ++id) {
    const auto item = static_cast<std::uint32_t>(random.below(kItems));
    write(id, {kToken, false}, plan(item, item, 1), random.below(7));
  }
  for (std::uint64_t id = 1; id <= 300; ++id) EXPECT_TRUE(wait_write(id).status.ok());
}

TEST_P(Plane, AWriteWithoutBytesCompletes) {
  lend(1, kToken, {0});
  write(1, {kToken, false}, CopyPlan{});
  EXPECT_TRUE(wait_write(1).status.ok());
  CopyPlan zero = plan(0, 0, 1);
  zero[0].lanes[0].bytes = 0;
  write(2, {kToken, false}, zero);
  EXPECT_EQ(wait_write(2).status.code(), Code::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(
    Every, Plane,
    testing::Values(
        PlaneCase{"loopback", [] { return std::make_unique<LoopbackPair>(); }},
        PlaneCase{"tcp", [] { return std::make_unique<TcpPair>(); }},
        PlaneCase{"shm_ring", [] { return std::make_unique<MadePair<make_shm>>(); }},
        PlaneCase{"shm_socket", [] { return piped_pair(0); }},
        PlaneCase{"shm_narrow_pipe", [] { return piped_pair(5); }},
        PlaneCase{"shm_pulled", [] { return std::make_unique<MadePair<make_shm>>(); }, true},
        PlaneCase{
            "choice_shm",
            [] { return std::make_unique<MadePair<make_choice<data::shm_plane_in_reach>>>(); },
            true},
        PlaneCase{"choice_tcp", [] { return std::make_unique<MadePair<make_choice<never>>>(); }},
        PlaneCase{"sim", [] { return std::make_unique<SimPair>(); }}),
    [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace kvferry::conformance
