// State and context parallelism against what the reference copied. Where we refuse what it copied
// in part, or not at all, with success, the rule stands beside the case.
#include <algorithm>
#include <set>

#include "src/plan/components.h"
#include "src/plan/planner.h"
#include "src/plan/positional.h"
#include "src/plan/writers.h"
#include "tests/vectors/vectors.h"

namespace kvferry::vectors {
namespace {

using plan::Block;
using Numbers = std::vector<std::uint32_t>;

// Neighbours that the reference copies one by one are one block of ours.
std::vector<Block> melt(std::vector<Block> blocks) {
  std::sort(blocks.begin(), blocks.end());
  std::vector<Block> merged;
  for (const Block& b : blocks) {
    Block* last = merged.empty() ? nullptr : &merged.back();
    if (last != nullptr && last->source + last->bytes == b.source &&
        last->target + last->bytes == b.target) {
      last->bytes += b.bytes;
    } else {
      merged.push_back(b);
    }
  }
  return merged;
}
std::vector<Block> blocks_of(const Json& calls) {
  std::vector<Block> blocks;
  for (const Json& call : calls) {
    for (const Json& block : call.is_object() ? call.at("blocks") : call)
      blocks.push_back({block.at(0), block.at(1), block.at(2)});
  }
  return melt(std::move(blocks));
}

// A prefill rank, what it was registered with, and the lists of one room.
struct Pair {
  RankPlace place;
  plan::AttentionKind attention;
  plan::PositionalContext context;
  std::vector<StateKind> kinds;
  Layout layout;
  std::vector<std::vector<std::uint64_t>> pointers;
  std::vector<Numbers> lengths;
  std::uint32_t target_rank = 0, target_tp = 1;
  plan::StateLists source, target;

  // One component of the prefill rank, as its lists say: dims are what a mamba state is cut along.
  void add(StateKind kind, const std::vector<std::uint64_t>& bases, const Numbers& item_lengths,
           const Numbers& dims, std::uint32_t first_layer) {
    context.attention = attention;
    kinds.push_back(kind);
    const bool halves =  // all K, then all V
        kind == StateKind::kSlidingWindow && !attention.mla && !attention.hybrid_mla;
    const std::size_t half = halves ? (bases.size() + 1) / 2 : bases.size();
    for (std::size_t i = 0; i < bases.size(); ++i) {
      Slab slab;
      for (const plan::ComponentRow& row : plan::component_rows()) {
        if (row.kind != kind) continue;
        slab.component = row.component;  // the first, or of a second half the second one
        if (i < half) break;
      }
      slab.layer = first_layer + static_cast<std::uint32_t>(i % half);
      slab.base = bases[i];
      slab.item_count = plan::kUnknownItemCount;
      slab.item_bytes = slab.item_stride = slab.row_stride = item_lengths[i];
      slab.head_count = i < dims.size() ? dims[i] : 1;
      slab.head_begin = attention.mla ? 0 : place.tp_rank * slab.head_count;
      slab.head_bytes = item_lengths[i] / slab.head_count;
      slab.head_stride = slab.head_bytes;
      layout.slabs.push_back(slab);
    }
  }
  // The same of a compressed model: its layers [begin, end), section after section. False: the
  // lists are not those of such a stage.
  bool add_sections(std::optional<StateKind> kind, const Numbers& ratios, std::uint32_t begin,
                    std::uint32_t end, const std::vector<std::uint64_t>& bases,
                    const Numbers& item_lengths) {
    using enum Component;
    constexpr std::uint32_t kAny = 1;
    std::vector<std::pair<Component, std::uint32_t>> sections;
    if (!kind) {
      sections = {{kLatent, 4}, {kLatentIndex, 4}, {kLatent, 128}};
    } else if (*kind == StateKind::kSlidingWindow) {
      sections = {{kSlidingKey, kAny}, {kSlidingCompressed, 4}, {kSlidingCompressedIndex, 4}};
    } else if (*kind == StateKind::kSlidingRing) {
      sections = {{kSlidingRing, kAny}};
    } else if (*kind == StateKind::kCompressed) {
      sections = {{kCompressedState, 128}};
    }
    context.attention = attention;
    if (kind) kinds.push_back(*kind);
    context.stage_begin = begin;
    context.stage_layers = end - begin;
    context.compression_ratios = ratios;
    std::size_t i = 0;
    for (const auto& [component, ratio] : sections) {
      for (std::uint32_t layer = begin; layer < end && layer < ratios.size(); ++layer) {
        if (ratio != kAny && ratios[layer] != ratio) continue;
        if (i == bases.size()) return false;
        Slab slab;
        slab.component = component;
        slab.layer = layer;
        slab.base = bases[i];
        slab.item_count = plan::kUnknownItemCount;
        slab.item_bytes = slab.item_stride = slab.row_stride = item_lengths[i];
        slab.head_bytes = item_lengths[i];
        slab.head_stride = slab.head_bytes;
        layout.slabs.push_back(slab);
        ++i;
      }
    }
    return i == bases.size();
  }
  [[nodiscard]] Result<std::vector<Block>> copies() {
    Layout theirs;
    context.state_kinds = kinds;
    const plan::PositionalState lists{.pointers = pointers,
                                      .item_lengths = lengths,
                                      .layer_ids = {},
                                      .tp_rank = target_rank,
                                      .tp_size = target_tp};
    KVF_RETURN_IF_ERROR(
        plan::add_state_from_lists(layout, place, context, lists, "decode", theirs));
    const auto lanes = plan::pair_lanes(layout, theirs, "prefill", "decode");
    if (!lanes.ok()) return lanes.status();
    CopyPlan plan;
    KVF_RETURN_IF_ERROR(
        plan::plan_states(*lanes, plan::kAllShares, source, target, "prefill", "decode", plan));
    return melt(plan::expand(plan));
  }
};

void check_mamba(const Json& in, const Json& expected, const RankPlace& place,
                 std::uint32_t target_rank, std::uint32_t target_tp) {
  const auto bases = in.at("src_ptrs").get<std::vector<std::uint64_t>>();
  const auto item_lengths = in.at("src_item_lens").get<Numbers>();
  const auto dims = in.value("src_dims", Numbers{});
  Pair pair;
  pair.place = place;
  pair.target_rank = target_rank;
  pair.target_tp = target_tp;
  pair.pointers = {in.at("dst_ptrs").get<std::vector<std::uint64_t>>()};
  pair.lengths = {in.value("dst_item_lens", item_lengths)};
  pair.lengths[0].resize(pair.pointers[0].size(), 64);
  pair.source[0] = in.at("src_index").get<std::vector<PageIndex>>();
  pair.target[0] = in.at("dst_index").get<std::vector<PageIndex>>();
  // No layout of ours is like that: no pools, dims that are not known or 0, ranks beyond their TP
  // size.
  const bool cut = place.tp_size != target_tp;
  if (bases.empty() || (cut && dims.size() != bases.size()) ||
      std::find(dims.begin(), dims.end(), 0U) != dims.end() || place.tp_rank >= place.tp_size ||
      target_rank >= target_tp)
    return;
  pair.add(StateKind::kMamba, bases, item_lengths, dims, 0);
  const auto got = pair.copies();
  // The reference writes in front of the pool, leaves pools out, or shares what cannot be shared.
  const bool negative = !pair.target[0].empty() && pair.target[0][0] < 0;
  const bool fewer = pair.pointers[0].size() < bases.size();
  const bool uneven = cut && dims[0] * place.tp_size % target_tp != 0;
  if (expected.contains("raises") || negative || fewer || uneven) {
    EXPECT_FALSE(got.ok());
    return;
  }
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_EQ(*got, blocks_of(expected.at("calls")));
}

TEST(Vector, SendMambaState) {
  each_case("send_mamba_state",
            [](const Json& in, const Json& expected) { check_mamba(in, expected, {}, 0, 1); });
}

TEST(Vector, SendMambaStateSlice) {
  each_case("send_mamba_state_slice", [](const Json& in, const Json& expected) {
    check_mamba(in, expected, {.tp_rank = in.at("engine_rank"), .tp_size = in.at("attn_tp_size")},
                in.at("dst_tp_rank"), in.at("dst_attn_tp_size"));
  });
}

TEST(Vector, MaybeSendExtra) {
  int compared = 0;
  each_case("maybe_send_extra", [&](const Json& in, const Json& expected) {
    const Json &p = in.at("prefill"), &d = in.at("dst");
    const auto types = p.at("state_types").get<std::vector<std::string>>();
    // Two components of one kind have no form here.
    if (d.is_null() || std::set<std::string>(types.begin(), types.end()).size() != types.size())
      return;
    Numbers ratios;
    if (!p.at("mla_compression_ratios").is_null())
      ratios = p["mla_compression_ratios"].get<Numbers>();
    Pair pair;
    pair.place = {.tp_rank = in.at("engine_rank"),
                  .tp_size = in.at("attn_tp_size"),
                  .pp_rank = 0,
                  .pp_size = in.at("pp_size")};
    pair.attention = {in.at("is_mla"), in.at("is_hybrid_mla")};
    pair.target_rank = d.at("tp_rank");
    pair.target_tp = d.at("attn_tp_size");
    pair.pointers = d.at("state_data_ptrs").get<std::vector<std::vector<std::uint64_t>>>();
    pair.lengths = d.at("state_item_lens").get<std::vector<Numbers>>();
    bool refused = types.size() != pair.pointers.size();
    for (std::size_t i = 0; i < types.size(); ++i) {
      std::size_t k = 0;
      while (k < kStateKinds && to_string(static_cast<StateKind>(k)) != types[i]) ++k;
      ASSERT_LT(k, kStateKinds) << types[i];
      const auto kind = static_cast<StateKind>(k);
      const auto dims = p.at("state_dim_per_tensor").at(i).get<Numbers>();
      if (kind == StateKind::kMamba && pair.place.tp_size != pair.target_tp && dims.empty()) return;
      if (ratios.empty()) {
        pair.add(kind, p.at("state_data_ptrs").at(i), p.at("state_item_lens").at(i), dims,
                 p.at("prefill_start_layer"));
      } else if (!pair.add_sections(kind, ratios, p.at("prefill_start_layer"),
                                    p.at("prefill_end_layer"), p.at("state_data_ptrs").at(i),
                                    p.at("state_item_lens").at(i))) {
        refused = true;  // fewer or more pools than such a stage has
      }
      const auto list = [&](const char* name) {
        const Json& lists = in.at(name);
        return i < lists.size() && !lists.at(i).is_null()
                   ? lists.at(i).get<std::vector<PageIndex>>()
                   : std::vector<PageIndex>{};
      };
      pair.source[k] = list("prefill_state_indices");
      pair.target[k] = list("dst_state_indices");
      // Lists that differ by more than the page of a sampled token: the reference sends what both
      // have, or nothing, and says Success.
      refused =
          refused ||
          !plan::pair_items(kind, {}, pair.source[k].size(), pair.target[k].size(), "", "").ok();
    }
    ++compared;
    const auto got = pair.copies();
    if (expected.contains("raises") || refused) {
      EXPECT_FALSE(got.ok());
      return;
    }
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_EQ(*got, blocks_of(expected.at("calls")));
  });
  EXPECT_GE(compared, 49);
}

TEST(Vector, DsaSkipFlags) {
  each_case("dsa_skip_flags", [](const Json& in, const Json& expected) {
    if (in.at("dst_attn_tp_size").is_null()) return;  // not registered: nothing is sent at all
    const bool split = in.at("enable_dsa_cache_layer_split");
    const RankPlace place{.tp_rank = in.at("engine_rank"),
                          .tp_size = in.at("attn_tp_size"),
                          .pp_rank = 0,
                          .pp_size = 1,
                          .cp_rank = in.at("attn_cp_rank"),
                          .cp_size = in.at("attn_cp_size")};
    const plan::Shares shares = plan::shares_for_reference(place, {false, in.at("is_hybrid_mla")},
                                                           split, in.at("dst_attn_tp_size"));
    EXPECT_EQ((shares & plan::kKvShare) == 0, expected.at(0).get<bool>());
    // Other CP ranks than the first send no state unless layers are split over them (0.5.17 and
    // later); the seed says so of hybrids alone, and the rest of them write the same bytes twice.
    const bool other_cp = place.cp_rank != 0 && !split;
    EXPECT_EQ((shares & plan::share_of(StateKind::kSparseIndex)) == 0,
              other_cp || expected.at(1).get<bool>());
    // State that is cut over the ranks is sent by each of them (0.5.17 and later; the seed sends it
    // from the first of a group alone, and the rest of it from nowhere).
    EXPECT_EQ((shares & plan::share_of(StateKind::kMamba)) != 0, !other_cp);
  });
}

TEST(Vector, FilterKvIndicesForCpRank) {
  each_case("filter_kv_indices_for_cp_rank", [](const Json& in, const Json& expected) {
    const auto pages = in.at("kv_indices").get<std::vector<PageIndex>>();
    const std::uint64_t chunk_begin = in.at("slice").at(0), chunk_end = in.at("slice").at(1);
    const std::uint64_t total =
        in.at("total_pages").is_null() ? pages.size() : in.at("total_pages").get<std::uint64_t>();
    if (in.at("cp_size") == 1) {  // one rank sends all of every chunk
      EXPECT_EQ(in.at("kv_indices"), expected.at("kv_indices"));
      return;
    }
    const plan::PagePart part = plan::cp_part(total, in.at("cp_size"), in.at("cp_rank"));
    const std::uint64_t begin = std::max(chunk_begin, part.begin),
                        end = std::min(chunk_end, part.end);
    Json mine = Json::array();
    for (std::uint64_t i = begin; i < end && i - chunk_begin < pages.size(); ++i)
      mine.push_back(pages[i - chunk_begin]);
    EXPECT_EQ(mine, expected.at("kv_indices"));
    if (begin < end) {
      EXPECT_EQ(Json::array({begin, end}), expected.at("slice"));
    }
  });
}

// True: it was compared with the reference.
bool check_sections(const Json& in, const Json& expected) {
  const auto source = in.at("src_kv_ptrs").get<std::vector<std::uint64_t>>(),
             target = in.at("dst_kv_ptrs").get<std::vector<std::uint64_t>>();
  const auto ratios = in.at("mla_compression_ratios").get<Numbers>();
  if (in.at("prefill_end_layer").is_null()) return false;  // a stage of ours says where it ends
  std::optional<StateKind> kind;
  if (!in.at("state_type").is_null()) {
    std::size_t k = 0;
    while (to_string(static_cast<StateKind>(k)) != in["state_type"]) ++k;
    kind = static_cast<StateKind>(k);
    // Compressed models have no such components: their index lies in the KV pages.
    if (plan::sections_of(kind).empty()) return false;
  }
  Pair pair;
  pair.attention = {.mla = true, .hybrid_mla = false};
  const Numbers lengths(std::max(source.size(), target.size()), 64);
  // As many pools as such a stage has: else the reference fails in the middle of a transfer, or
  // leaves pools out.
  if (!pair.add_sections(kind, ratios, in.at("prefill_start_layer"), in.at("prefill_end_layer"),
                         source, lengths))
    return false;
  Layout theirs;
  Status status;
  pair.context.state_kinds = pair.kinds;
  const std::uint64_t length = 64;
  if (!kind) {
    const auto layout = plan::layout_of_peer(
        pair.layout, pair.place, pair.context,
        {.kv_pointers = target, .kv_item_lengths = {&length, 1}}, {}, "decode");
    status = layout.status();
    if (layout.ok()) theirs = *layout;
  } else if (!source.empty()) {
    const std::vector<std::vector<std::uint64_t>> pointers{target};
    const std::vector<Numbers> item_lengths{Numbers(target.size(), 64)};
    status = plan::add_state_from_lists(pair.layout, pair.place, pair.context,
                                        {.pointers = pointers, .item_lengths = item_lengths},
                                        "decode", theirs);
  }
  // The reference checks no such length of rings and c128 rows, and takes a prefix of the list.
  const std::size_t c4 = static_cast<std::size_t>(std::count(ratios.begin(), ratios.end(), 4U)),
                    c128 = static_cast<std::size_t>(std::count(ratios.begin(), ratios.end(), 128U));
  const std::size_t whole = !kind                                ? 2 * c4 + c128
                            : *kind == StateKind::kSlidingWindow ? ratios.size() + 2 * c4
                            : *kind == StateKind::kSlidingRing   ? ratios.size()
                                                                 : c128;
  const bool fits = target.size() == whole || target.size() == source.size();
  if (!fits && !source.empty()) {
    EXPECT_FALSE(status.ok());
    return false;
  }
  EXPECT_TRUE(status.ok()) << status.to_string();
  std::vector<std::uint64_t> got;
  for (const Slab& slab : theirs.slabs) got.push_back(slab.base);
  EXPECT_EQ(Json(got), expected.value("dst", Json::array()));
  return true;
}

TEST(Vector, MlaKvPtrsWithPp) {
  int plain = 0, sections = 0;
  each_case("mla_kv_ptrs_with_pp", [&](const Json& in, const Json& expected) {
    if (!in.at("mla_compression_ratios").is_null()) {
      sections += check_sections(in, expected) ? 1 : 0;
      return;
    }
    ++plain;
    const auto source = in.at("src_kv_ptrs").get<std::vector<std::uint64_t>>(),
               target = in.at("dst_kv_ptrs").get<std::vector<std::uint64_t>>();
    const std::uint64_t length = 64;
    const auto layout =
        plan::layout_from_lists({.attention = {.mla = true, .hybrid_mla = false},
                                 .page_tokens = 1,
                                 .stage_begin = in.at("prefill_start_layer"),
                                 .stage_layers = static_cast<std::uint32_t>(source.size())},
                                {.kv_pointers = target, .kv_item_lengths = {&length, 1}});
    const auto wanted = expected.contains("dst")
                            ? expected.at("dst").get<std::vector<std::uint64_t>>()
                            : std::vector<std::uint64_t>{};
    // A list that ends before the stage does: the reference fails in the middle of a transfer.
    if (wanted.size() < source.size()) {
      EXPECT_FALSE(layout.ok());
      return;
    }
    ASSERT_TRUE(layout.ok()) << layout.status().to_string();
    std::vector<std::uint64_t> got;
    for (const Slab& slab : layout->slabs) got.push_back(slab.base);
    EXPECT_EQ(got, wanted);
  });
  EXPECT_GE(plain, 13);
  EXPECT_GE(sections, 150);
}

}  // namespace
}  // namespace kvferry::vectors
