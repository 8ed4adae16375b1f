#include <cstring>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "src/base/random.h"
#include "src/plan/components.h"
#include "src/plan/geometry.h"
#include "src/plan/planner.h"
#include "src/plan/positional.h"
#include "src/plan/ranks.h"
#include "src/plan/writers.h"

namespace kvferry::plan {
namespace {

// What the byte at one place of the model's cache is, said without any layout.
std::uint8_t pattern(Component component, std::uint32_t layer, std::uint32_t head,
                     std::uint64_t token, std::uint32_t byte) {
  Random random(token * 1315423911U + head * 2654435761U + layer * 97U +
                static_cast<std::uint32_t>(component) * 7919U + byte * 31U);
  return static_cast<std::uint8_t>(random.next64());
}

struct Rank {
  RankPlace place;
  Layout layout;
  std::vector<std::uint8_t> memory;
};

Rank make_rank(const Geometry& geometry, RankPlace place, std::uint32_t page_tokens,
               std::uint32_t pages) {
  Rank rank{place, layout_of_rank(geometry, place, page_tokens, pages, 4), {}};
  rank.memory.assign(place_slabs(rank.layout, 0, 64), 0xEE);
  place_slabs(rank.layout, reinterpret_cast<std::uint64_t>(rank.memory.data()), 64);
  return rank;
}

// Visits every byte of the request's tokens in a rank's KV memory: f(byte&, component, layer, head,
// token, offset).
template <class F>
void for_each_byte(Rank& rank, const std::vector<PageIndex>& pages, F f) {
  for (const Slab& slab : rank.layout.slabs) {
    if (slab.component == Component::kAux) continue;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      for (std::uint32_t row = 0; row < slab.rows_per_item; ++row) {
        for (std::uint32_t head = 0; head < slab.head_count; ++head) {
          auto* at = reinterpret_cast<std::uint8_t*>(
              slab.base + static_cast<std::uint64_t>(pages[i]) * slab.item_stride +
              row * slab.row_stride + head * slab.head_stride);
          for (std::uint32_t b = 0; b < slab.head_bytes; ++b) {
            f(at[b], slab.component, slab.layer, slab.head_begin + head,
              i * slab.rows_per_item + row, b);
          }
        }
      }
    }
  }
}

std::vector<PageIndex> random_pages(Random& random, std::uint32_t count, std::uint32_t pool) {
  std::vector<PageIndex> all(pool);
  for (std::uint32_t i = 0; i < pool; ++i) all[i] = static_cast<PageIndex>(i);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (random.chance(40)) std::swap(all[i], all[random.between(i, pool - 1)]);
  }
  all.resize(count);
  return all;
}

void copy(const CopyPlan& plan) {
  for (const Block& block : expand(plan)) {
    std::memcpy(reinterpret_cast<void*>(block.target), reinterpret_cast<const void*>(block.source),
                block.bytes);
  }
}

// Moves one request from every prefill rank that the mapping names to every decode rank, then looks
// at every byte.
void move_and_check(const Geometry& geometry, std::uint32_t p_tp, std::uint32_t p_pp,
                    std::uint32_t d_tp, std::uint32_t d_pp, Random& random) {
  const std::uint32_t page_tokens = static_cast<std::uint32_t>(1 + random.below(5)), pool = 12;
  const auto count = static_cast<std::uint32_t>(1 + random.below(8));
  const auto source_pages = random_pages(random, count, pool);
  const auto target_pages = random_pages(random, count, pool);
  std::vector<Rank> prefill;
  for (std::uint32_t tp = 0; tp < p_tp; ++tp) {
    for (std::uint32_t pp = 0; pp < p_pp; ++pp) {
      prefill.push_back(make_rank(geometry,
                                  {.tp_rank = tp, .tp_size = p_tp, .pp_rank = pp, .pp_size = p_pp},
                                  page_tokens, pool));
      for_each_byte(prefill.back(), source_pages,
                    [](std::uint8_t& byte, Component c, std::uint32_t l, std::uint32_t h,
                       std::uint64_t t, std::uint32_t b) { byte = pattern(c, l, h, t, b); });
    }
  }
  for (std::uint32_t tp = 0; tp < d_tp; ++tp) {
    for (std::uint32_t pp = 0; pp < d_pp; ++pp) {
      const RankPlace place{.tp_rank = tp, .tp_size = d_tp, .pp_rank = pp, .pp_size = d_pp};
      Rank decode = make_rank(geometry, place, page_tokens, pool);
      const auto map =
          map_ranks(place, geometry.attention, {.tp_size = p_tp, .pp_size = p_pp}, false);
      ASSERT_TRUE(map.ok()) << map.status().to_string();
      for (const Rank& rank : prefill) {
        if (std::find(map->tp_ranks.begin(), map->tp_ranks.end(), rank.place.tp_rank) ==
            map->tp_ranks.end())
          continue;
        if (std::find(map->pp_ranks.begin(), map->pp_ranks.end(), rank.place.pp_rank) ==
            map->pp_ranks.end())
          continue;
        const auto lanes = pair_lanes(rank.layout, decode.layout, "prefill", "decode");
        ASSERT_TRUE(lanes.ok()) << lanes.status().to_string();
        const auto runs = make_runs(source_pages, target_pages);
        ASSERT_TRUE(runs.ok());
        copy({CopyGroup{lanes->kv.even, *runs}});
      }
      std::size_t wrong = 0, right = 0;
      const std::vector<std::uint8_t> after = decode.memory;
      for_each_byte(decode, target_pages,
                    [&](std::uint8_t& byte, Component c, std::uint32_t l, std::uint32_t h,
                        std::uint64_t t, std::uint32_t b) {
                      byte == pattern(c, l, h, t, b) ? ++right : ++wrong;
                      byte = 0xEE;
                    });
      EXPECT_EQ(wrong, 0U) << "prefill tp=" << p_tp << " pp=" << p_pp << " decode tp=" << d_tp
                           << " pp=" << d_pp;
      EXPECT_GT(right, 0U);
      EXPECT_EQ(decode.memory, std::vector<std::uint8_t>(decode.memory.size(), 0xEE))
          << "bytes outside the pages were touched";
    }
  }
}

TEST(Plan, T03EveryByteArrivesForEveryTensorAndPipelineCut) {
  Random random(11);
  for (std::uint32_t heads : {1U, 2U, 4U, 8U}) {
    for (std::uint32_t p : {1U, 2U, 4U, 8U}) {
      for (std::uint32_t d : {1U, 2U, 4U, 8U}) {
        for (auto [p_pp, d_pp] :
             {std::pair{1U, 1U}, std::pair{2U, 1U}, std::pair{2U, 2U}, std::pair{3U, 1U}}) {
          const Geometry geometry{.name = "t",
                                  .layers = 5,
                                  .attention = {},
                                  .kv_heads = heads,
                                  .key_head_bytes = 6,
                                  .value_head_bytes = 4,
                                  .dtype = DType::kBFloat16,
                                  .aux_bytes = {8}};
          move_and_check(geometry, p, p_pp, d, d_pp, random);
        }
      }
    }
  }
}

TEST(Plan, LatentCachesAreTheSameOnEveryRank) {
  Random random(12);
  const Geometry geometry{.name = "mla",
                          .layers = 3,
                          .attention = {.mla = true, .hybrid_mla = false},
                          .kv_heads = 1,
                          .key_head_bytes = 10,
                          .value_head_bytes = 0,
                          .dtype = DType::kBFloat16,
                          .aux_bytes = {}};
  move_and_check(geometry, 4, 1, 2, 1, random);
  move_and_check(geometry, 2, 3, 4, 1, random);
}

TEST(Plan, T01MoreRanksThanHeadsReplicateHeadsInOrder) {
  EXPECT_EQ(heads_of_rank(2, 4, 0), (HeadRange{0, 1}));
  EXPECT_EQ(heads_of_rank(2, 4, 1), (HeadRange{0, 1}));
  EXPECT_EQ(heads_of_rank(2, 4, 2), (HeadRange{1, 1}));
  EXPECT_EQ(heads_of_rank(2, 4, 3), (HeadRange{1, 1}));
  EXPECT_EQ(heads_of_rank(8, 2, 1), (HeadRange{4, 4}));
}

TEST(Plan, EqualLayoutsMeltIntoOnePieceForEachRun) {
  const Geometry geometry{.name = "t",
                          .layers = 1,
                          .attention = {},
                          .kv_heads = 4,
                          .key_head_bytes = 8,
                          .value_head_bytes = 8,
                          .dtype = DType::kBFloat16,
                          .aux_bytes = {}};
  const Layout layout = layout_of_rank(geometry, {}, 16, 100, 0);
  const auto lanes = pair_lanes(layout, layout, "a", "b");
  ASSERT_TRUE(lanes.ok());
  ASSERT_EQ(lanes->kv.even.size(), 2U);
  EXPECT_EQ(lanes->kv.even[0].rows, 1U);
  EXPECT_EQ(lanes->kv.even[0].bytes, 4U * 8 * 16);
  const auto blocks = expand({CopyGroup{lanes->kv.even, {kvferry::Run{1, 5, 3}}}});
  EXPECT_EQ(blocks.size(), 2U);
  EXPECT_EQ(blocks[0].bytes, 3U * 4 * 8 * 16);
}

TEST(Plan, T12RunsBreakWhereEitherSideBreaks) {
  const auto runs = [](std::vector<PageIndex> s, std::vector<PageIndex> t) {
    return *make_runs(s, t);
  };
  EXPECT_EQ(runs({5, 6, 7, 9, 10}, {20, 21, 22, 23, 24}),
            (std::vector<kvferry::Run>{{5, 20, 3}, {9, 23, 2}}));
  EXPECT_EQ(runs({1, 2, 3, 4}, {8, 9, 20, 21}), (std::vector<kvferry::Run>{{1, 8, 2}, {3, 20, 2}}));
  EXPECT_EQ(runs({3, 2, 1}, {9, 8, 7}).size(), 3U);
  EXPECT_FALSE(make_runs(std::vector<PageIndex>{1, 2}, std::vector<PageIndex>{1}).ok());
  EXPECT_FALSE(make_runs(std::vector<PageIndex>{-1}, std::vector<PageIndex>{1}).ok());
}

// Offsets beyond 32 bits and bases with the top bit set are kept exactly.
TEST(Plan, T14AddressesAreSixtyFourBit) {
  const Lane lane{.source = 0xffff81ab54e01000ULL,
                  .target = 0,
                  .source_item = 65536,
                  .target_item = 65536,
                  .rows = 1,
                  .bytes = 65536};
  const auto blocks = expand({CopyGroup{{lane}, {kvferry::Run{0, 40000, 1}}}});
  ASSERT_EQ(blocks.size(), 1U);
  EXPECT_EQ(blocks[0].target, 2621440000ULL);
  EXPECT_EQ(blocks[0].source, 0xffff81ab54e01000ULL);
}

TEST(Plan, LayoutsThatDoNotFitAreRefusedWithBothValues) {
  Geometry a{.name = "a",
             .layers = 1,
             .attention = {},
             .kv_heads = 4,
             .key_head_bytes = 8,
             .value_head_bytes = 8,
             .dtype = DType::kBFloat16,
             .aux_bytes = {}};
  Geometry b = a;
  b.key_head_bytes = 16;
  const auto lanes = pair_lanes(layout_of_rank(a, {}, 16, 4, 0), layout_of_rank(b, {}, 16, 4, 0),
                                "prefill p0", "decode d1");
  ASSERT_FALSE(lanes.ok());
  EXPECT_EQ(lanes.status().message(),
            "key of layer 0: bytes per head and token is 8 on prefill p0 and 16 on decode d1");
}

TEST(Plan, PagesOfDifferentSizesArePairedByTheirParts) {
  const Geometry a{.name = "a",
                   .layers = 1,
                   .attention = {},
                   .kv_heads = 4,
                   .key_head_bytes = 8,
                   .value_head_bytes = 8,
                   .dtype = DType::kBFloat16,
                   .aux_bytes = {}};
  const auto lanes =
      pair_lanes(layout_of_rank(a, {}, 16, 8, 0), layout_of_rank(a, {}, 64, 4, 0), "p", "d");
  ASSERT_TRUE(lanes.ok()) << lanes.status().to_string();
  EXPECT_EQ(lanes->kv.parts, (Parts{1, 4}));
  // Pages 5 and 2 of 16 tokens are the second and the third quarter of page 3 of 64.
  const std::vector<PageIndex> source{5, 2}, target{3};
  CopyPlan plan;
  ASSERT_TRUE(plan_list(lanes->kv, {source, 1}, {target, 0}, 1, 3, plan).ok());
  const std::uint64_t token = 4 * 8;
  for (const Block& block : expand(plan)) EXPECT_EQ(block.bytes, 16 * token);
  ASSERT_EQ(plan.size(), 1U);
  EXPECT_EQ(plan.front().runs, (std::vector<kvferry::Run>{{5, 13, 1}, {2, 14, 1}}));
}

TEST(Plan, T04SizesThatDoNotDivideArePlannedForNativeRanksAndElseRefusedWithBoth) {
  for (const auto& [p, d] : {std::pair{4U, 6U}, {3U, 2U}}) {
    for (std::uint32_t rank = 0; rank < d; ++rank) {
      const RankPlace decode{.tp_rank = rank, .tp_size = d};
      const auto map = map_ranks(decode, {}, {.tp_size = p}, false);
      ASSERT_FALSE(map.ok());
      EXPECT_NE(map.status().message().find(fmt::format("prefill tp={}, decode tp={}", p, d)),
                std::string::npos);
      const auto native = map_native_ranks(decode, {}, 12, {.tp_size = p}, false);
      ASSERT_TRUE(native.ok());
      for (const std::uint32_t source : native->tp_ranks) EXPECT_LT(source, p);
    }
  }
}

TEST(Plan, AnUnevenPipelineSplitIsNotTakenForADraftModel) {
  PositionalContext context{.attention = {},
                            .page_tokens = 1,
                            .total_kv_heads = 1,
                            .stage_begin = 16,
                            .stage_layers = 15,
                            .model_layers = 61};
  const auto entries = pair_key_value(122, context);
  ASSERT_TRUE(entries.ok());
  EXPECT_EQ(entries->value_begin, 61U + 16);
  context.model_layers = 0;
  EXPECT_FALSE(pair_key_value(122, context).ok());
}

TEST(Plan, ALayoutThatCannotBeIsRefusedByItself) {
  const Geometry geometry{.name = "t",
                          .layers = 1,
                          .attention = {},
                          .kv_heads = 4,
                          .key_head_bytes = 8,
                          .value_head_bytes = 8,
                          .dtype = DType::kBFloat16,
                          .aux_bytes = {}};
  const Layout good = layout_of_rank(geometry, {}, 16, 100, 0);
  EXPECT_TRUE(validate(good).ok());
  Layout overflow = good;
  overflow.slabs[0].base = ~std::uint64_t{0} - 100;
  EXPECT_FALSE(validate(overflow).ok());
  Layout twice = good;
  twice.slabs.push_back(good.slabs[0]);
  EXPECT_FALSE(validate(twice).ok());
  Layout small = good;
  small.slabs[0].item_bytes -= 1;
  EXPECT_FALSE(validate(small).ok());
}

TEST(State, T09ListsOfStateArePairedByTheRuleOfTheirKind) {
  const auto pair = [](StateKind kind, std::size_t source, std::size_t target) {
    return pair_items(kind, {}, source, target, "prefill A", "decode B");
  };
  // A sampled token may have a page more; the prompt's pages are what is sent.
  EXPECT_EQ(*pair(StateKind::kSlidingWindow, 65, 64), 64U);
  EXPECT_EQ(*pair(StateKind::kSparseIndex, 64, 65), 64U);
  EXPECT_EQ(*pair(StateKind::kMiniMaxIndex, 0, 0), 0U);
  for (const auto& [source, target] : {std::pair{0, 391}, {1, 391}, {0, 1}, {66, 64}}) {
    const auto refused = pair(StateKind::kSlidingWindow, static_cast<std::size_t>(source),
                              static_cast<std::size_t>(target));
    ASSERT_FALSE(refused.ok()) << source << " " << target;
    EXPECT_EQ(refused.status().code(), Code::kRefused);
    EXPECT_NE(refused.status().message().find(fmt::format(
                  "state swa: {} items on prefill A and {} on decode B", source, target)),
              std::string::npos)
        << refused.status().message();
  }
  EXPECT_EQ(*pair(StateKind::kMamba, 1, 1), 1U);
  EXPECT_FALSE(pair(StateKind::kMamba, 0, 0).ok());
  EXPECT_FALSE(pair(StateKind::kMamba, 2, 2).ok());
  EXPECT_EQ(*pair(StateKind::kSlidingRing, 3, 3), 3U);
  EXPECT_FALSE(pair(StateKind::kSlidingRing, 4, 3).ok());
  EXPECT_EQ(*pair(StateKind::kCompressed, 0, 0), 0U);
  EXPECT_FALSE(pair(StateKind::kCompressed, 0, 1).ok());
}

TEST(State, EveryComponentHasARowAndEveryKindASlab) {
  std::set<StateKind> kinds;
  for (const ComponentRow& row : component_rows()) {
    EXPECT_EQ(to_string(row.component), row.name);
    if (row.kind) kinds.insert(*row.kind);
  }
  EXPECT_EQ(kinds.size(), kStateKinds);
  for (std::size_t k = 0; k < kStateKinds; ++k) {
    const auto kind = static_cast<StateKind>(k);
    EXPECT_EQ(row_of(kind).kind, kind);
    EXPECT_EQ(to_string(kind), row_of(kind).name);
  }
  EXPECT_EQ(to_string(static_cast<Component>(77)), "unknown");
}

// Hybrid MLA: the KV is the same on every rank, the state is cut. One rank writes the one, all of
// them the other.
TEST(State, KvAndStateHaveElectionsOfTheirOwn) {
  Geometry model{.name = "hybrid",
                 .layers = 2,
                 .attention = {.mla = true, .hybrid_mla = true},
                 .kv_heads = 1,
                 .key_head_bytes = 32,
                 .aux_bytes = {64},
                 .kv_layers = {1},
                 .states = {{Component::kMambaConv, {0}, {8, 8, 16}, 6, DType::kBFloat16},
                            {Component::kMambaTemporal, {0}, {4}, 128, DType::kFloat32}}};
  std::vector<Layout> layouts;
  std::vector<Party> parties;
  for (std::uint32_t tp = 0; tp < 4; ++tp)
    layouts.push_back(layout_of_rank(model, {.tp_rank = tp, .tp_size = 4}, 4, 8, 8));
  for (const Layout& layout : layouts) parties.push_back({"prefill", &layout});
  Layout target = layout_of_rank(model, {.tp_rank = 1, .tp_size = 2}, 4, 8, 8);
  place_slabs(target, 0, 64);
  ASSERT_TRUE(validate(target).ok()) << validate(target).to_string();
  const auto shares = elect_writers(parties, {"decode", &target}, 0);
  ASSERT_TRUE(shares.ok()) << shares.status().to_string();
  const Shares mamba = share_of(StateKind::kMamba);
  EXPECT_EQ(*shares, (std::vector<Shares>{kKvShare, 0, mamba, mamba}));

  // The blocks of a convolution lie behind each other in one pool.
  std::vector<std::uint64_t> offsets;
  for (const Slab& slab : target.slabs) {
    if (slab.component == Component::kMambaConv) {
      offsets.push_back(slab.base - target.slabs[1].base);
      EXPECT_EQ(slab.item_stride, 16U * 6);
    }
  }
  EXPECT_EQ(offsets, (std::vector<std::uint64_t>{0, 4 * 6, 8 * 6}));
}

TEST(State, WhatWasElectedIsProved) {
  const Geometry model{.name = "t",
                       .layers = 1,
                       .attention = {},
                       .kv_heads = 4,
                       .key_head_bytes = 8,
                       .value_head_bytes = 8,
                       .aux_bytes = {},
                       .states = {{Component::kMambaTemporal, {0}, {4}, 16, DType::kFloat32}}};
  std::vector<Layout> layouts;
  for (std::uint32_t tp = 0; tp < 2; ++tp) {
    layouts.push_back(layout_of_rank(model, {.tp_rank = tp, .tp_size = 2}, 4, 8, 8));
    place_slabs(layouts.back(), 0, 64);
  }
  Layout target = layout_of_rank(model, {}, 4, 8, 8);
  place_slabs(target, 0, 64);
  const std::vector<Party> parties{{"prefill 0", &layouts[0]}, {"prefill 1", &layouts[1]}};
  const Party decode{"decode 0", &target};
  auto shares = *elect_writers(parties, decode, 0);
  EXPECT_TRUE(prove_writers(parties, shares, decode, 0).ok());
  shares[1] = kKvShare;  // half of the state has no writer
  Status status = prove_writers(parties, shares, decode, 0);
  EXPECT_EQ(status.code(), Code::kRefused);
  EXPECT_NE(status.message().find("mamba-temporal of layer 0"), std::string::npos)
      << status.message();
  shares = {kAllShares, kAllShares};
  layouts[1] = layouts[0];  // both hold the same
  status = prove_writers(parties, shares, decode, 0);
  EXPECT_NE(status.message().find("written more than once, by prefill 0, prefill 1"),
            std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace kvferry::plan
