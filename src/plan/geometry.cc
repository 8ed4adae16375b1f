#include "src/plan/geometry.h"

#include <algorithm>
#include <limits>

#include "src/plan/planner.h"

namespace kvferry::plan {

LayerRange layers_of_stage(std::uint32_t layers, std::uint32_t size, std::uint32_t rank) {
  const PagePart part = cp_part(layers, size, rank);
  return {static_cast<std::uint32_t>(part.begin),
          static_cast<std::uint32_t>(part.end - part.begin)};
}

Layout layout_of_rank(const Geometry& geometry, const RankPlace& place, std::uint32_t page_tokens,
                      std::uint32_t pages, std::uint32_t aux_rows) {
  Layout layout;
  layout.page_tokens = page_tokens;
  const LayerRange layers = layers_of_stage(geometry.layers, place.pp_size, place.pp_rank);
  const HeadRange heads = geometry.attention.mla
                              ? HeadRange{0, 1}
                              : heads_of_rank(geometry.kv_heads, place.tp_size, place.tp_rank);
  const auto add = [&](Component component, std::uint32_t layer, std::uint32_t head_bytes,
                       HeadRange range, std::uint32_t rows, std::uint32_t items, DType dtype) {
    Slab slab;
    slab.component = component;
    slab.layer = layer;
    slab.dtype = dtype;
    slab.item_count = items;
    slab.rows_per_item = rows;
    slab.head_begin = range.begin;
    slab.head_count = range.count;
    slab.head_bytes = head_bytes;
    slab.head_stride = head_bytes;
    slab.row_stride = std::uint64_t{head_bytes} * range.count;
    slab.item_bytes = slab.item_stride = slab.row_stride * rows;
    layout.slabs.push_back(slab);
  };
  for (std::uint32_t i = 0; i < layers.count; ++i) {
    add(geometry.attention.mla ? Component::kLatent : Component::kKey, layers.begin + i,
        geometry.key_head_bytes, heads, page_tokens, pages, geometry.dtype);
  }
  for (std::uint32_t i = 0; i < layers.count && !geometry.attention.mla; ++i) {
    add(Component::kValue, layers.begin + i, geometry.value_head_bytes, heads, page_tokens, pages,
        geometry.dtype);
  }
  for (std::uint32_t i = 0; i < geometry.aux_bytes.size() && aux_rows > 0; ++i) {
    add(Component::kAux, i, geometry.aux_bytes[i], {0, 1}, 1, aux_rows, DType::kUnknown);
  }
  return layout;
}

std::uint64_t place_slabs(Layout& layout, std::uint64_t base, std::uint64_t align) {
  std::uint64_t offset = 0;
  for (Slab& slab : layout.slabs) {
    slab.base = base + offset;
    const std::uint64_t bytes = slab.item_stride * slab.item_count;
    offset += (bytes + align - 1) / align * align;
  }
  return offset;
}

std::uint32_t page_limit(const Layout& layout) {
  std::uint32_t limit = std::numeric_limits<PageIndex>::max();
  for (const Slab& slab : layout.slabs) {
    if (slab.component != Component::kAux) limit = std::min(limit, slab.item_count);
  }
  return limit;
}

std::vector<Region> regions_of(const Layout& layout) {
  std::vector<Region> regions;
  for (const Slab& slab : layout.slabs)
    regions.push_back({slab.base, slab.item_stride * slab.item_count, slab.memory});
  return regions;
}

}  // namespace kvferry::plan
