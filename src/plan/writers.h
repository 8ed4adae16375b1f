// Which of several ranks write a target's bytes, so that each byte has one writer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvferry/layout.h"
#include "kvferry/status.h"
#include "src/plan/planner.h"
#include "src/plan/ranks.h"

namespace kvferry::plan {

struct Party {
  std::string name;  // for messages
  const Layout* layout = nullptr;
};

// For each source, what it writes: the shares (planner.h) of which it holds something for the
// target that no source before it holds. Each share has its own election: the KV of a hybrid model
// may be the same on every rank and its state on none. kRefused, with names and values, when a
// source holds only in part what an earlier one holds too (its bytes would have two writers), and
// when no source holds what the target waits for. Layers from `model_layers` on are draft layers,
// which a source need not have; 0: there are none. Aux slabs have their own election and are passed
// over.
Result<std::vector<Shares>> elect_writers(std::span<const Party> sources, const Party& target,
                                          std::uint32_t model_layers);

// Whether the elected ranks together write each byte of the target once, from a byte that means the
// same: proof.h over the lanes of one item of each list. kRefused with the first problem.
Status prove_writers(std::span<const Party> sources, std::span<const Shares> shares,
                     const Party& target, std::uint32_t model_layers);

// What one of our prefill ranks writes to a rank of the reference, as the reference's own do: state
// only from the first CP rank, unless layers are split over them; of a hybrid with more prefill
// than decode ranks, what all ranks hold alike only from the first of each group.
Shares shares_for_reference(const RankPlace& place, AttentionKind attention, bool layer_split,
                            std::uint32_t target_tp_size);

}  // namespace kvferry::plan
