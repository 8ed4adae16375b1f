#include <cstring>

#include <gtest/gtest.h>

#include "src/base/random.h"
#include "src/data/copier/copier.h"
#include "src/data/flow_queue.h"
#include "src/data/grant_table.h"
#include "src/data/plan_cursor.h"
#include "src/data/stream/frames.h"
#include "src/plan/planner.h"

namespace kvferry::data {
namespace {

CopyPlan random_plan(Random& random) {
  CopyPlan plan(random.below(4));
  for (CopyGroup& group : plan) {
    group.lanes.resize(random.below(4));
    group.runs.resize(random.below(5));
    for (Lane& lane : group.lanes) {
      lane.source = random.below(1000) * 100000;
      lane.target = random.below(1000) * 100000;
      lane.rows = static_cast<std::uint32_t>(1 + random.below(4));
      lane.bytes = static_cast<std::uint32_t>(1 + random.below(50));
      lane.source_row = lane.bytes + static_cast<std::uint32_t>(random.below(3));
      lane.target_row = lane.bytes + static_cast<std::uint32_t>(random.below(3));
      lane.source_item =
          lane.rows == 1 && random.chance(50) ? lane.bytes : lane.rows * lane.source_row;
      lane.target_item =
          lane.rows == 1 && random.chance(50) ? lane.bytes : lane.rows * lane.target_row;
    }
    for (kvferry::Run& run : group.runs) {
      run = {static_cast<std::uint32_t>(random.below(50)),
             static_cast<std::uint32_t>(random.below(50)),
             static_cast<std::uint32_t>(1 + random.below(4))};
    }
  }
  return plan;
}

// However the walk is cut into slices, it visits the bytes of the list in the list's order.
TEST(PlanCursor, VisitsWhatTheListSaysInItsOrderForEveryCut) {
  Random random(5);
  for (int i = 0; i < 500; ++i) {
    const CopyPlan plan = random_plan(random);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> expected, seen;
    for (const plan::Block& block : plan::expand(plan)) {
      for (std::uint64_t b = 0; b < block.bytes; ++b)
        expected.emplace_back(block.source + b, block.target + b);
    }
    PlanCursor cursor(plan);
    EXPECT_EQ(cursor.left(), expected.size());
    while (cursor.left() > 0) {
      cursor.advance(1 + random.below(200), [&](std::uint64_t s, std::uint64_t t, std::uint64_t n) {
        for (std::uint64_t b = 0; b < n; ++b) seen.emplace_back(s + b, t + b);
      });
    }
    ASSERT_EQ(seen, expected);
  }
}

class Grants : public testing::Test {
 protected:
  Grants() {
    slabs_ = std::make_shared<const std::vector<GrantSlab>>(
        std::vector<GrantSlab>{{1000, 100, 80, 10}, {5000, 100, 80, 10}});
    EXPECT_TRUE(table_.add({GrantId{1}, kToken, false, {GrantGroup{slabs_, {2, 3, 4, 7}}}}).ok());
  }
  static CopyPlan plan(std::uint64_t target, std::uint32_t bytes, std::uint32_t first,
                       std::uint32_t count, std::uint64_t stride = 100) {
    return {CopyGroup{{Lane{.source = 0,
                            .target = target,
                            .source_item = stride,
                            .target_item = stride,
                            .rows = 1,
                            .bytes = bytes}},
                      {kvferry::Run{0, first, count}}}};
  }
  bool allowed(const CopyPlan& p, Authority authority = {kToken, false}) {
    return table_.check(authority, p).ok();
  }

  static constexpr Token kToken{1, 2};
  GrantSlabs slabs_;
  GrantTable table_;
};

TEST_F(Grants, LentItemsMayBeWrittenAndNothingElse) {
  EXPECT_TRUE(allowed(plan(1000, 80, 2, 3)));
  EXPECT_TRUE(allowed(plan(5010, 70, 7, 1)));
  EXPECT_FALSE(allowed(plan(1000, 80, 2, 4))) << "item 5 is not lent";
  EXPECT_FALSE(allowed(plan(1000, 80, 1, 1)));
  EXPECT_FALSE(allowed(plan(1000, 81, 2, 1))) << "beyond the item";
  EXPECT_FALSE(allowed(plan(1010, 80, 2, 1)));
  EXPECT_FALSE(allowed(plan(999, 10, 2, 1))) << "before the pool";
  EXPECT_FALSE(allowed(plan(3000, 10, 2, 1))) << "between the pools";
  EXPECT_FALSE(allowed(plan(1000, 10, 2, 1, 50))) << "another stride";
  EXPECT_FALSE(allowed(plan(1000, 80, 0xFFFFFFFF, 1)));
  EXPECT_TRUE(allowed(plan(1200, 80, 0, 3))) << "base in item 2";
  EXPECT_FALSE(allowed(plan(1200, 80, 1, 3)));
}

TEST_F(Grants, ALaneMayGoThroughItemsInPartsThatDivideThem) {
  EXPECT_TRUE(allowed(plan(1000, 30, 4, 6, 50))) << "both parts of items 2 to 4";
  EXPECT_TRUE(allowed(plan(1050, 30, 3, 6, 50))) << "the same, from the second part of item 0";
  EXPECT_FALSE(allowed(plan(1000, 30, 4, 7, 50))) << "item 5 is not lent";
  EXPECT_FALSE(allowed(plan(1050, 30, 4, 6, 50)));
  EXPECT_FALSE(allowed(plan(1000, 30, 3, 2, 50))) << "nor is item 1";
  EXPECT_FALSE(allowed(plan(1000, 31, 4, 1, 50))) << "the second part would pass the item's end";
  EXPECT_FALSE(allowed(plan(1000, 10, 4, 1, 30))) << "no divisor";
  EXPECT_FALSE(allowed(plan(1000, 10, 2, 1, 200)));
  EXPECT_FALSE(allowed(plan(1000, 10, 2, 1, 0)));
  EXPECT_FALSE(allowed(plan(1000, 1, 0xFFFFFFFF, 0xFFFFFFFF, 1)));
}

TEST_F(Grants, RowsMustStayInsideTheItem) {
  CopyPlan p = plan(1000, 10, 2, 1);
  p[0].lanes[0].rows = 8;
  p[0].lanes[0].target_row = 10;
  EXPECT_TRUE(allowed(p));
  p[0].lanes[0].target_row = 11;
  EXPECT_FALSE(allowed(p));
  p[0].lanes[0].rows = 0xFFFFFFFF;
  p[0].lanes[0].target_row = 0xFFFFFFFF;
  EXPECT_FALSE(allowed(p));
}

TEST_F(Grants, ATokenThatIsNotKnownOpensNothing) {
  EXPECT_FALSE(allowed(plan(1000, 80, 2, 1), {Token{9, 9}, false}));
  EXPECT_FALSE(allowed(plan(1000, 80, 2, 1), {Token{}, true}))
      << "a foreign writer gets nothing of a native grant";
  table_.remove(GrantId{1});
  EXPECT_FALSE(allowed(plan(1000, 80, 2, 1)));
}

TEST_F(Grants, ForeignWritersAreCheckedAgainstTheUnionOfWhatIsLentToThem) {
  EXPECT_TRUE(table_.add({GrantId{2}, {}, true, {GrantGroup{slabs_, {8}}}}).ok());
  EXPECT_TRUE(table_.add({GrantId{3}, {}, true, {GrantGroup{slabs_, {9}}}}).ok());
  EXPECT_TRUE(allowed(plan(1000, 80, 8, 1), {Token{}, true}));
  EXPECT_TRUE(allowed(plan(1000, 80, 9, 1), {Token{}, true}));
  EXPECT_FALSE(allowed(plan(1000, 80, 2, 1), {Token{}, true}));
  GrantTable::Ticket eight, nine;
  EXPECT_TRUE(table_.recheck(eight, {Token{}, true}, plan(1000, 80, 8, 1)).ok());
  EXPECT_TRUE(table_.recheck(nine, {Token{}, true}, plan(1000, 80, 9, 1)).ok());
  table_.remove(GrantId{3});
  EXPECT_TRUE(table_.recheck(eight, {Token{}, true}, plan(1000, 80, 8, 1)).ok());
  EXPECT_FALSE(table_.recheck(nine, {Token{}, true}, plan(1000, 80, 9, 1)).ok());
  EXPECT_FALSE(allowed(plan(1000, 80, 9, 1), {Token{}, true}));
}

TEST(Copier, CopiesEverySizeAtEveryAlignmentAndNothingBeyond) {
  for (const Kernel& kernel : kernels()) {
    std::vector<std::uint8_t> from(1024), to(1024 + 256);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint8_t>(i * 13 + 1);
    for (std::size_t bytes = 0; bytes < 700; bytes += bytes < 200 ? 1 : 37) {
      for (std::size_t offset = 0; offset < 66; offset += 3) {
        std::fill(to.begin(), to.end(), 0xEE);
        const Piece piece{reinterpret_cast<char*>(to.data()) + 64 + offset,
                          reinterpret_cast<const char*>(from.data()) + offset % 5, bytes};
        kernel.copy({&piece, 1});
        landing_fence();
        ASSERT_EQ(0, std::memcmp(to.data() + 64 + offset, from.data() + offset % 5, bytes));
        ASSERT_EQ(to[63 + offset], 0xEE);
        ASSERT_EQ(to[64 + offset + bytes], 0xEE);
      }
    }
  }
}

// Every kernel, alone and with helpers: what is gathered and scattered again is what a list says.
TEST(Copier, GathersScattersAndCopiesWhatThePlanSays) {
  Random random(21);
  constexpr std::uint32_t kItem = 6000, kItems = 400;
  std::vector<char> source(kItem * kItems), target(kItem * kItems), expected(kItem * kItems);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i * 31 + i / 256);
  for (std::uint64_t kernel = 0; kernel <= kernels().size(); ++kernel) {
    for (const std::uint64_t threads : {1U, 3U}) {
      Settings settings;
      settings.copier_kernel = kernel;
      settings.copier_threads = threads;
      Copier copier(settings);
      EXPECT_EQ(copier.threads(), threads);
      Lane lane{.source = reinterpret_cast<std::uint64_t>(source.data()),
                .target = reinterpret_cast<std::uint64_t>(target.data()),
                .source_item = kItem,
                .target_item = kItem,
                .rows = 4,
                .bytes = static_cast<std::uint32_t>(1 + random.below(900)),
                .source_row = 1000,
                .target_row = 1400};
      const Lane large{.source = lane.source,
                       .target = lane.target,
                       .source_item = kItem,
                       .target_item = kItem,
                       .rows = 1,
                       .bytes = kItem};
      const CopyPlan plan{CopyGroup{{lane}, {kvferry::Run{0, 100, 50}, kvferry::Run{60, 3, 90}}},
                          CopyGroup{{large}, {kvferry::Run{200, 210, 150}}}};
      std::fill(expected.begin(), expected.end(), '\xEE');
      for (const plan::Block& block : plan::expand(plan))
        std::memcpy(expected.data() + (block.target - lane.target),
                    reinterpret_cast<const void*>(block.source), block.bytes);

      std::fill(target.begin(), target.end(), '\xEE');
      PlanCursor from(plan), to(plan), both(plan);
      std::vector<char> buffer(300000);
      for (std::uint64_t n; (n = copier.gather(from, buffer.size(), buffer.data())) > 0;)
        ASSERT_EQ(copier.scatter(to, n, buffer.data()), n);
      EXPECT_EQ(target, expected) << "kernel " << kernel << ", threads " << threads;

      std::fill(target.begin(), target.end(), '\xEE');
      while (copier.direct(both, 777777) > 0) {
      }
      EXPECT_EQ(target, expected) << "kernel " << kernel << ", threads " << threads;
    }
  }
}

TEST(Copier, ThreadsFollowTheCores) {
  Settings settings;
  for (const auto& [cores, threads] :
       {std::pair{2U, 1U}, {8U, 1U}, {16U, 2U}, {64U, 8U}, {128U, 8U}})
    EXPECT_EQ(copier_threads(settings, cores), threads);
  settings.copier_threads = 5;
  EXPECT_EQ(copier_threads(settings, 2), 5U);
}

TEST(Copier, TheMeasurementChoosesKernelsThatExist) {
  const KernelChoice choice = measure_kernels();
  for (const auto& kind : choice.kernel) {
    for (const std::uint8_t kernel : kind) EXPECT_LT(kernel, kernels().size());
    EXPECT_EQ(kind[0], 0) << "pieces below 128 bytes take memcpy";
  }
  EXPECT_EQ(measured_kernels(), measured_kernels());
}

TEST(FlowQueue, EveryFlowHasOneTurnHoweverManyWritesItHas) {
  FlowQueue<int> queue;
  int a = 1, b = 2, c = 3;
  queue.push(10, &a);
  queue.push(10, &b);
  queue.push(20, &c);
  std::vector<int> turns;
  for (int i = 0; i < 4; ++i) {
    turns.push_back(*queue.front());
    queue.rotate();
  }
  EXPECT_EQ(turns, (std::vector<int>{1, 3, 1, 3}));
  EXPECT_TRUE(queue.remove(10, &a));
  EXPECT_FALSE(queue.remove(10, &a));
  EXPECT_TRUE(queue.remove(20, &c));
  EXPECT_EQ(*queue.front(), 2);
}

TEST(StreamFrames, ThePlanCrossesWithoutItsSourceSide) {
  Random random(6);
  for (int i = 0; i < 200; ++i) {
    const CopyPlan plan = random_plan(random);
    const Authority authority{random.token(), false};
    const std::string bytes = stream::encode_begin(authority, plan);
    const auto back = stream::decode_begin(bytes);
    ASSERT_TRUE(back.ok()) << back.status().to_string();
    EXPECT_EQ(back->authority.token, authority.token);
    stream::Begin pull{authority, plan, 7, 9, 11};
    const std::string pull_bytes = stream::encode_pull(pull);
    const auto pulled = stream::decode_pull(pull_bytes);
    ASSERT_TRUE(pulled.ok());
    EXPECT_EQ(pulled->flow, 7U);
    EXPECT_EQ(pulled->epoch, 9U);
    EXPECT_EQ(pulled->epoch_slot, 11U);
    EXPECT_EQ(pulled->plan.size(), plan.size());
    for (std::size_t g = 0; g < plan.size(); ++g) EXPECT_EQ(pulled->plan[g].runs, plan[g].runs);
    EXPECT_EQ(bytes_of(back->plan), bytes_of(plan));
    for (std::size_t cut = 0; cut < bytes.size(); cut += 3)
      EXPECT_FALSE(stream::decode_begin(std::string_view(bytes).substr(0, cut)).ok());
  }
}

TEST(StreamFrames, RandomBytesAreRefused) {
  Random random(7);
  for (int i = 0; i < 100000; ++i) {
    std::string bytes(random.below(120), '\0');
    for (char& c : bytes)
      c = static_cast<char>(random.chance(70) ? random.below(3) : random.below(256));
    (void)stream::decode_begin(bytes);
    (void)stream::decode_hello(bytes);
    (void)stream::decode_pull(bytes);
    (void)stream::decode_done(bytes);
  }
}

}  // namespace
}  // namespace kvferry::data
