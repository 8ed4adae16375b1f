// The shape of a model's KV cache, and the layout of one rank that holds its part of it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvferry/data_plane.h"
#include "kvferry/layout.h"
#include "kvferry/types.h"
#include "src/plan/planner.h"
#include "src/plan/ranks.h"

namespace kvferry::plan {

// One component of state in the whole model.
struct StateGeometry {
  Component component{};
  std::vector<std::uint32_t> layers;  // that have it
  // Blocks of the sharded axis, one behind another; ranks share each of them evenly. Nothing: one
  // step that every rank holds.
  std::vector<std::uint32_t> blocks;
  std::uint32_t unit_bytes = 0;  // of one step along the axis in one row
  DType dtype = DType::kBFloat16;
  friend bool operator==(const StateGeometry&, const StateGeometry&) = default;
};

struct Geometry {
  std::string name = {};
  std::uint32_t layers = 1;
  AttentionKind attention = {};
  std::uint32_t kv_heads = 1;          // 1 for MLA
  std::uint32_t key_head_bytes = 0;    // of one head and token; for MLA the latent vector
  std::uint32_t value_head_bytes = 0;  // 0 for MLA
  DType dtype = DType::kBFloat16;
  std::vector<std::uint32_t> aux_bytes;       // size of one row of each aux buffer
  std::vector<std::uint32_t> kv_layers = {};  // layers with a KV cache, ascending; empty: all
  std::vector<StateGeometry> states = {};
  std::uint32_t sliding_window = 0;  // tokens; 0: no layer has one
  // Compressed MLA: of each layer how many tokens share a row of its pages, 0 for one without
  // pages. Where it is kIndexedRatio the pages have an index beside them, of `index_bytes` in a
  // row.
  std::vector<std::uint32_t> compression_ratios = {};
  std::uint32_t index_bytes = 0;
  friend bool operator==(const Geometry&, const Geometry&) = default;
};

// Layers of stage `rank` of `size`: contiguous, the first stages take the remainder.
struct LayerRange {
  std::uint32_t begin = 0, count = 0;
  friend auto operator<=>(const LayerRange&, const LayerRange&) = default;
};
LayerRange layers_of_stage(std::uint32_t layers, std::uint32_t size, std::uint32_t rank);

// Slabs of the rank in token-major order: K of all layers, V of all layers (of compressed MLA
// section after section, see positional.h), state, then aux. Bases
// are 0: the owner of the memory sets them. `pages` and `aux_rows` are item counts; state that is
// not kept in pages has as many items as there are aux rows.
Layout layout_of_rank(const Geometry& geometry, const RankPlace& place, std::uint32_t page_tokens,
                      std::uint32_t pages, std::uint32_t aux_rows);

// Bytes of the layout when its pools are laid one behind another at multiples of `align`, and the
// same layout with bases set so, from `base` on. Blocks of one state share their pool.
std::uint64_t place_slabs(Layout& layout, std::uint64_t base, std::uint64_t align);

// Pages from here on lie outside a KV pool of the layout; a rank without KV pools (a pipeline stage
// without layers) takes any.
std::uint32_t page_limit(const Layout& layout);

// The kinds of state that a layout has, in the order in which its slabs first name them: the order
// of a reference rank's lists.
std::vector<StateKind> kinds_of(const Layout& layout);
// The same of the whole model: a pipeline stage may have no layer of some kind.
std::vector<StateKind> kinds_of(const Geometry& geometry);
// kInvalidArgument unless `kinds` (of the model) holds all kinds of the layout, and none twice.
Status check_kinds(const Layout& layout, std::span<const StateKind> kinds);
// The engine's lists of one room, by kind. kInvalidArgument: a kind twice, or one that the layout
// has not, more than `items_max` items, an item outside its pools.
Result<StateLists> state_lists(const Layout& layout, std::span<const StateItems> states,
                               std::uint64_t items_max);

// One pool of state as the reference knows it: the slabs that share their items.
struct StatePool {
  Component component{};
  std::uint32_t layer = 0;
  std::uint64_t base = 0, item_bytes = 0;
  std::vector<Slab> blocks;  // in the order in which they lie in an item
};
// The pools of one kind, in the order of the slabs; nothing: of the KV cache.
std::vector<StatePool> state_pools(const Layout& layout, std::optional<StateKind> kind);

// What grants of one share lend items of; share 0: the aux rows. Slabs that lie beside each other
// in every item (K and V of a block, blocks of one state) become one, as grants name memory that
// does not overlap. The gaps between them are lent too.
std::vector<GrantSlab> grant_slabs(const Layout& layout, Shares share);

// What a data plane must be able to reach: every slab of the layout.
std::vector<Region> regions_of(const Layout& layout);

}  // namespace kvferry::plan
