// Layouts out of the reference's lists: what they mean, and what they cannot say.
#include "src/plan/positional.h"

#include <numeric>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "src/plan/geometry.h"

namespace kvferry::plan {
namespace {

constexpr std::uint64_t kPool = 1 << 20;  // pool i is registered at (i + 1) of these

std::vector<std::uint64_t> pools(std::size_t count) {
  std::vector<std::uint64_t> list(count);
  for (std::size_t i = 0; i < count; ++i) list[i] = (i + 1) * kPool;
  return list;
}
std::size_t pool_of(const Slab& slab) {
  return slab.base / kPool - 1;
}

struct Split {
  std::vector<std::uint32_t> stages;
  std::uint32_t drafts = 0;
};

// K[n] V[n] dK[m] dV[m]: each buffer of the model is found once, by the stage that holds its layer,
// and those of the draft model by nobody.
TEST(Positional, T05AnUnevenPipelineAndADraftModelAreToldApartByTheNumberOfLayers) {
  const Split splits[] = {{{7, 8}},
                          {{3, 4, 4, 4}, 1},
                          {{16, 15, 15, 15}},
                          {{12, 12, 12, 12, 11, 11, 11, 11}},
                          {{30, 30}, 1}};
  for (const Split& split : splits) {
    const std::uint32_t n = std::accumulate(split.stages.begin(), split.stages.end(), 0U);
    const auto pointers = pools(2 * (n + split.drafts));
    const std::uint64_t length = 64;
    std::set<std::size_t> found;
    std::uint32_t begin = 0;
    for (const std::uint32_t layers : split.stages) {
      const auto layout =
          layout_from_lists({.page_tokens = 4,
                             .total_kv_heads = 2,
                             .stage_begin = begin,
                             .stage_layers = layers,
                             .model_layers = n},
                            {.kv_pointers = pointers, .kv_item_lengths = {&length, 1}});
      ASSERT_TRUE(layout.ok()) << layout.status().to_string();
      for (const Slab& slab : layout->slabs) {
        EXPECT_EQ(pool_of(slab), slab.layer + (slab.component == Component::kValue ? n : 0));
        EXPECT_TRUE(found.insert(pool_of(slab)).second);
      }
      begin += layers;
    }
    EXPECT_EQ(found.size(), 2 * n);
    EXPECT_EQ(*found.rbegin(), 2 * n - 1) << "drafts lie behind";
  }
}

// A hybrid model of 60 layers, every fourth with a cache: 15 of them, on two stages.
struct HybridStage {
  explicit HybridStage(std::uint32_t stage) {
    for (std::uint32_t i = stage * 30; i < (stage + 1) * 30; ++i) {
      if (i % 4 == 3) layers.push_back(i);
    }
  }
  std::vector<std::uint32_t> layers;
  Result<Layout> from(std::size_t count, const std::vector<std::uint32_t>& ids) const {
    const auto pointers = pools(count);
    const std::uint64_t length = 64;
    return layout_from_lists(
        {.page_tokens = 4,
         .total_kv_heads = 2,
         .stage_begin = layers.front(),
         .stage_layers = 30,
         .kv_layers = layers},
        {.kv_pointers = pointers, .kv_item_lengths = {&length, 1}, .kv_layer_ids = ids});
  }
};

TEST(Positional, T06LayersOfAHybridModelArePairedByTheirNumbers) {
  std::vector<std::uint32_t> ids;
  for (int half = 0; half < 2; ++half) {
    for (std::uint32_t i = 3; i < 60; i += 4) ids.push_back(i);
  }
  const std::size_t first_of[] = {0, 7}, count_of[] = {7, 8};
  for (std::uint32_t stage = 0; stage < 2; ++stage) {
    const HybridStage own(stage);
    ASSERT_EQ(own.layers.size(), count_of[stage]);
    const auto layout = own.from(30, ids);
    ASSERT_TRUE(layout.ok()) << layout.status().to_string();
    for (std::size_t i = 0; i < own.layers.size(); ++i) {
      EXPECT_EQ(layout->slabs[i].layer, own.layers[i]);
      EXPECT_EQ(pool_of(layout->slabs[i]), first_of[stage] + i);
      EXPECT_EQ(pool_of(layout->slabs[own.layers.size() + i]), 15 + first_of[stage] + i) << "V";
    }
    const auto blind = own.from(30, {});
    ASSERT_FALSE(blind.ok());
    EXPECT_NE(blind.status().message().find("layer ids needed"), std::string::npos);
    const auto other = own.from(4, {60, 61, 60, 61});  // of a draft model alone
    ASSERT_FALSE(other.ok());
    EXPECT_NE(other.status().message().find(fmt::format("layer {}", own.layers[0])),
              std::string::npos);
  }
  // Equal counts on both sides pair by position.
  EXPECT_TRUE(HybridStage(0).from(14, {}).ok());
}

// --- compressed MLA

// Six layers: 0 has a window alone, 1 and 3 are compressed by 4, 2 and 4 by 128, 5 by 4.
const Geometry kCompressedModel{
    .name = "compressed",
    .layers = 6,
    .attention = {.mla = true, .hybrid_mla = false},
    .key_head_bytes = 64,
    .aux_bytes = {},
    .states = {{Component::kSlidingKey, {0, 1, 2, 3, 4, 5}, {}, 32, DType::kBFloat16},
               {Component::kSlidingCompressed, {1, 3, 5}, {}, 8, DType::kBFloat16},
               {Component::kSlidingCompressedIndex, {1, 3, 5}, {}, 4, DType::kBFloat16},
               {Component::kCompressedState, {2, 4}, {}, 512, DType::kBFloat16}},
    .compression_ratios = {0, 4, 128, 4, 128, 4},
    .index_bytes = 16};

// The layout that a prefill rank reads from what a decode rank of one stage registers for itself,
// and that one's own.
struct CompressedPair {
  CompressedPair(std::uint32_t pp_rank, std::uint32_t pp_size, std::uint32_t target_pp_size = 1)
      : place{.tp_rank = 1, .tp_size = 2, .pp_rank = pp_rank, .pp_size = pp_size},
        own(layout_of_rank(kCompressedModel, place, 256, 8, 4)),
        target(layout_of_rank(
            kCompressedModel,
            {.tp_size = 4, .pp_rank = pp_rank % target_pp_size, .pp_size = target_pp_size}, 256, 8,
            4)) {
    place_slabs(own, 1 << 20, 64);
    place_slabs(target, 1 << 24, 64);
    for (const Slab& slab : target.slabs) {
      if (state_of(slab.component)) continue;
      pointers.push_back(slab.base);
      lengths.push_back(slab.item_bytes);
    }
    for (const StateKind kind : kinds) {
      auto& list = state_pointers.emplace_back();
      auto& sizes = state_lengths.emplace_back();
      for (const StatePool& pool : state_pools(target, kind)) {
        list.push_back(pool.base);
        sizes.push_back(static_cast<std::uint32_t>(pool.item_bytes));
      }
    }
  }
  [[nodiscard]] Result<Layout> read() const {
    const LayerRange stage = layers_of_stage(kCompressedModel.layers, place.pp_size, place.pp_rank);
    return layout_of_peer(own, place,
                          {.attention = kCompressedModel.attention,
                           .page_tokens = 256,
                           .stage_begin = stage.begin,
                           .stage_layers = stage.count,
                           .compression_ratios = ratios,
                           .state_kinds = kinds},
                          {.kv_pointers = pointers, .kv_item_lengths = lengths, .tp_size = 4},
                          {.pointers = state_pointers, .item_lengths = state_lengths, .tp_size = 4},
                          "decode D");
  }
  RankPlace place;
  Layout own, target;
  std::vector<std::uint64_t> pointers, lengths;
  std::vector<std::vector<std::uint64_t>> state_pointers;
  std::vector<std::vector<std::uint32_t>> state_lengths;
  std::vector<std::uint32_t> ratios = kCompressedModel.compression_ratios;
  std::vector<StateKind> kinds = kinds_of(kCompressedModel);
};

TEST(Positional, SectionsOfACompressedModelAreCutToTheStage) {
  for (const std::uint32_t stages : {1U, 2U, 3U, 6U}) {
    for (const std::uint32_t target_stages : {1U, stages}) {
      std::size_t found = 0;
      for (std::uint32_t stage = 0; stage < stages; ++stage) {
        const CompressedPair pair(stage, stages, target_stages);
        const auto layout = pair.read();
        ASSERT_TRUE(layout.ok()) << layout.status().to_string();
        EXPECT_EQ(layout->slabs.size(), pair.own.slabs.size());
        for (const Slab& slab : layout->slabs) {
          const auto same = std::find_if(
              pair.target.slabs.begin(), pair.target.slabs.end(), [&](const Slab& theirs) {
                return theirs.component == slab.component && theirs.layer == slab.layer;
              });
          ASSERT_NE(same, pair.target.slabs.end());
          EXPECT_EQ(slab.base, same->base) << to_string(slab.component) << " " << slab.layer;
          EXPECT_EQ(slab.rows_per_item, same->rows_per_item);
        }
        ASSERT_TRUE(pair_lanes(pair.own, *layout, "P", "D").ok());
        found += layout->slabs.size();
      }
      const std::size_t pools = 3 + 3 + 2 + 6 + 3 + 3 + 2;
      EXPECT_EQ(found, pools) << stages << " stages";
    }
  }
}

TEST(Positional, SectionsThatDoNotFitAreRefusedWithTheCounts) {
  const auto why = [](const CompressedPair& pair) {
    const auto layout = pair.read();
    return layout.ok() ? std::string("accepted") : layout.status().message();
  };
  CompressedPair one(0, 2);
  one.pointers.pop_back();
  one.lengths.pop_back();
  EXPECT_NE(why(one).find("KV: 3 pools here and 7 on decode D; compression ratios of 6 layers say "
                          "3 for layers 0..3 and 8 for the model"),
            std::string::npos)
      << why(one);
  CompressedPair length(0, 2);
  length.lengths[3] += 4;  // the first index
  EXPECT_NE(why(length).find("latent-index of layer 1: an item has 1028 bytes on decode D"),
            std::string::npos)
      << why(length);
  length.lengths.resize(1);  // a release that says that of the first pool alone
  EXPECT_EQ(why(length), "accepted");
  CompressedPair other(0, 2);
  other.ratios = {4, 0, 128, 4, 128, 4};
  EXPECT_NE(why(other).find("no place for latent of layer 1"), std::string::npos) << why(other);
  CompressedPair shorter(1, 2);
  shorter.ratios.pop_back();
  EXPECT_NE(why(shorter).find("compression ratios of 5 layers"), std::string::npos) << why(shorter);
}

// --- state

const Geometry kHybrid{.name = "hybrid",
                       .layers = 2,
                       .attention = {},
                       .kv_heads = 4,
                       .key_head_bytes = 8,
                       .value_head_bytes = 8,
                       .aux_bytes = {},
                       .kv_layers = {1},
                       .states = {{Component::kMambaConv, {0}, {8, 8, 16}, 6, DType::kBFloat16},
                                  {Component::kMambaTemporal, {0}, {4}, 8192, DType::kBFloat16}}};

struct Lists {
  std::vector<std::vector<std::uint64_t>> pointers;
  std::vector<std::vector<std::uint32_t>> lengths, ids;
};
// What a decode rank of the reference registers for this layout.
Lists registered(const Layout& layout, bool with_ids) {
  Lists lists;
  for (const StateKind kind : kinds_of(layout)) {
    auto& pointers = lists.pointers.emplace_back();
    auto& lengths = lists.lengths.emplace_back();
    auto& ids = lists.ids.emplace_back();
    for (const StatePool& pool : state_pools(layout, kind)) {
      pointers.push_back(pool.base);
      lengths.push_back(static_cast<std::uint32_t>(pool.item_bytes));
      if (with_ids) ids.push_back(pool.layer);
    }
  }
  return lists;
}
Result<Layout> read_state(const Layout& own, const RankPlace& place, const Lists& lists,
                          std::uint32_t tp_rank, std::uint32_t tp_size) {
  Layout layout;
  const std::vector<StateKind> kinds = kinds_of(own);
  const Status status = add_state_from_lists(own, place, {.state_kinds = kinds},
                                             {.pointers = lists.pointers,
                                              .item_lengths = lists.lengths,
                                              .layer_ids = lists.ids,
                                              .tp_rank = tp_rank,
                                              .tp_size = tp_size},
                                             "decode D", layout);
  if (!status.ok()) return status;
  return layout;
}

TEST(Positional, StateOfAnyTensorCutIsReadAsItsOwnerLaidItOut) {
  for (const std::uint32_t p : {1U, 2U, 4U}) {
    for (const std::uint32_t d : {1U, 2U, 4U}) {
      const RankPlace place{.tp_rank = p - 1, .tp_size = p};
      const Layout own = layout_of_rank(kHybrid, place, 4, 8, 8);
      for (std::uint32_t rank = 0; rank < d; ++rank) {
        Layout target = layout_of_rank(kHybrid, {.tp_rank = rank, .tp_size = d}, 4, 8, 8);
        place_slabs(target, 1 << 16, 64);
        const auto read = read_state(own, place, registered(target, rank % 2 == 0), rank, d);
        ASSERT_TRUE(read.ok()) << read.status().to_string();
        std::vector<Slab> expected;
        for (Slab slab : target.slabs) {
          if (!state_of(slab.component)) continue;
          slab.item_count = kUnknownItemCount;
          expected.push_back(slab);
        }
        EXPECT_EQ(read->slabs, expected) << p << " to " << d << ", rank " << rank;
      }
    }
  }
}

TEST(Positional, T08StateOfAnotherLengthIsRefusedWithItsNameAndBothLengths) {
  const Layout own = layout_of_rank(kHybrid, {}, 4, 8, 8);
  Layout target = own;
  place_slabs(target, 1 << 16, 64);
  Lists lists = registered(target, true);
  ASSERT_EQ(lists.lengths[0][1], 32768U);
  lists.lengths[0][1] = 65536;  // 32-bit elements there
  const auto read = read_state(own, {}, lists, 0, 1);
  ASSERT_FALSE(read.ok());
  EXPECT_EQ(read.status().code(), Code::kRefused);
  for (const char* part :
       {"state mamba", "mamba-temporal of layer 0", "65536", "32768", "decode D"})
    EXPECT_NE(read.status().message().find(part), std::string::npos) << read.status().message();
}

TEST(Positional, StateThatTheListsCannotTellIsRefused) {
  const auto why = [](const Layout& own, const RankPlace& place, const Lists& lists,
                      std::uint32_t tp_size) {
    const auto read = read_state(own, place, lists, 0, tp_size);
    return read.ok() ? std::string("accepted") : read.status().message();
  };
  const Layout own = layout_of_rank(kHybrid, {}, 4, 8, 8);
  Lists lists = registered(own, false);
  lists.pointers[0].push_back(kPool);
  EXPECT_NE(why(own, {}, lists, 1).find("2 pools here and 3 on decode D: layer ids needed"),
            std::string::npos)
      << why(own, {}, lists, 1);
  EXPECT_NE(why(own, {}, {}, 1).find("decode D registered state of 0 kinds, this rank has 1"),
            std::string::npos);
  lists = registered(own, false);
  EXPECT_NE(why(own, {}, lists, 3).find("cannot be shared by the 3 ranks of decode D"),
            std::string::npos);
  lists.lengths[0].pop_back();
  EXPECT_NE(why(own, {}, lists, 1).find("1 item lengths for 2 pools"), std::string::npos);
  lists = registered(own, true);
  lists.ids[0][1] = 7;
  EXPECT_NE(why(own, {}, lists, 1).find("no pool number 1 of layer 0"), std::string::npos);

  Geometry minimax = kHybrid;
  minimax.states = {{Component::kMiniMaxIndexKey, {0}, {4}, 8, DType::kBFloat16}};
  const RankPlace half{.tp_rank = 0, .tp_size = 2};
  const Layout index = layout_of_rank(minimax, half, 4, 8, 8);
  EXPECT_NE(why(index, half, registered(index, true), 1).find("state minimax_index_k: needs"),
            std::string::npos);
  EXPECT_EQ(why(index, half, registered(index, true), 2), "accepted");

  // A length of 0: the peer has no such memory, and nothing is copied there.
  lists = registered(own, true);
  lists.lengths[0][0] = 0;
  const auto read = read_state(own, {}, lists, 0, 1);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->slabs.size(), 1U);
}

}  // namespace
}  // namespace kvferry::plan
