#include "src/plan/instance_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/plan/writers.h"

namespace kvferry::plan {

Result<InstancePlan> plan_instances(std::span<const PlannedRank> sources,
                                    std::span<const PlannedRank> targets,
                                    const InstanceRules& rules) {
  if (sources.empty() || targets.empty())
    return Status(Code::kInvalidArgument, "an instance without ranks");
  const RankPlace& any = sources.front().place;
  const InstanceShape shape{any.tp_size, any.pp_size, any.cp_size, 1};
  const auto find = [&](std::uint32_t tp, std::uint32_t pp, std::uint32_t cp) {
    return static_cast<std::size_t>(std::find_if(sources.begin(), sources.end(),
                                                 [&](const PlannedRank& rank) {
                                                   return rank.place.tp_rank == tp &&
                                                          rank.place.pp_rank == pp &&
                                                          rank.place.cp_rank == cp;
                                                 }) -
                                    sources.begin());
  };
  InstancePlan plan;
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const PlannedRank& target = targets[t];
    const auto map = rules.native
                         ? map_native_ranks(target.place, rules.attention, rules.kv_heads, shape,
                                            rules.all_cp_ranks)
                         : map_ranks(target.place, rules.attention, shape, rules.all_cp_ranks);
    if (!map.ok()) return Status(map.status().code(), target.name + ": " + map.status().message());
    if (const std::uint32_t page = sources.front().layout.page_tokens;
        !rules.native && page != target.layout.page_tokens) {
      return Status(Code::kRefused, fmt::format("{} has pages of {} tokens, {} of {}; only native "
                                                "ranks can bring them together",
                                                sources.front().name, page, target.name,
                                                target.layout.page_tokens));
    }
    std::uint32_t writers = 0;
    for (const std::uint32_t cp : map->cp_ranks) {
      std::vector<std::size_t> contacted;
      std::vector<Party> parties;
      for (const std::uint32_t tp : map->tp_ranks) {
        for (const std::uint32_t pp : map->pp_ranks) {
          const std::size_t s = find(tp, pp, cp);
          if (s == sources.size()) {
            return Status(Code::kInvalidArgument,
                          fmt::format("prefill rank tp {} pp {} cp {} is missing", tp, pp, cp));
          }
          contacted.push_back(s);
          parties.push_back({sources[s].name, &sources[s].layout});
        }
      }
      std::vector<Shares> writes;
      if (rules.native) {
        auto elected = elect_writers(parties, {target.name, &target.layout}, rules.model_layers);
        if (!elected.ok()) return elected.status();
        writes = std::move(*elected);
        // The first CP rank sends all state.
        for (Shares& shares : writes) shares &= cp == map->cp_ranks.front() ? kAllShares : kKvShare;
      } else {
        for (const std::size_t s : contacted) {
          writes.push_back(!rules.attention.same_everywhere() ||
                                   sources[s].place.tp_rank == map->tp_ranks.front()
                               ? kAllShares
                               : 0);
        }
      }
      // Aux rows: one elected rank, or all of the reference's.
      const auto writes_aux = [&](const RankPlace& place) {
        return place.tp_rank == map->tp_ranks.front() && place.pp_rank == map->pp_ranks.back() &&
               cp == map->cp_ranks.front();
      };
      for (std::size_t i = 0; i < contacted.size(); ++i) {
        PlannedPair pair;
        pair.source = contacted[i];
        pair.target = t;
        pair.writes = writes[i];
        pair.writes_aux = rules.native ? writes_aux(sources[pair.source].place) : pair.writes != 0;
        if (!pair.dummy()) {
          auto lanes = pair_lanes(sources[pair.source].layout, target.layout,
                                  sources[pair.source].name, target.name);
          if (!lanes.ok()) return lanes.status();
          pair.lanes = std::move(*lanes);
          if (!pair.writes_aux) pair.lanes.aux.clear();
          if ((pair.writes & kKvShare) == 0) pair.lanes.kv.clear();
          for (std::size_t k = 0; k < kStateKinds; ++k) {
            if ((pair.writes & share_of(static_cast<StateKind>(k))) == 0)
              pair.lanes.states[k].clear();
          }
          ++writers;
        }
        plan.pairs.push_back(std::move(pair));
      }
    }
    plan.responses.push_back(rules.native ? writers : map->required_responses);
  }
  return plan;
}

Result<std::vector<Delivery>> deliveries_of(const InstancePlan& plan,
                                            std::span<const PlannedRank> sources,
                                            std::span<const PlannedRank> targets,
                                            const InstanceRules& rules,
                                            std::span<const RequestItems> source_items,
                                            std::span<const RequestItems> target_items) {
  std::vector<Delivery> deliveries;
  for (const PlannedPair& pair : plan.pairs) {
    if (pair.dummy()) continue;
    Delivery delivery{pair.source, pair.target, {}};
    const RankPlace& place = sources[pair.source].place;
    const RequestItems &own = source_items[pair.source], &theirs = target_items[pair.target];
    const Layout& layout = targets[pair.target].layout;
    ChunkCut cut{.parts = pair.lanes.kv.parts,
                 .source_pages = own.pages.size(),
                 .held = theirs.prefix_tokens / layout.page_tokens * pair.lanes.kv.parts.target,
                 .target_pages = theirs.pages.size(),
                 .exact = true,
                 .cp_size = rules.all_cp_ranks ? place.cp_size : 1,
                 .cp_rank = rules.all_cp_ranks ? place.cp_rank : 0};
    const std::uint64_t chunk = rules.chunk_pages == 0 ? own.pages.size() : rules.chunk_pages;
    for (; cut.first_page < cut.source_pages; cut.first_page += chunk) {
      cut.page_count = std::min(chunk, cut.source_pages - cut.first_page);
      const auto range = range_of(cut);
      if (!range) {
        return Status(
            Code::kInvalidArgument,
            fmt::format("{} pages of {} tokens on {} but {} of {} on {} behind {} tokens",
                        own.pages.size(), sources[pair.source].layout.page_tokens,
                        sources[pair.source].name, theirs.pages.size(), layout.page_tokens,
                        targets[pair.target].name, theirs.prefix_tokens));
      }
      const auto pages = std::span(own.pages).subspan(cut.first_page, cut.page_count);
      KVF_RETURN_IF_ERROR(plan_list(pair.lanes.kv, {pages, cut.first_page * cut.parts.source},
                                    {theirs.pages, cut.held}, range->begin, range->end,
                                    delivery.plan));
    }
    KVF_RETURN_IF_ERROR(plan_states(pair.lanes, pair.writes, own.states, theirs.states,
                                    sources[pair.source].name, targets[pair.target].name,
                                    delivery.plan));
    if (!delivery.plan.empty()) deliveries.push_back(std::move(delivery));
  }
  return deliveries;
}

}  // namespace kvferry::plan
