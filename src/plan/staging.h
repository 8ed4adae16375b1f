// The packed form of a chunk: of each KV pool some heads, tokens in the order of the chunk's pages,
// pool after pool (K of all layers, V of all layers). What a prefill rank gathers its heads into,
// to write them in one piece, and what a decode rank scatters into its pools.
//
// It is a layout like any other, whose items are the pages of the chunk, counted from 0: gathering
// and scattering are pairs of layouts (pair_lanes), with the chunk's pages on one side and
// 0, 1, 2 ... on the other.
#pragma once

#include <cstdint>
#include <vector>

#include "kvferry/layout.h"
#include "src/plan/planner.h"

namespace kvferry::plan {

// The packed form of `heads` of all KV pools of `pools`, `pages` long, from `base` on. Whoever
// writes and whoever reads make it from their own pools; they agree where pair_lanes() does.
Layout staging_layout(const Layout& pools, HeadRange heads, std::uint32_t pages,
                      std::uint64_t base);

// Heads that each prefill rank packs for decode rank `target_rank`, in the order in which their
// parts lie behind each other in the decode rank's buffer. TP sizes divide each other (map_ranks
// refuses others). Ranks that hold the same heads (more ranks than heads) each have a part.
std::vector<HeadRange> staging_writers(std::uint32_t kv_heads, std::uint32_t source_tp,
                                       std::uint32_t target_tp, std::uint32_t target_rank);

}  // namespace kvferry::plan
