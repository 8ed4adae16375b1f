// The shape of a model's KV cache, and the layout of one rank that holds its part of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvferry/data_plane.h"
#include "kvferry/layout.h"
#include "kvferry/types.h"
#include "src/plan/ranks.h"

namespace kvferry::plan {

struct Geometry {
  std::string name;
  std::uint32_t layers = 1;
  AttentionKind attention;
  std::uint32_t kv_heads = 1;          // 1 for MLA
  std::uint32_t key_head_bytes = 0;    // of one head and token; for MLA the latent vector
  std::uint32_t value_head_bytes = 0;  // 0 for MLA
  DType dtype = DType::kBFloat16;
  std::vector<std::uint32_t> aux_bytes;  // size of one row of each aux buffer
  friend bool operator==(const Geometry&, const Geometry&) = default;
};

// Layers of stage `rank` of `size`: contiguous, the first stages take the remainder.
struct LayerRange {
  std::uint32_t begin = 0, count = 0;
  friend auto operator<=>(const LayerRange&, const LayerRange&) = default;
};
LayerRange layers_of_stage(std::uint32_t layers, std::uint32_t size, std::uint32_t rank);

// Slabs of the rank in token-major order, K of all layers, V of all layers, then aux. Bases are 0:
// the owner of the memory sets them. `pages` and `aux_rows` are item counts.
Layout layout_of_rank(const Geometry& geometry, const RankPlace& place, std::uint32_t page_tokens,
                      std::uint32_t pages, std::uint32_t aux_rows);

// Bytes of the layout when its slabs are laid one behind another at multiples of `align`, and the
// same layout with bases set so, from `base` on.
std::uint64_t place_slabs(Layout& layout, std::uint64_t base, std::uint64_t align);

// Pages from here on lie outside a KV pool of the layout; a rank without KV pools (a pipeline stage
// without layers) takes any.
std::uint32_t page_limit(const Layout& layout);

// What a data plane must be able to reach: every slab of the layout.
std::vector<Region> regions_of(const Layout& layout);

}  // namespace kvferry::plan
