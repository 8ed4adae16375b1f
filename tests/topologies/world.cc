#include "tests/topologies/world.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include <fmt/format.h>

#include "kvferry/config.h"
#include "src/base/check.h"
#include "src/data/loopback/loopback_plane.h"
#include "src/plan/components.h"
#include "src/plan/geometry.h"

namespace kvferry::topologies {
namespace {

using plan::HeadRange;
using plan::kKvShare;
using plan::RequestItems;

constexpr std::uint8_t kCanary = 0xA5;
constexpr std::uint64_t kGuard = 512;  // bytes around the pools

// How a rank lays its pools out.
enum class Style : std::uint8_t { kTokensHeads, kHeadsTokens, kPadded, kInterleaved, kOneRegion };

struct Model {
  std::uint32_t heads = 1, layers = 1, key_bytes = 1, value_bytes = 1;
  bool mla = false;
  // Compressed MLA: so many tokens share a row of the pages of every second layer, which have an
  // index beside them. 1: not compressed.
  std::uint32_t ratio = 1;
  [[nodiscard]] bool compressed(std::uint32_t layer) const { return ratio > 1 && layer % 2 == 1; }
  // State: extents of a mamba convolution's blocks, a sliding window, an index cache. 0: none.
  std::vector<std::uint32_t> mamba_blocks;
  std::uint32_t sliding_bytes = 0, index_bytes = 0;
};

// What a request owns beside its pages: slabs as one kind of state has them, from `at` on.
void add_state(Layout& layout, const Model& model, const RankPlace& place, std::uint32_t layer,
               HeadRange kv_heads, std::uint32_t items, std::uint64_t& at) {
  const auto add = [&](Component component, HeadRange heads, std::uint32_t bytes,
                       std::uint32_t rows) -> Slab& {
    Slab slab;
    slab.component = component;
    slab.layer = layer;
    slab.base = at;
    slab.item_count = items;
    slab.rows_per_item = rows;
    slab.head_begin = heads.begin;
    slab.head_count = heads.count;
    slab.head_bytes = bytes;
    slab.head_stride = bytes;
    slab.row_stride = std::uint64_t{bytes} * heads.count;
    slab.item_bytes = slab.row_stride * rows;
    slab.item_stride = slab.item_bytes;
    return layout.slabs.emplace_back(slab);
  };
  std::uint32_t before = 0;
  std::uint64_t offset = 0;
  std::vector<std::size_t> blocks;
  for (const std::uint32_t extent : model.mamba_blocks) {
    HeadRange part = plan::heads_of_rank(extent, place.tp_size, place.tp_rank);
    part.begin += before;
    before += extent;
    blocks.push_back(layout.slabs.size());
    Slab& slab = add(Component::kMambaConv, part, 2, 1);
    slab.base += offset;
    offset += slab.item_bytes;
  }
  for (const std::size_t i : blocks) layout.slabs[i].item_stride = offset;
  at += offset * items;
  if (model.sliding_bytes > 0)
    at +=
        add(Component::kSlidingKey, kv_heads, model.sliding_bytes, layout.page_tokens).item_stride *
        items;
  if (model.index_bytes > 0)
    at += add(Component::kIndex, {0, 1}, model.index_bytes, layout.page_tokens).item_stride * items;
}

// The rank's memory: those layers, with pools of `items` pages or slots.
Rank make_rank(std::string name, const Model& model, RankPlace place,
               const std::vector<std::uint32_t>& layers, Style style, std::uint32_t page_tokens,
               std::uint32_t items) {
  Rank rank{{place, {}, std::move(name)}, {}, {}};
  Layout& layout = rank.planned.layout;
  layout.page_tokens = page_tokens;
  const HeadRange heads =
      model.mla ? HeadRange{0, 1} : plan::heads_of_rank(model.heads, place.tp_size, place.tp_rank);
  for (const std::uint32_t layer : layers) {
    for (const bool value : {false, true}) {
      const bool compressed = model.compressed(layer);
      if (value && model.mla && !compressed) continue;
      Slab slab;
      slab.component = !model.mla ? (value ? Component::kValue : Component::kKey)
                       : value    ? Component::kLatentIndex
                                  : Component::kLatent;
      slab.layer = layer;
      slab.item_count = items;
      slab.rows_per_item = compressed ? page_tokens / model.ratio : page_tokens;
      slab.head_begin = heads.begin;
      slab.head_count = heads.count;
      slab.head_bytes = value ? model.value_bytes : model.key_bytes;
      const std::uint64_t gap = style == Style::kPadded ? 3 : 0;
      if (style == Style::kHeadsTokens) {
        slab.row_stride = slab.head_bytes;
        slab.head_stride = std::uint64_t{slab.head_bytes} * slab.rows_per_item;
        slab.item_bytes = slab.head_stride * heads.count;
      } else {
        slab.head_stride = slab.head_bytes + gap;
        slab.row_stride = slab.head_stride * heads.count + gap;
        slab.item_bytes = slab.row_stride * slab.rows_per_item;
      }
      slab.item_stride = slab.item_bytes + gap;
      layout.slabs.push_back(slab);
    }
  }
  auto& slabs = layout.slabs;
  std::uint64_t at = kGuard;
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
      at += stride * items;
    }
  } else {
    for (Slab& slab : slabs) {
      slab.base = at;
      at += slab.item_stride * items + 5;
    }
  }
  for (const std::uint32_t layer : layers) add_state(layout, model, place, layer, heads, items, at);
  // A spoilt plan may read behind the end of a pool: one item more, at the most.
  std::uint64_t longest = 0;
  for (const Slab& slab : slabs) longest = std::max(longest, slab.item_stride);
  rank.memory.resize(at + longest + kGuard);
  for (Slab& slab : slabs) slab.base += reinterpret_cast<std::uint64_t>(rank.memory.data());
  KVF_CHECK(validate(layout).ok(), "a layout that a rank could have");
  return rank;
}

const std::vector<PageIndex>& list_of(const RequestItems& items, const Slab& slab) {
  const auto kind = state_of(slab.component);
  return kind ? items.states.at(static_cast<std::size_t>(*kind)) : items.pages;
}

// Every byte of the request on one rank: where it is, what it means (a number that is never 0),
// which token of its list it is of.
using Visit = std::function<void(std::uint64_t offset, std::uint64_t meaning, std::uint64_t token)>;
void for_cells(const Rank& rank, const Visit& visit) {
  const Layout& layout = rank.planned.layout;
  for (const Slab& slab : layout.slabs) {
    const std::vector<PageIndex>& pages = list_of(rank.items, slab);
    const bool cache = plan::share_of(slab) == kKvShare;
    const std::uint64_t before = cache ? rank.items.prefix_tokens : std::uint64_t{0},
                        row_tokens = cache ? layout.page_tokens / slab.rows_per_item : 1;
    for (std::size_t k = 0; k < pages.size(); ++k) {
      for (std::uint32_t row = 0; row < slab.rows_per_item; ++row) {
        const std::uint64_t token = before + (k * slab.rows_per_item + row) * row_tokens;
        for (std::uint32_t head = 0; head < slab.head_count; ++head) {
          for (std::uint32_t byte = 0; byte < slab.head_bytes; ++byte) {
            const std::uint64_t meaning =
                (((std::uint64_t{static_cast<std::uint8_t>(slab.component)} + 1) * 64 +
                  slab.layer) *
                     64 +
                 slab.head_begin + head) *
                    64 * 4096 +
                token * 64 + byte;
            visit(slab.base - reinterpret_cast<std::uint64_t>(rank.memory.data()) +
                      static_cast<std::uint64_t>(pages[k]) * slab.item_stride +
                      row * slab.row_stride + head * slab.head_stride + byte,
                  meaning, token);
          }
        }
      }
    }
  }
}
std::uint64_t layer_of(std::uint64_t meaning) {
  return meaning / (64ULL * 64 * 4096) % 64;
}
Component component_of(std::uint64_t meaning) {
  return static_cast<Component>(meaning / (64ULL * 64 * 64 * 4096) - 1);
}
// Never what the memory of a target held before.
std::uint8_t byte_for(std::uint64_t meaning) {
  const auto byte = static_cast<std::uint8_t>(Random(meaning).next64());
  return byte == kCanary ? std::uint8_t{0} : byte;
}

std::vector<PageIndex> random_pages(Random& random, std::uint32_t count, std::uint32_t pool) {
  std::vector<PageIndex> all(pool);
  std::iota(all.begin(), all.end(), 0);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (random.chance(40)) std::swap(all[i], all[random.between(i, pool - 1)]);
  }
  all.resize(count);
  return all;
}

std::uint32_t pages_for(std::uint64_t tokens, std::uint32_t page_tokens) {
  return static_cast<std::uint32_t>((tokens + page_tokens - 1) / page_tokens);
}

// Stages of a pipeline: any cut of the layers, stages without layers included.
std::vector<std::vector<std::uint32_t>> stages_of(const Choose& choose, std::uint32_t layers,
                                                  std::uint32_t stages) {
  std::vector<std::uint32_t> cuts{0, layers};
  for (std::uint32_t i = 1; i < stages; ++i)
    cuts.push_back(static_cast<std::uint32_t>(choose(0, layers)));
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::vector<std::uint32_t>> all;
  for (std::uint32_t i = 0; i < stages; ++i) {
    auto& stage = all.emplace_back(cuts[i + 1] - cuts[i]);
    std::iota(stage.begin(), stage.end(), cuts[i]);
  }
  return all;
}

std::vector<plan::PlannedRank> planned(const std::vector<Rank>& ranks) {
  std::vector<plan::PlannedRank> all;
  for (const Rank& rank : ranks) all.push_back(rank.planned);
  return all;
}

}  // namespace

World make_world(const Choose& choose, Random& random) {
  World w;
  const auto up_to = [&](std::uint64_t most) {
    return static_cast<std::uint32_t>(choose(1, most));
  };
  const auto chance = [&](std::uint64_t percent) { return choose(0, 99) >= 100 - percent; };
  const auto pick = [&](std::initializer_list<std::uint32_t> from) {
    return from.begin()[choose(0, from.size() - 1)];
  };
  Model model;
  const std::uint32_t p_tp = chance(5) ? 16 : up_to(8), d_tp = chance(5) ? 16 : up_to(8);
  model.mla = chance(20);
  model.heads = model.mla ? 1 : up_to(16);
  const bool large = chance(10);  // pages as people use them; else small ones that cost little
  const auto page_size = [&] { return large ? pick({16, 64, 128, 1}) : pick({1, 2, 3, 4, 6}); };
  const std::uint32_t p_page = page_size(), d_page = chance(40) ? page_size() : p_page;
  model.layers = large ? up_to(2) : up_to(10);
  if (large) model.heads = std::min(model.heads, 4U);
  model.key_bytes = up_to(3);
  model.value_bytes = chance(50) ? up_to(3) : model.key_bytes;
  const std::uint32_t p_pp = chance(40) ? up_to(4) : 1, d_pp = chance(30) ? up_to(3) : 1;
  const std::uint32_t cp = chance(25) ? up_to(4) : 1;
  const std::uint32_t draft_layers = chance(20) ? up_to(2) : 0;
  if (const std::uint32_t common = std::gcd(p_page, d_page);
      model.mla && common > 1 && chance(50)) {
    model.ratio = common % 4 == 0 ? 4 : common % 2 == 0 ? 2 : 3;
  }
  if (chance(25)) {  // blocks that need not divide by the ranks, but are no fewer
    for (std::uint32_t i = up_to(3); i > 0; --i)
      model.mamba_blocks.push_back(static_cast<std::uint32_t>(choose(16, 20)));
  }
  if (chance(20) && p_page == d_page) model.sliding_bytes = up_to(3);
  if (chance(20)) model.index_bytes = up_to(3);
  w.rules = {.native = true,
             .attention = {.mla = model.mla, .hybrid_mla = false},
             .kv_heads = model.heads,
             .model_layers = draft_layers > 0 ? model.layers : 0,
             .all_cp_ranks = chance(50),
             .chunk_pages = chance(50) ? up_to(4) : 0};
  const std::uint32_t longest = std::max(p_page, d_page);
  const std::uint64_t tokens = choose(1, longest * (large ? 2U : 6U)),
                      state_tokens = choose(1, longest * (large ? 1U : 4U));
  // A decode rank may have the beginning already, in whole pages of its own; all do alike.
  const std::uint64_t held = chance(40) ? choose(0, tokens / d_page) : 0;
  const auto items_of = [&](std::uint32_t page, std::uint64_t prefix_pages, std::uint32_t pool) {
    RequestItems items{random_pages(random, pages_for(tokens - prefix_pages * page, page), pool),
                       {},
                       prefix_pages * page};
    for (std::size_t k = 0; k < kStateKinds; ++k) {
      const auto pairing = plan::row_of(static_cast<StateKind>(k)).pairing;
      items.states[k] = random_pages(
          random, pairing == plan::Pairing::kOneEach ? 1 : pages_for(state_tokens, page), pool);
    }
    return items;
  };
  const auto pool_of = [&](std::uint32_t page) {
    return std::max(pages_for(tokens, page), pages_for(state_tokens, page)) + 3;
  };
  const auto style = [&] { return static_cast<Style>(random.below(5)); };
  const auto p_stages = stages_of(choose, model.layers, p_pp);
  auto d_stages = stages_of(choose, model.layers, d_pp);
  for (std::uint32_t i = 0; i < draft_layers; ++i) d_stages.back().push_back(model.layers + i);
  for (std::uint32_t c = 0; c < cp; ++c) {
    for (std::uint32_t tp = 0; tp < p_tp; ++tp) {
      for (std::uint32_t pp = 0; pp < p_pp; ++pp) {
        const RankPlace place{.tp_rank = tp,
                              .tp_size = p_tp,
                              .pp_rank = pp,
                              .pp_size = p_pp,
                              .cp_rank = c,
                              .cp_size = cp};
        w.sources.push_back(make_rank(fmt::format("prefill tp{} pp{} cp{}", tp, pp, c), model,
                                      place, p_stages[pp], style(), p_page, pool_of(p_page)));
        w.sources.back().items = items_of(p_page, 0, pool_of(p_page));
      }
    }
  }
  for (std::uint32_t tp = 0; tp < d_tp; ++tp) {
    for (std::uint32_t pp = 0; pp < d_pp; ++pp) {
      const RankPlace place{.tp_rank = tp, .tp_size = d_tp, .pp_rank = pp, .pp_size = d_pp};
      w.targets.push_back(make_rank(fmt::format("decode tp{} pp{}", tp, pp), model, place,
                                    d_stages[pp], style(), d_page, pool_of(d_page)));
      w.targets.back().items = items_of(d_page, held, pool_of(d_page));
    }
  }
  w.text = fmt::format(
      "prefill tp {} pp {} cp {} page {}, decode tp {} pp {} page {}, {} heads, {} layers, {} "
      "draft layers{}, {} tokens, {} of them held, {} tokens of state, chunks of {}",
      p_tp, p_pp, cp, p_page, d_tp, d_pp, d_page, model.heads, model.layers, draft_layers,
      w.rules.all_cp_ranks ? ", all cp ranks" : "", tokens, held * d_page, state_tokens,
      w.rules.chunk_pages);
  return w;
}

Result<std::vector<plan::Delivery>> World::plan() const {
  const auto from = planned(sources), to = planned(targets);
  const auto plan = plan::plan_instances(from, to, rules);
  if (!plan.ok()) return plan.status();
  std::vector<RequestItems> source_items, target_items;
  for (const Rank& rank : sources) source_items.push_back(rank.items);
  for (const Rank& rank : targets) target_items.push_back(rank.items);
  return plan::deliveries_of(*plan, from, to, rules, source_items, target_items);
}

plan::Proof World::prove(const std::vector<plan::Delivery>& deliveries) const {
  const auto parties = [](const std::vector<Rank>& ranks) {
    std::vector<plan::ProofRank> all;
    for (const Rank& rank : ranks)
      all.push_back({rank.planned.name, &rank.planned.layout, rank.items});
    return all;
  };
  return plan::prove(parties(sources), parties(targets), deliveries,
                     {.replicas_allowed = !rules.native, .model_layers = rules.model_layers});
}

bool World::waited_for(std::uint64_t meaning, std::uint64_t token, bool came) const {
  const bool draft = rules.model_layers != 0 && layer_of(meaning) >= rules.model_layers;
  if (draft && !came) return false;
  // A target's last page may go further than the sources' do.
  const Rank& any = sources.front();
  const auto kind = state_of(component_of(meaning));
  const std::size_t pages =
      kind ? any.items.states[static_cast<std::size_t>(*kind)].size() : any.items.pages.size();
  return kind && plan::row_of(*kind).pairing == plan::Pairing::kOneEach
             ? true
             : token < pages * any.planned.layout.page_tokens;
}

std::string World::follow(const std::vector<plan::Delivery>& deliveries) const {
  // What every byte of a rank means; 0: nothing.
  std::vector<std::vector<std::uint64_t>> meanings;
  for (const Rank& rank : sources) {
    auto& meaning = meanings.emplace_back(rank.memory.size(), 0);
    for_cells(rank,
              [&](std::uint64_t at, std::uint64_t what, std::uint64_t) { meaning[at] = what; });
  }
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const Rank& target = targets[t];
    std::vector<std::uint64_t> got(target.memory.size(), 0);
    std::vector<std::uint8_t> times(target.memory.size(), 0);
    const auto to_base = reinterpret_cast<std::uint64_t>(target.memory.data());
    for (const plan::Delivery& delivery : deliveries) {
      if (delivery.target != t) continue;
      const auto& source = meanings[delivery.source];
      const auto from_base =
          reinterpret_cast<std::uint64_t>(sources[delivery.source].memory.data());
      for (const plan::Block& block : plan::expand(delivery.plan)) {
        for (std::uint64_t i = 0; i < block.bytes; ++i) {
          const std::uint64_t from = block.source - from_base + i, to = block.target - to_base + i;
          if (to >= got.size()) return "a byte outside the target's memory";
          got[to] = from < source.size() ? source[from] : 0;
          ++times[to];
        }
      }
    }
    std::string wrong;
    for_cells(target, [&](std::uint64_t at, std::uint64_t meaning, std::uint64_t token) {
      if (!waited_for(meaning, token, times[at] != 0)) return;
      if (got[at] != meaning || times[at] == 0 || (times[at] > 1 && rules.native))
        wrong = fmt::format("byte {} of {}: written {} times", at, target.planned.name, times[at]);
      times[at] = 0;
    });
    if (!wrong.empty()) return wrong;
    if (std::any_of(times.begin(), times.end(), [](auto n) { return n != 0; }))
      return "a byte that nobody waits for";
  }
  return {};
}

std::string World::copy(const std::vector<plan::Delivery>& deliveries, bool right) {
  for (Rank& rank : sources) {
    std::fill(rank.memory.begin(), rank.memory.end(), static_cast<std::uint8_t>(~kCanary));
    for_cells(rank, [&](std::uint64_t at, std::uint64_t meaning, std::uint64_t) {
      rank.memory[at] = byte_for(meaning);
    });
  }
  const Settings settings;
  data::LoopbackFabric fabric;
  data::LoopbackPlane source(fabric, settings), target(fabric, settings);
  std::uint64_t next = 1;
  for (std::size_t t = 0; t < targets.size(); ++t) {
    Rank& rank = targets[t];
    std::fill(rank.memory.begin(), rank.memory.end(), kCanary);
    GrantSpec grant{.id = GrantId{t + 1}, .token = Token{1, t + 1}, .foreign = false, .groups = {}};
    std::vector<bool> lent(rank.memory.size(), false);
    const auto lend = [&](plan::Shares share, const std::vector<PageIndex>& items) {
      auto slabs = plan::grant_slabs(rank.planned.layout, share);
      for (const GrantSlab& slab : slabs) {
        for (const PageIndex item : items) {
          const auto begin =
              lent.begin() + static_cast<std::ptrdiff_t>(
                                 slab.base - reinterpret_cast<std::uint64_t>(rank.memory.data()) +
                                 static_cast<std::uint64_t>(item) * slab.item_stride);
          std::fill(begin, begin + static_cast<std::ptrdiff_t>(slab.item_bytes), true);
        }
      }
      grant.groups.push_back({std::make_shared<const std::vector<GrantSlab>>(std::move(slabs)),
                              {items.begin(), items.end()}});
    };
    lend(kKvShare, rank.items.pages);
    for (std::size_t k = 0; k < kStateKinds; ++k)
      lend(plan::share_of(static_cast<StateKind>(k)), rank.items.states[k]);
    if (const Status status = target.grant(std::move(grant)); !status.ok())
      return status.to_string();
    std::vector<Completion> ended;
    std::size_t writes = 0;
    for (const plan::Delivery& delivery : deliveries) {
      if (delivery.target != t || bytes_of(delivery.plan) == 0) continue;
      source.write({.id = WriteId{next++},
                    .to = target.address(),
                    .authority = {Token{1, t + 1}, false},
                    .flow = 1,
                    .plan = delivery.plan});
      ++writes;
    }
    for (int turns = 0; ended.size() < writes; ++turns) {
      if (turns > 100'000) return "the plane does not end its writes";
      source.poll(ended);
    }
    for (const Completion& completion : ended) {
      if (right && !completion.status.ok()) return completion.status.to_string();
    }
    if (right) {  // now only the request's own bytes may differ, and they must
      std::fill(lent.begin(), lent.end(), false);
      std::string wrong;
      for_cells(rank, [&](std::uint64_t at, std::uint64_t meaning, std::uint64_t token) {
        lent[at] = true;
        const std::uint8_t is = rank.memory[at];
        if (is != (waited_for(meaning, token, is != kCanary) ? byte_for(meaning) : kCanary) &&
            is != byte_for(meaning))
          wrong = fmt::format("byte {} of {} is wrong", at, rank.planned.name);
      });
      if (!wrong.empty()) return wrong;
    }
    for (std::size_t at = 0; at < lent.size(); ++at) {
      if (!lent[at] && rank.memory[at] != kCanary)
        return fmt::format("byte {} of {} was changed and is not the request's", at,
                           rank.planned.name);
    }
  }
  return {};
}

void spoil(Random& random, std::vector<plan::Delivery>& deliveries) {
  auto& delivery = deliveries[random.below(deliveries.size())];
  auto& group = delivery.plan[random.below(delivery.plan.size())];
  Lane& lane = group.lanes[random.below(group.lanes.size())];
  auto& run = group.runs[random.below(group.runs.size())];
  switch (random.below(10)) {
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
    case 8:
      if (group.runs.size() > 1) return void(group.runs.pop_back());
      return void(run.count += 1);
    default:
      return void(deliveries.push_back(delivery));
  }
}

}  // namespace kvferry::topologies
