#include "src/plan/writers.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "src/plan/components.h"
#include "src/plan/planner.h"
#include "src/plan/proof.h"

namespace kvferry::plan {
namespace {

using Pool = std::tuple<Component, std::uint32_t>;  // and its layer

// Heads of a pool, in order and without overlap.
class HeadSet {
 public:
  [[nodiscard]] std::uint32_t common(HeadRange range) const {
    std::uint32_t count = 0;
    for (const HeadRange& have : ranges_) count += overlap(have, range).count;
    return count;
  }
  void add(HeadRange range) { ranges_.push_back(range); }  // nothing of it is there yet
  // The first head of `range` that is not there; its end if all are.
  [[nodiscard]] std::uint32_t first_missing(HeadRange range) const {
    std::uint32_t at = range.begin;
    for (bool moved = true; moved;) {
      moved = false;
      for (const HeadRange& have : ranges_) {
        if (have.begin <= at && at < have.begin + have.count) {
          at = have.begin + have.count;
          moved = true;
        }
      }
    }
    return std::min(at, range.begin + range.count);
  }
  static HeadRange overlap(HeadRange a, HeadRange b) {
    const std::uint32_t begin = std::max(a.begin, b.begin),
                        end = std::min(a.begin + a.count, b.begin + b.count);
    return begin < end ? HeadRange{begin, end - begin} : HeadRange{};
  }

 private:
  std::vector<HeadRange> ranges_;
};

HeadRange heads_of(const Slab& slab) {
  return {slab.head_begin, slab.head_count};
}

// Of one share: which sources write it.
Result<std::vector<bool>> elect_for(Shares share, std::span<const Party> sources,
                                    const Party& target, std::uint32_t model_layers) {
  std::multimap<Pool, HeadRange> promised;
  for (const Slab& slab : target.layout->slabs) {
    if (share_of(slab) == share) promised.emplace(Pool{slab.component, slab.layer}, heads_of(slab));
  }
  std::map<Pool, HeadSet> covered;
  std::vector<bool> writes;
  for (const Party& source : sources) {
    std::vector<std::pair<Pool, HeadRange>> own;
    std::uint64_t heads = 0, there = 0;
    for (const Slab& slab : source.layout->slabs) {
      const Pool pool{slab.component, slab.layer};
      const auto [begin, end] = promised.equal_range(pool);
      for (auto it = begin; it != end; ++it) {
        const HeadRange part = HeadSet::overlap(heads_of(slab), it->second);
        if (part.count == 0) continue;
        own.emplace_back(pool, part);
        heads += part.count;
        there += covered[pool].common(part);
      }
    }
    const bool writer = heads > there;
    if (writer && there > 0) {
      return Status(Code::kRefused,
                    fmt::format("{} holds {} heads of {}, {} of them are held by ranks before it "
                                "too: no rank alone can be chosen to write them",
                                source.name, heads, target.name, there));
    }
    if (writer) {
      for (const auto& [pool, part] : own) covered[pool].add(part);
    }
    writes.push_back(writer);
  }
  for (const auto& [pool, range] : promised) {
    const auto& [component, layer] = pool;
    const std::uint32_t missing = covered[pool].first_missing(range);
    if (missing == range.begin + range.count) continue;
    if (model_layers != 0 && layer >= model_layers && covered[pool].common(range) == 0) continue;
    return Status(
        Code::kRefused,
        fmt::format("{} waits for {} of layer {}, head {}, which none of {} prefill ranks "
                    "from {} to {} holds",
                    target.name, to_string(component), layer, missing, sources.size(),
                    sources.empty() ? "none" : sources.front().name,
                    sources.empty() ? "none" : sources.back().name));
  }
  return writes;
}

}  // namespace

Result<std::vector<Shares>> elect_writers(std::span<const Party> sources, const Party& target,
                                          std::uint32_t model_layers) {
  Shares wanted = 0;
  for (const Slab& slab : target.layout->slabs) wanted |= share_of(slab);
  std::vector<Shares> shares(sources.size(), 0);
  for (Shares share = 1; share != 0 && share <= wanted; share <<= 1) {
    if ((wanted & share) == 0) continue;
    const auto writes = elect_for(share, sources, target, model_layers);
    if (!writes.ok()) return writes.status();
    for (std::size_t i = 0; i < shares.size(); ++i) shares[i] |= writes->at(i) ? share : 0;
  }
  return shares;
}

Status prove_writers(std::span<const Party> sources, std::span<const Shares> shares,
                     const Party& target, std::uint32_t model_layers) {
  // One item of each list, or as many pages as both page sizes come out even with.
  const auto items_for = [](std::size_t pages) {
    RequestItems items;
    for (std::size_t i = 0; i < pages; ++i) items.pages.push_back(static_cast<PageIndex>(i));
    for (std::size_t k = 0; k < kStateKinds; ++k) {
      const StateRow& row = row_of(static_cast<StateKind>(k));
      items.states[k] = row.pairing == Pairing::kPages ? items.pages : std::vector<PageIndex>{0};
    }
    return items;
  };
  // All sources are ranks of one instance, which has one page size.
  const Parts parts =
      sources.empty() ? Parts{}
                      : parts_of(sources.front().layout->page_tokens, target.layout->page_tokens);
  const RequestItems source_items = items_for(parts.target), target_items = items_for(parts.source);
  std::vector<ProofRank> from;
  std::vector<Delivery> deliveries;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    from.push_back({sources[i].name, sources[i].layout, source_items});
    if (shares[i] == 0) continue;
    auto lanes = pair_lanes(*sources[i].layout, *target.layout, sources[i].name, target.name);
    if (!lanes.ok()) return lanes.status();
    Delivery delivery{i, 0, {}};
    if ((shares[i] & kKvShare) != 0)
      KVF_RETURN_IF_ERROR(plan_list(lanes->kv, {source_items.pages, 0}, {target_items.pages, 0}, 0,
                                    std::uint64_t{parts.source} * parts.target, delivery.plan));
    KVF_RETURN_IF_ERROR(plan_states(*lanes, shares[i], source_items.states, target_items.states,
                                    sources[i].name, target.name, delivery.plan));
    deliveries.push_back(std::move(delivery));
  }
  const std::vector<ProofRank> to{{target.name, target.layout, target_items}};
  const Proof proof = prove(from, to, deliveries, {.model_layers = model_layers});
  if (proof.proved) return {};
  return Status(Code::kRefused, "not proved: " + proof.problems.front());
}

Shares shares_for_reference(const RankPlace& place, AttentionKind attention, bool layer_split,
                            std::uint32_t target_tp_size) {
  Shares shares = kAllShares;
  if (place.cp_rank != 0 && !layer_split) shares &= kKvShare;
  const std::uint32_t group = target_tp_size == 0 ? 1 : place.tp_size / target_tp_size;
  if (!attention.hybrid_mla || group <= 1 || place.tp_rank % group == 0) return shares;
  shares &= ~kKvShare;
  for (std::size_t k = 0; k < kStateKinds; ++k) {
    const auto kind = static_cast<StateKind>(k);
    if (row_of(kind).sharding != Sharding::kBlocks) shares &= ~share_of(kind);
  }
  return shares;
}

}  // namespace kvferry::plan
