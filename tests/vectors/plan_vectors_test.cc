// The planner against what the reference copied.
#include <algorithm>

#include "src/plan/geometry.h"
#include "src/plan/planner.h"
#include "src/plan/positional.h"
#include "src/plan/ranks.h"
#include "src/wire/sglang_codec.h"
#include "tests/vectors/vectors.h"

namespace kvferry::vectors {
namespace {

using plan::Block;

// Calls are made by a pool of threads and blocks keep no order among lanes: what counts is which
// bytes go where.
std::vector<Block> blocks_of(const Json& calls) {
  std::vector<Block> blocks;
  for (const Json& call : calls) {
    for (const Json& block : call.is_object() ? call.at("blocks") : call)
      blocks.push_back({block.at(0), block.at(1), block.at(2)});
  }
  std::sort(blocks.begin(), blocks.end());
  return blocks;
}
std::vector<Block> sorted(std::vector<Block> blocks) {
  std::sort(blocks.begin(), blocks.end());
  return blocks;
}
std::string text(const std::vector<Block>& blocks) {
  std::string out;
  for (std::size_t i = 0; i < blocks.size() && i < 6; ++i)
    out += "[" + std::to_string(blocks[i].source) + "," + std::to_string(blocks[i].target) + "," +
           std::to_string(blocks[i].bytes) + "] ";
  return out + "(" + std::to_string(blocks.size()) + ")";
}

// An index list of ours: int32, not negative.
std::optional<std::vector<PageIndex>> pages_of(const Json& list) {
  std::vector<PageIndex> pages;
  for (const Json& item : list) {
    const std::int64_t value = item;
    if (value < 0 || value > 0x7FFFFFFF) return std::nullopt;
    pages.push_back(static_cast<PageIndex>(value));
  }
  return pages;
}

Slab slab_of(Component component, std::uint32_t layer, std::uint64_t base, std::uint64_t item,
             std::uint32_t page_tokens, plan::HeadRange heads) {
  Slab slab;
  slab.component = component;
  slab.layer = layer;
  slab.base = base;
  slab.item_count = plan::kUnknownItemCount;
  slab.item_bytes = slab.item_stride = item;
  slab.rows_per_item = page_tokens;
  slab.row_stride = item / page_tokens;
  slab.head_begin = heads.begin;
  slab.head_count = heads.count;
  slab.head_bytes = static_cast<std::uint32_t>(item / page_tokens / heads.count);
  slab.head_stride = slab.head_bytes;
  return slab;
}

TEST(Vector, GroupConcurrentContiguous) {
  each_case("group_concurrent_contiguous", [](const Json& in, const Json& expected) {
    const auto source = pages_of(in.at("src")), target = pages_of(in.at("dst"));
    if (!source || !target) return;  // never becomes a list of ours
    const auto runs = plan::make_runs(*source, *target);
    if (source->size() != target->size()) {
      EXPECT_FALSE(runs.ok());
      return;
    }
    ASSERT_TRUE(runs.ok());
    Json source_groups = Json::array(), target_groups = Json::array();
    for (const kvferry::Run& run : *runs) {
      Json s = Json::array(), t = Json::array();
      for (std::uint32_t i = 0; i < run.count; ++i)
        s.push_back(run.source_first + i), t.push_back(run.target_first + i);
      source_groups.push_back(s);
      target_groups.push_back(t);
    }
    EXPECT_EQ(source_groups, expected.at("src_groups"));
    EXPECT_EQ(target_groups, expected.at("dst_groups"));
  });
}

// The depth that the lists stand for where they alone leave it open (an uneven stage or a draft
// model): as the reference takes it, a draft model. Ours takes no such guess: it is told, or
// refuses.
plan::PositionalContext context_of(std::uint64_t start, std::size_t stage,
                                   std::size_t target_layers) {
  plan::PositionalContext context;
  context.total_kv_heads = 1;
  context.stage_begin = static_cast<std::uint32_t>(start);
  context.stage_layers = static_cast<std::uint32_t>(stage);
  if (stage > 0 && target_layers != stage && target_layers % stage != 0)
    context.model_layers = static_cast<std::uint32_t>(target_layers / stage * stage);
  return context;
}

TEST(Vector, MhaKvPtrsWithPp) {
  each_case("mha_kv_ptrs_with_pp", [](const Json& in, const Json& expected) {
    const std::size_t source = in.at("src_kv_ptrs").size(), target = in.at("dst_kv_ptrs").size();
    const std::int64_t start = in.at("prefill_start_layer");
    if (start < 0) return;  // a stage never begins below 0
    const std::size_t stage = source / 2;
    const bool sound = source > 0 && source % 2 == 0 && target % 2 == 0 && target > 0 &&
                       (target == source || static_cast<std::size_t>(start) + stage <= target / 2);
    plan::PositionalContext context =
        context_of(static_cast<std::uint64_t>(start), stage, target / 2);
    // Ambiguous lists without the model's depth are refused, never guessed.
    if (sound && context.model_layers != 0) {
      plan::PositionalContext open = context;
      open.model_layers = 0;
      EXPECT_FALSE(plan::pair_key_value(target, open).ok());
      // With the whole list as the model's depth (an uneven stage), V begins behind all of K.
      open.model_layers = static_cast<std::uint32_t>(target / 2);
      const auto uneven = plan::pair_key_value(target, open);
      ASSERT_TRUE(uneven.ok());
      EXPECT_EQ(uneven->value_begin, target / 2 + static_cast<std::size_t>(start));
    }
    const auto entries = plan::pair_key_value(target, context);
    if (!sound || (context.model_layers != 0 &&
                   static_cast<std::size_t>(start) + stage > context.model_layers)) {
      if (!sound) {
        EXPECT_FALSE(entries.ok());
      }
      return;
    }
    ASSERT_TRUE(entries.ok()) << entries.status().to_string();
    ASSERT_EQ(expected.at("layers"), stage);
    for (std::size_t i = 0; i < stage; ++i) {
      EXPECT_EQ(in["dst_kv_ptrs"][entries->key_begin + i], expected.at("dst_k").at(i));
      EXPECT_EQ(in["dst_kv_ptrs"][entries->value_begin + i], expected.at("dst_v").at(i));
    }
  });
}

TEST(Vector, SendKvcache) {
  each_case("send_kvcache", [](const Json& in, const Json& expected) {
    const auto source_pages = pages_of(in.at("prefill_kv_indices")),
               target_pages = pages_of(in.at("dst_kv_indices"));
    const auto from = in.at("kv_data_ptrs").get<std::vector<std::uint64_t>>(),
               to = in.at("dst_kv_ptrs").get<std::vector<std::uint64_t>>();
    const auto items = in.at("kv_item_lens").get<std::vector<std::uint64_t>>();
    const std::uint64_t start = in.at("prefill_start_layer");
    const bool latent = in.at("is_mla").get<bool>() || in.at("is_hybrid_mla").get<bool>();
    if (!source_pages || !target_pages) return;
    const auto runs = plan::make_runs(*source_pages, *target_pages);
    if (source_pages->size() != target_pages->size()) {
      EXPECT_FALSE(runs.ok());
      return;
    }
    ASSERT_TRUE(runs.ok());
    const bool has_items = items.size() >= from.size();
    if (!has_items) return;  // such a pool is no layout of ours
    Layout source, target;
    const std::size_t stage = latent ? from.size() : from.size() / 2;
    plan::PositionalContext context = context_of(start, stage, latent ? to.size() : to.size() / 2);
    context.attention.mla = latent;
    Status refused;
    if (latent) {
      if (to.size() != from.size() && start + stage > to.size())
        refused = Status(Code::kRefused, "too few pools");
      context.model_layers = 0;
      const plan::PositionalLists lists{.kv_pointers = to,
                                        .kv_item_lengths = std::span(items).first(1),
                                        .aux_pointers = {},
                                        .aux_item_lengths = {},
                                        .tp_rank = 0,
                                        .tp_size = 1};
      const auto layout = plan::layout_from_lists(context, lists);
      EXPECT_EQ(layout.ok(), refused.ok()) << layout.status().to_string();
      if (!layout.ok()) return;
      const std::size_t first = to.size() == from.size() ? 0 : start;
      for (std::uint32_t i = 0; i < stage; ++i) {
        const auto layer = static_cast<std::uint32_t>(start) + i;
        source.slabs.push_back(slab_of(Component::kLatent, layer, from[i], items[i], 1, {0, 1}));
        target.slabs.push_back(
            slab_of(Component::kLatent, layer, to[first + i], items[i], 1, {0, 1}));
        EXPECT_EQ(layout->slabs[i].base, to[first + i]);
      }
    } else {
      const auto entries = plan::pair_key_value(to.size(), context);
      const bool fits =
          from.size() == to.size() || (to.size() % 2 == 0 && start + stage <= to.size() / 2);
      if (!fits) {
        EXPECT_FALSE(entries.ok());
        return;
      }
      ASSERT_TRUE(entries.ok()) << entries.status().to_string();
      for (std::uint32_t i = 0; i < stage; ++i) {
        const auto layer = static_cast<std::uint32_t>(start) + i;
        source.slabs.push_back(slab_of(Component::kKey, layer, from[i], items[i], 1, {0, 1}));
        source.slabs.push_back(
            slab_of(Component::kValue, layer, from[stage + i], items[stage + i], 1, {0, 1}));
        target.slabs.push_back(
            slab_of(Component::kKey, layer, to[entries->key_begin + i], items[i], 1, {0, 1}));
        target.slabs.push_back(slab_of(Component::kValue, layer, to[entries->value_begin + i],
                                       items[stage + i], 1, {0, 1}));
      }
    }
    const auto lanes = plan::pair_lanes(source, target, "prefill", "decode");
    ASSERT_TRUE(lanes.ok()) << lanes.status().to_string();
    const auto ours = sorted(plan::expand({CopyGroup{lanes->kv.even, *runs}}));
    const auto theirs = blocks_of(expected.at("calls"));
    if (expected.value("ret", -1) == 0) {
      EXPECT_EQ(ours, theirs) << text(ours) << " against " << text(theirs);
    } else {
      // The engine failed on the way: what was asked for so far is part of the plan.
      EXPECT_TRUE(std::includes(ours.begin(), ours.end(), theirs.begin(), theirs.end()));
    }
  });
}

// Heads of both ranks as intervals of the model's heads: an oracle that uses no planner.
struct Overlap {
  std::int64_t source_head = 0, target_head = 0, count = 0;
};
Overlap overlap(std::int64_t heads, std::int64_t p, std::int64_t p_rank, std::int64_t d,
                std::int64_t d_rank) {
  const auto begin = [heads](std::int64_t size, std::int64_t rank) { return rank * heads / size; };
  const auto end = [&](std::int64_t size, std::int64_t rank) {
    return size > heads ? begin(size, rank) + 1 : begin(size, rank + 1);
  };
  const std::int64_t from = std::max(begin(p, p_rank), begin(d, d_rank)),
                     to = std::min(end(p, p_rank), end(d, d_rank));
  return {from - begin(p, p_rank), from - begin(d, d_rank), to - from};
}
bool serves(std::int64_t p, std::int64_t p_rank, std::int64_t d, std::int64_t d_rank) {
  return p >= d ? p_rank / (p / d) == d_rank : d_rank / (d / p) == p_rank;
}

TEST(Vector, ComputeHeadSliceParams) {
  each_case("compute_head_slice_params", [](const Json& in, const Json& expected) {
    const std::int64_t p = in.at("src_attn_tp_size"), d = in.at("dst_attn_tp_size"),
                       heads = in.at("total_kv_heads");
    if (p <= 0 || d <= 0 || heads <= 0 || (p % d != 0 && d % p != 0))
      return;  // refused when the ranks are mapped
    const std::int64_t p_rank = in.at("src_tp_rank").get<std::int64_t>() % p,
                       d_rank = in.at("dst_tp_rank").get<std::int64_t>() % d;
    if (!serves(p, p_rank, d, d_rank)) return;  // these two never meet
    const plan::HeadRange s =
        plan::heads_of_rank(static_cast<std::uint32_t>(heads), static_cast<std::uint32_t>(p),
                            static_cast<std::uint32_t>(p_rank));
    const plan::HeadRange t =
        plan::heads_of_rank(static_cast<std::uint32_t>(heads), static_cast<std::uint32_t>(d),
                            static_cast<std::uint32_t>(d_rank));
    const std::uint32_t from = std::max(s.begin, t.begin),
                        to = std::min(s.begin + s.count, t.begin + t.count);
    ASSERT_LT(from, to);
    const Json ours = {from - s.begin, to - from, from - t.begin, to - from};
    // With more decode ranks than heads the seeds copy the wrong head; later releases and we the
    // right one.
    const Json& theirs = expected.contains("correct") && !expected["correct"].is_null()
                             ? expected["correct"]
                             : expected.at("params");
    // Where heads and ranks do not divide, the reference divides down: heads get lost or are taken
    // twice.
    const auto divides = [heads](std::int64_t size) {
      return std::max(size, heads) % std::min(size, heads) == 0;
    };
    if (divides(p) && divides(d) && (d <= heads || expected.contains("correct"))) {
      EXPECT_EQ(ours, theirs);
    }
    const Overlap oracle = overlap(heads, p, p_rank, d, d_rank);
    EXPECT_EQ(ours, Json({oracle.source_head, oracle.count, oracle.target_head, oracle.count}));
  });
}

TEST(Vector, SendKvcacheSlice) {
  std::size_t compared = 0;
  each_case("send_kvcache_slice", [&compared](const Json& in, const Json& expected) {
    const std::int64_t p = in.at("attn_tp_size"), d = in.at("dst_attn_tp_size"),
                       page = in.at("page_size");
    if (p % d != 0 && d % p != 0) return;  // refused when the ranks are mapped
    const std::int64_t p_rank = in.at("engine_rank").get<std::int64_t>() % p,
                       d_rank = in.at("dst_tp_rank").get<std::int64_t>() % d;
    const auto heads = plan::resolve_total_kv_heads(
        in.at("total_kv_head_num"), in.at("kv_head_num"), static_cast<std::uint32_t>(p));
    ASSERT_TRUE(heads.ok());
    if (!serves(p, p_rank, d, d_rank)) return;
    const auto from = in.at("kv_data_ptrs").get<std::vector<std::uint64_t>>(),
               to = in.at("dst_kv_ptrs").get<std::vector<std::uint64_t>>();
    const auto items = in.at("kv_item_lens").get<std::vector<std::uint64_t>>();
    const std::int64_t target_item = in.at("dst_kv_item_len");
    const auto source_pages = pages_of(in.at("prefill_kv_indices")),
               target_pages = pages_of(in.at("dst_kv_indices"));
    if (!source_pages || !target_pages || target_item <= 0) return;  // no such number parses
    const std::size_t stage = from.size() / 2;
    plan::PositionalContext context =
        context_of(in.at("prefill_start_layer"), stage, to.size() / 2);
    context.page_tokens = static_cast<std::uint32_t>(page);
    context.total_kv_heads = *heads;
    const std::vector<std::uint64_t> lengths{static_cast<std::uint64_t>(target_item)};
    const plan::PositionalLists lists{.kv_pointers = to,
                                      .kv_item_lengths = lengths,
                                      .aux_pointers = {},
                                      .aux_item_lengths = {},
                                      .tp_rank = static_cast<std::uint32_t>(d_rank),
                                      .tp_size = static_cast<std::uint32_t>(d)};
    const auto target = plan::layout_from_lists(context, lists);
    const bool fits = from.size() == to.size() ||
                      (to.size() % 2 == 0 && context.stage_begin + stage <= to.size() / 2);
    const auto target_heads = plan::heads_of_rank(*heads, static_cast<std::uint32_t>(d),
                                                  static_cast<std::uint32_t>(d_rank));
    if (!fits || target_item % (page * target_heads.count) != 0) {
      EXPECT_FALSE(target.ok());
      return;
    }
    ASSERT_TRUE(target.ok()) << target.status().to_string();
    Layout source;
    source.page_tokens = context.page_tokens;
    const auto own = plan::heads_of_rank(*heads, static_cast<std::uint32_t>(p),
                                         static_cast<std::uint32_t>(p_rank));
    for (std::uint32_t i = 0; i < 2 * stage; ++i) {
      source.slabs.push_back(slab_of(i < stage ? Component::kKey : Component::kValue,
                                     context.stage_begin + i % static_cast<std::uint32_t>(stage),
                                     from[i], items[i], context.page_tokens, own));
    }
    const auto lanes = plan::pair_lanes(source, *target, "prefill", "decode");
    const Overlap heads_overlap = overlap(*heads, p, p_rank, d, d_rank);
    // Bytes per head must agree; the reference sees no such difference.
    const std::uint32_t target_head = target->slabs[0].head_bytes;
    const bool same = std::all_of(source.slabs.begin(), source.slabs.end(),
                                  [&](const Slab& s) { return s.head_bytes == target_head; });
    if (!same) {
      EXPECT_FALSE(lanes.ok());
      return;
    }
    ASSERT_TRUE(lanes.ok()) << lanes.status().to_string();
    // A destination shorter than the source is refused for the room; the reference truncates.
    const auto runs = plan::make_runs(*source_pages, *target_pages);
    EXPECT_EQ(runs.ok(), source_pages->size() == target_pages->size());
    if (!runs.ok()) return;
    // The oracle: every token slot of every page, by the rule for heads alone.
    std::vector<Block> oracle;
    const auto entries = plan::pair_key_value(to.size(), context);
    for (std::size_t i = 0; i < 2 * stage; ++i) {
      const std::size_t t = i < stage ? entries->key_begin + i : entries->value_begin + i - stage;
      for (std::size_t k = 0; k < source_pages->size(); ++k) {
        for (std::int64_t slot = 0; slot < page; ++slot) {
          oracle.push_back({from[i] + static_cast<std::uint64_t>((*source_pages)[k]) * items[i] +
                                static_cast<std::uint64_t>(slot) *
                                    (items[i] / static_cast<std::uint64_t>(page)) +
                                static_cast<std::uint64_t>(heads_overlap.source_head) * target_head,
                            to[t] +
                                static_cast<std::uint64_t>((*target_pages)[k] * target_item +
                                                           slot * (target_item / page)) +
                                static_cast<std::uint64_t>(heads_overlap.target_head) * target_head,
                            static_cast<std::uint64_t>(heads_overlap.count) * target_head});
        }
      }
    }
    // Ours may have merged slots that lie together: compare bytes.
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ours, wanted;
    const auto spread = [](const std::vector<Block>& blocks, auto& out) {
      for (const Block& b : blocks) {
        for (std::uint64_t i = 0; i < b.bytes; ++i) out.emplace_back(b.source + i, b.target + i);
      }
      std::sort(out.begin(), out.end());
    };
    spread(plan::expand({CopyGroup{lanes->kv.even, *runs}}), ours);
    spread(oracle, wanted);
    ASSERT_EQ(ours, wanted);
    if (static_cast<std::uint32_t>(d) <= *heads && expected.value("ret", -1) == 0) {
      std::vector<std::pair<std::uint64_t, std::uint64_t>> theirs;
      spread(blocks_of(expected.at("calls")), theirs);
      EXPECT_EQ(ours, theirs);
      ++compared;
    }
  });
  if (!IsSkipped()) {
    EXPECT_GT(compared, 0U) << "no case could be compared with the reference";
  }
}

TEST(Vector, SendAux) {
  each_case("send_aux", [](const Json& in, const Json& expected) {
    const bool over_control =
        in.at("send_aux_tcp").get<bool>() || in.at("custom_pool_type") == "NVLINK";
    const auto from = over_control ? std::vector<std::uint64_t>{}
                                   : in.at("aux_data_ptrs").get<std::vector<std::uint64_t>>(),
               to = in.at("dst_aux_ptrs").get<std::vector<std::uint64_t>>();
    const auto items = in.at("aux_item_lens").get<std::vector<std::uint64_t>>();
    const bool row_ok =
        in.at("dst_aux_index").is_number_integer() && in["dst_aux_index"].get<std::int64_t>() >= 0;
    if (!row_ok)
      return;  // such a room message is refused by the decoder (wire_transfer_info_decode)
    const auto row = in["dst_aux_index"].get<std::uint32_t>();
    const std::uint32_t own_row = in.at("prefill_aux_index");
    if (over_control) {
      const Json& messages = expected.at("messages");
      std::size_t number = 0;
      for (const Json& message : messages) {
        const Json& memory = in.at("aux_memory_hex").at(number);
        const std::string bytes =
            from_hex(memory.get<std::string>()).substr(own_row * items[number], items[number]);
        const auto frames =
            wire::encode_to_decode(wire::AuxData{RoomId{in.at("room").get<std::uint64_t>()},
                                                 static_cast<std::uint32_t>(number),
                                                 row,
                                                 bytes,
                                                 {}},
                                   wire::Dialect::kSeed);
        ASSERT_TRUE(frames.ok());
        EXPECT_EQ(frames_to_hex(*frames), message.is_object() ? message.at("frames") : message);
        ++number;
      }
      return;
    }
    Layout source;
    for (std::uint32_t i = 0; i < from.size(); ++i)
      source.slabs.push_back(slab_of(Component::kAux, i, from[i], items[i], 1, {0, 1}));
    const plan::PositionalLists lists{.kv_pointers = {},
                                      .kv_item_lengths = {},
                                      .aux_pointers = to,
                                      .aux_item_lengths = items,
                                      .tp_rank = 0,
                                      .tp_size = 1};
    const auto target = plan::layout_from_lists({}, lists);
    ASSERT_TRUE(target.ok());
    const auto lanes = plan::pair_lanes(source, *target, "prefill", "decode");
    ASSERT_TRUE(lanes.ok());
    const auto ours =
        sorted(plan::expand({CopyGroup{lanes->aux, {kvferry::Run{own_row, row, 1}}}}));
    // The common rows, never beyond: with more destination than source buffers the reference's
    // thread ends.
    EXPECT_EQ(ours.size(), std::min(from.size(), to.size()));
    if (!expected.contains("raises")) {
      EXPECT_EQ(ours, blocks_of(expected.at("calls")));
    }
  });
}

TEST(Vector, RankMapping) {
  each_case("rank_mapping", [](const Json& in, const Json& expected) {
    const Json& d = in.at("decode");
    const Json& p = in.at("prefill");
    const RankPlace decode{.tp_rank = d.at("engine_rank"),
                           .tp_size = d.at("attn_tp_size"),
                           .pp_rank = d.at("pp_rank"),
                           .pp_size = d.at("pp_size"),
                           .cp_rank = d.at("attn_cp_rank"),
                           .cp_size = d.at("attn_cp_size")};
    const plan::InstanceShape prefill{.tp_size = p.at("attn_tp_size"),
                                      .pp_size = p.at("pp_size"),
                                      .cp_size = p.at("attn_cp_size"),
                                      .dp_size = p.at("dp_size")};
    const bool all_cp =
        d.at("enable_all_cp_ranks").get<bool>() || p.at("enable_dsa_cache_layer_split").get<bool>();
    const auto map =
        plan::map_ranks(decode, {d.at("is_mla"), d.at("is_hybrid_mla")}, prefill, all_cp);
    const std::uint32_t large = std::max(decode.tp_size, prefill.tp_size),
                        small = std::min(decode.tp_size, prefill.tp_size);
    // No instance has zero stages or zero context-parallel ranks.
    const bool empty = prefill.pp_size == 0 || prefill.cp_size == 0 || prefill.dp_size == 0;
    if (expected.contains("raises") || empty || large % small != 0) {
      EXPECT_FALSE(map.ok());
      return;
    }
    ASSERT_TRUE(map.ok()) << map.status().to_string();
    EXPECT_EQ(Json(map->tp_ranks), expected.at("target_tp_ranks"));
    EXPECT_EQ(Json(map->cp_ranks), expected.at("target_cp_ranks"));
    EXPECT_EQ(Json(map->pp_ranks), expected.at("target_pp_ranks"));
    for (const std::uint32_t required : map->required_destinations)
      EXPECT_EQ(required, expected.at("required_dst_info_num"));
    EXPECT_EQ(map->required_responses, expected.at("required_prefill_response_num"));
    if (expected.at("target_tp_rank").is_number()) {
      EXPECT_EQ(map->tp_ranks.front(), expected["target_tp_rank"]);
    }
  });
}

TEST(Vector, ResolveTotalKvHeads) {
  each_case("resolve_total_kv_heads", [](const Json& in, const Json& expected) {
    const auto number = [&](const char* key) {
      return in.contains(key) && in[key].is_number() ? in[key].get<std::int64_t>() : 0;
    };
    const auto total = plan::resolve_total_kv_heads(number("total_kv_head_num"),
                                                    number("kv_head_num"), in.at("attn_tp_size"));
    EXPECT_EQ(total.ok(), !expected.contains("raises"));
    if (total.ok()) {
      EXPECT_EQ(*total, expected.at("total"));
    }
  });
}

}  // namespace
}  // namespace kvferry::vectors
