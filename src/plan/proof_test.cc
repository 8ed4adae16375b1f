// Whole instance pairs: the planner's copies, the proof's verdict and a map of every byte agree.
#include "src/plan/proof.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "src/base/random.h"
#include "src/plan/components.h"
#include "src/plan/geometry.h"
#include "src/plan/instance_plan.h"
#include "src/plan/writers.h"

namespace kvferry::plan {
namespace {

constexpr std::uint64_t kBase = 0x7000'0000'0000;  // of every rank's memory; nothing is there
constexpr std::uint32_t kPoolPages = 9;

// How a rank lays its pools out.
enum class Style : std::uint8_t { kTokensHeads, kHeadsTokens, kPadded, kInterleaved, kOneRegion };
constexpr Style kStyles[] = {Style::kTokensHeads, Style::kHeadsTokens, Style::kPadded,
                             Style::kInterleaved, Style::kOneRegion};

struct Model {
  std::uint32_t heads = 1, layers = 1, page_tokens = 1, key_bytes = 1, value_bytes = 1;
  bool mla = false;
  // State: extents of a mamba convolution's blocks, a sliding window, an index cache. 0: none.
  std::vector<std::uint32_t> mamba_blocks;
  std::uint32_t sliding_bytes = 0, index_bytes = 0;
};

// What a request owns beside its pages: slabs as one kind of state has them, from `at` on.
void add_state(std::vector<Slab>& slabs, const Model& model, const RankPlace& place,
               std::uint32_t layer, HeadRange kv_heads, std::uint64_t& at) {
  const auto add = [&](Component component, HeadRange heads, std::uint32_t bytes,
                       std::uint32_t rows) -> Slab& {
    Slab slab;
    slab.component = component;
    slab.layer = layer;
    slab.base = at;
    slab.item_count = kPoolPages;
    slab.rows_per_item = rows;
    slab.head_begin = heads.begin;
    slab.head_count = heads.count;
    slab.head_bytes = bytes;
    slab.head_stride = bytes;
    slab.row_stride = std::uint64_t{bytes} * heads.count;
    slab.item_bytes = slab.item_stride = slab.row_stride * rows;
    return slabs.emplace_back(slab);
  };
  std::uint32_t before = 0;
  std::uint64_t offset = 0;
  std::vector<std::size_t> blocks;
  for (const std::uint32_t extent : model.mamba_blocks) {
    HeadRange part = heads_of_rank(extent, place.tp_size, place.tp_rank);
    part.begin += before;
    before += extent;
    blocks.push_back(slabs.size());
    Slab& slab = add(Component::kMambaConv, part, 2, 1);
    slab.base += offset;
    offset += slab.item_bytes;
  }
  for (const std::size_t i : blocks) slabs[i].item_stride = offset;
  at += offset * kPoolPages;
  if (model.sliding_bytes > 0) {
    const Slab& slab =
        add(Component::kSlidingKey, kv_heads, model.sliding_bytes, model.page_tokens);
    at += slab.item_stride * kPoolPages;
  }
  if (model.index_bytes > 0) {
    const Slab& slab = add(Component::kIndex, {0, 1}, model.index_bytes, model.page_tokens);
    at += slab.item_stride * kPoolPages;
  }
}

// The rank's memory: layers [begin, begin + count), then draft layers.
PlannedRank make_rank(std::string name, const Model& model, RankPlace place,
                      std::vector<std::uint32_t> layers, Style style, std::uint64_t& bytes) {
  PlannedRank rank{place, {}, std::move(name)};
  rank.layout.page_tokens = model.page_tokens;
  const HeadRange heads =
      model.mla ? HeadRange{0, 1} : heads_of_rank(model.heads, place.tp_size, place.tp_rank);
  for (const std::uint32_t layer : layers) {
    for (const bool value : {false, true}) {
      if (value && model.mla) continue;
      Slab slab;
      slab.component = model.mla ? Component::kLatent : value ? Component::kValue : Component::kKey;
      slab.layer = layer;
      slab.item_count = kPoolPages;
      slab.rows_per_item = model.page_tokens;
      slab.head_begin = heads.begin;
      slab.head_count = heads.count;
      slab.head_bytes = value ? model.value_bytes : model.key_bytes;
      const std::uint64_t gap = style == Style::kPadded ? 3 : 0;
      if (style == Style::kHeadsTokens) {
        slab.row_stride = slab.head_bytes;
        slab.head_stride = std::uint64_t{slab.head_bytes} * model.page_tokens;
        slab.item_bytes = slab.head_stride * heads.count;
      } else {
        slab.head_stride = slab.head_bytes + gap;
        slab.row_stride = slab.head_stride * heads.count + gap;
        slab.item_bytes = slab.row_stride * model.page_tokens;
      }
      slab.item_stride = slab.item_bytes + gap;
      rank.layout.slabs.push_back(slab);
    }
  }
  auto& slabs = rank.layout.slabs;
  std::uint64_t at = kBase;
  if (style == Style::kOneRegion || style == Style::kInterleaved) {
    // Pools of a block lie behind each other in every page: of one layer, or of all of them.
    const std::size_t block = style == Style::kOneRegion ? slabs.size() : (model.mla ? 1 : 2);
    for (std::size_t first = 0; first < slabs.size(); first += block) {
      std::uint64_t stride = 0;
      for (std::size_t i = first; i < first + block; ++i) {
        slabs[i].base = at + stride;
        stride += slabs[i].item_bytes;
      }
      for (std::size_t i = first; i < first + block; ++i) slabs[i].item_stride = stride;
      at += stride * kPoolPages;
    }
  } else {
    for (Slab& slab : slabs) {
      slab.base = at;
      at += slab.item_stride * kPoolPages + 5;
    }
  }
  for (const std::uint32_t layer : layers) add_state(slabs, model, place, layer, heads, at);
  bytes = at - kBase + 16;
  EXPECT_TRUE(validate(rank.layout).ok());
  return rank;
}

// Every byte of a rank's memory as a number that says what it means; 0 means nothing.
using ByteMap = std::vector<std::uint64_t>;
void for_cells(const Layout& layout, const RequestItems& items,
               const std::function<void(std::uint64_t, std::uint64_t)>& visit) {
  for (const Slab& slab : layout.slabs) {
    const auto kind = state_of(slab.component);
    const std::vector<PageIndex>& pages =
        kind ? items.states.at(static_cast<std::size_t>(*kind)) : items.pages;
    for (std::size_t k = 0; k < pages.size(); ++k) {
      for (std::uint32_t row = 0; row < slab.rows_per_item; ++row) {
        for (std::uint32_t head = 0; head < slab.head_count; ++head) {
          for (std::uint32_t byte = 0; byte < slab.head_bytes; ++byte) {
            const std::uint64_t meaning =
                (((((std::uint64_t{static_cast<std::uint8_t>(slab.component)} + 1) * 64 +
                    slab.layer) *
                       64 +
                   slab.head_begin + head) *
                      64 +
                  k) *
                     256 +
                 row) *
                    64 +
                byte;
            visit(slab.base - kBase + static_cast<std::uint64_t>(pages[k]) * slab.item_stride +
                      row * slab.row_stride + head * slab.head_stride + byte,
                  meaning);
          }
        }
      }
    }
  }
}

struct World {
  Model model;
  InstanceRules rules;
  std::vector<PlannedRank> sources, targets;
  std::vector<std::uint64_t> source_bytes, target_bytes;
  std::vector<RequestItems> source_items, target_items;
  std::uint32_t draft_layers = 0;

  [[nodiscard]] Proof proof(const std::vector<Delivery>& deliveries) const {
    std::vector<ProofRank> from, to;
    for (std::size_t i = 0; i < sources.size(); ++i)
      from.push_back({sources[i].name, &sources[i].layout, source_items[i]});
    for (std::size_t i = 0; i < targets.size(); ++i)
      to.push_back({targets[i].name, &targets[i].layout, target_items[i]});
    return prove(from, to, deliveries,
                 {.replicas_allowed = !rules.native, .model_layers = rules.model_layers});
  }

  // Does what the plan says with maps of bytes, and looks at every byte. Empty: all is right.
  [[nodiscard]] std::string oracle(const std::vector<Delivery>& deliveries) const {
    std::vector<ByteMap> memory;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      memory.emplace_back(source_bytes[i], 0);
      for_cells(sources[i].layout, source_items[i],
                [&](std::uint64_t at, std::uint64_t meaning) { memory[i][at] = meaning; });
    }
    for (std::size_t t = 0; t < targets.size(); ++t) {
      ByteMap got(target_bytes[t], 0);
      std::vector<std::uint8_t> times(target_bytes[t], 0);
      for (const Delivery& delivery : deliveries) {
        if (delivery.target != t) continue;
        for (const Block& block : expand(delivery.plan)) {
          const std::uint64_t from = block.source - kBase, to = block.target - kBase;
          for (std::uint64_t i = 0; i < block.bytes; ++i) {
            if (to + i >= got.size()) return "a byte outside the target's memory";
            const ByteMap& source = memory[delivery.source];
            got[to + i] = from + i < source.size() ? source[from + i] : 0;
            ++times[to + i];
          }
        }
      }
      std::string wrong;
      for_cells(targets[t].layout, target_items[t], [&](std::uint64_t at, std::uint64_t meaning) {
        const std::uint64_t layer = meaning / (64ULL * 256 * 64 * 64) % 64;
        const bool draft = rules.model_layers != 0 && layer >= rules.model_layers;
        if (draft && times[at] == 0) return;
        if (got[at] != meaning || times[at] == 0 || (times[at] > 1 && rules.native))
          wrong = fmt::format("byte {} of target {}: written {} times", at, t, times[at]);
        times[at] = 0;
      });
      if (!wrong.empty()) return wrong;
      if (std::any_of(times.begin(), times.end(), [](auto n) { return n != 0; }))
        return "a byte that nobody waits for";
    }
    return {};
  }
};

std::vector<PageIndex> random_pages(Random& random, std::uint32_t count) {
  std::vector<PageIndex> all(kPoolPages);
  std::iota(all.begin(), all.end(), 0);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (random.chance(40)) std::swap(all[i], all[random.between(i, kPoolPages - 1)]);
  }
  all.resize(count);
  return all;
}

// The pages of a request, one slot, and pages of its own for each paged state.
RequestItems random_items(Random& random, std::uint32_t pages, std::uint32_t state_pages) {
  RequestItems items{random_pages(random, pages), {}};
  for (std::size_t k = 0; k < kStateKinds; ++k) {
    items.states[k] = random_pages(
        random, row_of(static_cast<StateKind>(k)).pairing == Pairing::kOneEach ? 1 : state_pages);
  }
  return items;
}

// Stages of a pipeline: any cut of the layers, stages without layers included.
std::vector<std::vector<std::uint32_t>> random_stages(Random& random, std::uint32_t layers,
                                                      std::uint32_t stages) {
  std::vector<std::uint32_t> cuts{0, layers};
  for (std::uint32_t i = 1; i < stages; ++i)
    cuts.push_back(static_cast<std::uint32_t>(random.below(layers + 1)));
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::vector<std::uint32_t>> all;
  for (std::uint32_t i = 0; i < stages; ++i) {
    auto& stage = all.emplace_back(cuts[i + 1] - cuts[i]);
    std::iota(stage.begin(), stage.end(), cuts[i]);
  }
  return all;
}

World random_world(Random& random) {
  World w;
  const auto pick = [&](std::initializer_list<std::uint32_t> from) {
    return from.begin()[random.below(from.size())];
  };
  const auto up_to = [&](std::uint64_t most) {
    return static_cast<std::uint32_t>(random.between(1, most));
  };
  const std::uint32_t p_tp = random.chance(5) ? 16 : up_to(8),
                      d_tp = random.chance(5) ? 16 : up_to(8);
  w.model.mla = random.chance(20);
  w.model.heads = w.model.mla ? 1 : up_to(16);
  w.model.layers = up_to(10);
  w.model.page_tokens = random.chance(10) ? pick({16, 64, 128}) : pick({1, 2, 3});
  if (w.model.page_tokens >= 16) {
    w.model.layers = up_to(2);
    w.model.heads = std::min(w.model.heads, 4U);
  }
  w.model.key_bytes = up_to(3);
  w.model.value_bytes = random.chance(50) ? w.model.key_bytes : up_to(3);
  const std::uint32_t p_pp = random.chance(60) ? 1 : up_to(4),
                      d_pp = random.chance(70) ? 1 : up_to(3);
  const std::uint32_t cp = random.chance(75) ? 1 : up_to(4);
  w.draft_layers = random.chance(20) ? up_to(2) : 0;
  if (random.chance(25)) {  // blocks that need not divide by the ranks, but are no fewer
    for (std::uint32_t i = up_to(3); i > 0; --i)
      w.model.mamba_blocks.push_back(static_cast<std::uint32_t>(random.between(16, 20)));
  }
  if (random.chance(20)) w.model.sliding_bytes = up_to(3);
  if (random.chance(20)) w.model.index_bytes = up_to(3);
  w.rules = {.native = true,
             .attention = {.mla = w.model.mla, .hybrid_mla = false},
             .kv_heads = w.model.heads,
             .model_layers = w.draft_layers > 0 ? w.model.layers : 0,
             .all_cp_ranks = random.chance(50)};
  const auto count = up_to(6), state_count = up_to(4);
  const auto p_stages = random_stages(random, w.model.layers, p_pp);
  auto d_stages = random_stages(random, w.model.layers, d_pp);
  for (std::uint32_t i = 0; i < w.draft_layers; ++i) d_stages.back().push_back(w.model.layers + i);
  for (std::uint32_t c = 0; c < cp; ++c) {
    for (std::uint32_t tp = 0; tp < p_tp; ++tp) {
      for (std::uint32_t pp = 0; pp < p_pp; ++pp) {
        const RankPlace place{.tp_rank = tp,
                              .tp_size = p_tp,
                              .pp_rank = pp,
                              .pp_size = p_pp,
                              .cp_rank = c,
                              .cp_size = cp};
        std::uint64_t bytes = 0;
        w.sources.push_back(make_rank(fmt::format("prefill tp{} pp{} cp{}", tp, pp, c), w.model,
                                      place, p_stages[pp], kStyles[random.below(5)], bytes));
        w.source_bytes.push_back(bytes);
        w.source_items.push_back(random_items(random, count, state_count));
      }
    }
  }
  for (std::uint32_t tp = 0; tp < d_tp; ++tp) {
    for (std::uint32_t pp = 0; pp < d_pp; ++pp) {
      const RankPlace place{.tp_rank = tp, .tp_size = d_tp, .pp_rank = pp, .pp_size = d_pp};
      std::uint64_t bytes = 0;
      w.targets.push_back(make_rank(fmt::format("decode tp{} pp{}", tp, pp), w.model, place,
                                    d_stages[pp], kStyles[random.below(5)], bytes));
      w.target_bytes.push_back(bytes);
      w.target_items.push_back(random_items(random, count, state_count));
    }
  }
  return w;
}

// One defect, such as a planner could have.
void spoil(Random& random, std::vector<Delivery>& deliveries) {
  auto& delivery = deliveries[random.below(deliveries.size())];
  auto& group = delivery.plan[random.below(delivery.plan.size())];
  Lane& lane = group.lanes[random.below(group.lanes.size())];
  auto& run = group.runs[random.below(group.runs.size())];
  switch (random.below(9)) {
    case 0:
      return void(lane.source += random.between(1, 4));
    case 1:
      return void(lane.target += random.between(1, 4));
    case 2:
      if (lane.rows > 1) return void(--lane.rows);
      return void(lane.bytes += 1);
    case 3:
      return void(group.lanes.push_back(lane));
    case 4:
      return void(run.source_first += 1);
    case 5:
      return void(run.target_first += 1);
    case 6:
      return void(std::swap(group.lanes.front().target, group.lanes.back().target));
    case 7:
      if (group.lanes.size() > 1) return void(group.lanes.pop_back());
      delivery.plan.erase(delivery.plan.begin() + (&group - delivery.plan.data()));
      return;
    default:
      return void(deliveries.push_back(delivery));
  }
}

int cases() {
  const char* text = std::getenv("KVFERRY_PLAN_CASES");
  return text != nullptr ? std::atoi(text) : 5000;
}

TEST(Proof, PlansOfRandomInstancesAreProvedAndRightAndSpoiltOnesAreNot) {
  int proved = 0, caught = 0, harmless = 0, odd_sizes = 0;
  for (int seed = 0; seed < cases(); ++seed) {
    Random random(static_cast<std::uint64_t>(seed) + 1);
    const World w = random_world(random);
    const auto plan = plan_instances(w.sources, w.targets, w.rules);
    ASSERT_TRUE(plan.ok()) << "seed " << seed << ": " << plan.status().to_string();
    auto deliveries = deliveries_of(*plan, w.sources, w.rules, w.source_items, w.target_items);
    ASSERT_TRUE(deliveries.ok()) << "seed " << seed << ": " << deliveries.status().to_string();
    const std::uint32_t p = w.sources[0].place.tp_size, d = w.targets[0].place.tp_size;
    odd_sizes += std::max(p, d) % std::min(p, d) != 0 ? 1 : 0;
    Proof proof = w.proof(*deliveries);
    ASSERT_TRUE(proof.proved) << "seed " << seed << ": " << proof.problems.front();
    ASSERT_EQ(w.oracle(*deliveries), "") << "seed " << seed;
    EXPECT_EQ(proof.promised_bytes, proof.written_bytes) << "seed " << seed;
    ++proved;
    // The proof must not be one that says yes to everything.
    if (deliveries->empty()) continue;
    spoil(random, *deliveries);
    const bool right = w.oracle(*deliveries).empty();
    proof = w.proof(*deliveries);
    ASSERT_EQ(proof.proved, right)
        << "seed " << seed << ": " << (proof.problems.empty() ? "" : proof.problems.front())
        << w.oracle(*deliveries);
    (right ? harmless : caught) += 1;
  }
  EXPECT_GT(odd_sizes, cases() / 10) << "sizes that do not divide each other are hardly tested";
  EXPECT_GT(caught, cases() * 8 / 10) << harmless << " defects changed nothing";
}

}  // namespace
}  // namespace kvferry::plan
