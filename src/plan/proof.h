// Proves a plan for a whole pair of instances, byte by byte, without trusting the planner: it knows
// layouts and copies, not how the copies were found.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvferry/data_plane.h"
#include "kvferry/layout.h"
#include "kvferry/types.h"
#include "src/plan/planner.h"

namespace kvferry::plan {

// One rank and where it keeps the request. Sources and targets that take part agree on the
// tokens: lists of pages may end inside their last page, others are equally long.
struct ProofRank {
  std::string name;
  const Layout* layout = nullptr;
  RequestItems items;
};
struct Delivery {
  std::size_t source = 0, target = 0;  // by their numbers
  CopyPlan plan;                       // of KV and state; aux rows are not proved here
};
struct ProofOptions {
  // The same bytes may come from several sources that hold them alike (reference peers do so).
  bool replicas_allowed = false;
  // Layers from here on are draft layers: written whole or not at all. 0: there are none.
  std::uint32_t model_layers = 0;
};
struct Proof {
  bool proved = false;
  std::vector<std::string> problems;   // the first kProblemsMax, with names and values
  std::vector<std::string> redundant;  // pools that more than one source writes; allowed
  std::uint64_t promised_bytes = 0;    // of all targets
  std::uint64_t written_bytes = 0;     // by all deliveries
};
inline constexpr std::size_t kProblemsMax = 32;

// Every byte that a target's layout promises for its pages is written exactly once, from the byte
// of a source that means the same (component, layer, position, token, head), and nothing else is
// written.
Proof prove(std::span<const ProofRank> sources, std::span<const ProofRank> targets,
            std::span<const Delivery> deliveries, const ProofOptions& options = {});

}  // namespace kvferry::plan
