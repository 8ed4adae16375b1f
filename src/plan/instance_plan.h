// Who sends what to whom between two whole instances, by the rules that their ranks follow one by
// one at run time: map_ranks, elect_writers, pair_lanes, cp_part, make_runs.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvferry/layout.h"
#include "kvferry/status.h"
#include "src/plan/planner.h"
#include "src/plan/proof.h"
#include "src/plan/ranks.h"

namespace kvferry::plan {

struct PlannedRank {
  RankPlace place;
  Layout layout;  // bases set, so that no two pools overlap
  std::string name;
};
struct InstanceRules {
  bool native = true;  // else as the reference's ranks do
  AttentionKind attention = {};
  std::uint32_t kv_heads = 0;
  std::uint32_t model_layers = 0;  // draft layers come from here on; 0: there are none
  bool all_cp_ranks = false;       // each CP rank sends its part of the pages; else the first alone
  std::uint32_t chunk_pages = 0;   // a request is sent in chunks of so many source pages; 0: in one
};
// One pair of ranks that speak with each other.
struct PlannedPair {
  std::size_t source = 0, target = 0;
  Shares writes = 0;  // what it was elected to write
  bool writes_aux = false;
  PairLanes lanes;  // of what it writes
  // Is only told that the room is over for it.
  [[nodiscard]] bool dummy() const { return writes == 0 && !writes_aux; }
};
struct InstancePlan {
  std::vector<PlannedPair> pairs;
  std::vector<std::uint32_t> responses;  // Successes that each target waits for
};
// Sources: one DP group, every rank of it. Refusals name the sizes or the ranks.
Result<InstancePlan> plan_instances(std::span<const PlannedRank> sources,
                                    std::span<const PlannedRank> targets,
                                    const InstanceRules& rules);

// The copies of one request, KV and state, by what each rank holds of it.
Result<std::vector<Delivery>> deliveries_of(const InstancePlan& plan,
                                            std::span<const PlannedRank> sources,
                                            std::span<const PlannedRank> targets,
                                            const InstanceRules& rules,
                                            std::span<const RequestItems> source_items,
                                            std::span<const RequestItems> target_items);

}  // namespace kvferry::plan
