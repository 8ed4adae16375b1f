#include "src/plan/geometry.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "src/plan/components.h"
#include "src/plan/planner.h"

namespace kvferry::plan {

LayerRange layers_of_stage(std::uint32_t layers, std::uint32_t size, std::uint32_t rank) {
  const PagePart part = cp_part(layers, size, rank);
  return {static_cast<std::uint32_t>(part.begin),
          static_cast<std::uint32_t>(part.end - part.begin)};
}

namespace {

// Slabs of a rank, as they are made.
class Builder {
 public:
  Builder(std::uint32_t page_tokens, std::uint32_t pages) : pages_(pages) {
    layout_.page_tokens = page_tokens;
  }
  // Token-major, of `rows` tokens in each of `items`.
  Slab& add(Component component, std::uint32_t layer, std::uint32_t head_bytes, HeadRange range,
            std::uint32_t rows, std::uint32_t items, DType dtype) {
    Slab& slab = layout_.slabs.emplace_back();
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
    return slab;
  }
  void add_paged(Component component, std::uint32_t layer, std::uint32_t head_bytes,
                 HeadRange range, DType dtype) {
    add(component, layer, head_bytes, range, layout_.page_tokens, pages_, dtype);
  }
  // The rank's part of each block; the blocks of an item lie behind each other in one pool.
  void add_blocks(const StateGeometry& state, std::uint32_t layer, const RankPlace& place,
                  std::uint32_t items) {
    std::vector<HeadRange> parts;
    std::uint32_t before = 0, count = 0;
    for (const std::uint32_t block : state.blocks) {
      HeadRange part = heads_of_rank(block, place.tp_size, place.tp_rank);
      part.begin += before;
      before += block;
      count += part.count;
      if (part.count > 0) parts.push_back(part);
    }
    if (state.blocks.empty()) parts.push_back({0, 1}), count = 1;
    std::uint64_t offset = 0;
    for (const HeadRange& part : parts) {
      Slab& slab = add(state.component, layer, state.unit_bytes, part, 1, items, state.dtype);
      slab.base = offset;
      slab.item_stride = std::uint64_t{state.unit_bytes} * count;
      offset += slab.item_bytes;
    }
  }
  Layout take() { return std::move(layout_); }

 private:
  Layout layout_;
  const std::uint32_t pages_;
};

}  // namespace

Layout layout_of_rank(const Geometry& geometry, const RankPlace& place, std::uint32_t page_tokens,
                      std::uint32_t pages, std::uint32_t aux_rows) {
  Builder builder(page_tokens, pages);
  const LayerRange stage = layers_of_stage(geometry.layers, place.pp_size, place.pp_rank);
  const auto here = [&](std::uint32_t layer) {
    return layer >= stage.begin && layer < stage.begin + stage.count;
  };
  std::vector<std::uint32_t> layers;
  for (std::uint32_t i = 0; geometry.compression_ratios.empty() && i < geometry.layers; ++i) {
    const bool cached = geometry.kv_layers.empty() ||
                        std::find(geometry.kv_layers.begin(), geometry.kv_layers.end(), i) !=
                            geometry.kv_layers.end();
    if (cached && here(i)) layers.push_back(i);
  }
  const auto& ratios = geometry.compression_ratios;
  for (const Section& section : sections_of({})) {
    const bool index = section.component == Component::kLatentIndex;
    for (std::uint32_t layer = 0; layer < ratios.size(); ++layer) {
      if (!here(layer) || ratios[layer] != section.ratio) continue;
      builder.add(section.component, layer, index ? geometry.index_bytes : geometry.key_head_bytes,
                  {0, 1}, page_tokens / ratios[layer], pages, geometry.dtype);
    }
  }
  const HeadRange heads = geometry.attention.mla
                              ? HeadRange{0, 1}
                              : heads_of_rank(geometry.kv_heads, place.tp_size, place.tp_rank);
  for (const std::uint32_t layer : layers) {
    builder.add_paged(geometry.attention.mla ? Component::kLatent : Component::kKey, layer,
                      geometry.key_head_bytes, heads, geometry.dtype);
  }
  for (const std::uint32_t layer : layers) {
    if (!geometry.attention.mla)
      builder.add_paged(Component::kValue, layer, geometry.value_head_bytes, heads, geometry.dtype);
  }
  for (const StateGeometry& state : geometry.states) {
    const StateRow& row = row_of(*state_of(state.component));
    for (const std::uint32_t layer : state.layers) {
      if (!here(layer)) continue;
      if (row.pairing != Pairing::kPages) {
        builder.add_blocks(state, layer, place, std::max(aux_rows, 1U));
      } else {
        builder.add_paged(state.component, layer, state.unit_bytes,
                          state.blocks.empty()
                              ? HeadRange{0, 1}
                              : heads_of_rank(state.blocks.front(), place.tp_size, place.tp_rank),
                          state.dtype);
      }
    }
  }
  for (std::uint32_t i = 0; i < geometry.aux_bytes.size() && aux_rows > 0; ++i) {
    builder.add(Component::kAux, i, geometry.aux_bytes[i], {0, 1}, 1, aux_rows, DType::kUnknown);
  }
  return builder.take();
}

std::uint64_t place_slabs(Layout& layout, std::uint64_t base, std::uint64_t align) {
  std::uint64_t at = base, end = base;
  for (std::size_t i = 0; i < layout.slabs.size(); ++i) {
    Slab& slab = layout.slabs[i];
    const Slab* before = i > 0 ? &layout.slabs[i - 1] : nullptr;
    const bool shares_pool = before != nullptr && slab.component == before->component &&
                             slab.layer == before->layer && slab.item_stride == before->item_stride;
    if (shares_pool) {
      slab.base = before->base + before->item_bytes;
      continue;
    }
    slab.base = at = end;
    end = at + (slab.item_stride * slab.item_count + align - 1) / align * align;
  }
  return end - base;
}

namespace {

std::uint32_t limit_of(const Layout& layout, std::optional<StateKind> kind) {
  std::uint32_t limit = std::numeric_limits<PageIndex>::max();
  for (const Slab& slab : layout.slabs) {
    if (slab.component != Component::kAux && state_of(slab.component) == kind)
      limit = std::min(limit, slab.item_count);
  }
  return limit;
}

}  // namespace

std::uint32_t page_limit(const Layout& layout) {
  return limit_of(layout, {});
}

std::vector<StateKind> kinds_of(const Layout& layout) {
  std::vector<StateKind> kinds;
  for (const Slab& slab : layout.slabs) {
    const auto kind = state_of(slab.component);
    if (kind && std::find(kinds.begin(), kinds.end(), *kind) == kinds.end()) kinds.push_back(*kind);
  }
  return kinds;
}

std::vector<StateKind> kinds_of(const Geometry& geometry) {
  std::vector<StateKind> kinds;
  for (const StateGeometry& state : geometry.states) {
    const StateKind kind = *state_of(state.component);
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  return kinds;
}

Status check_kinds(const Layout& layout, std::span<const StateKind> kinds) {
  const auto bad = [](StateKind kind, std::string_view what) {
    return Status(Code::kInvalidArgument, fmt::format("state kinds: {} {}", to_string(kind), what));
  };
  for (auto it = kinds.begin(); it != kinds.end(); ++it) {
    if (std::find(kinds.begin(), it, *it) != it) return bad(*it, "is there twice");
  }
  for (const StateKind kind : kinds_of(layout)) {
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end())
      return bad(kind, "is missing, of which the layout has pools");
  }
  return {};
}

Result<StateLists> state_lists(const Layout& layout, std::span<const StateItems> states,
                               std::uint64_t items_max) {
  const std::vector<StateKind> known = kinds_of(layout);
  StateLists lists;
  std::vector<StateKind> seen;
  for (const StateItems& state : states) {
    const auto bad = [&](const std::string& what) {
      return Status(Code::kInvalidArgument,
                    fmt::format("state {}: {}", to_string(state.kind), what));
    };
    if (std::find(known.begin(), known.end(), state.kind) == known.end())
      return bad("this rank has no such pools");
    if (std::find(seen.begin(), seen.end(), state.kind) != seen.end()) return bad("is there twice");
    seen.push_back(state.kind);
    if (state.items.size() > items_max)
      return bad(
          fmt::format("{} items are above pages_per_room_max {}", state.items.size(), items_max));
    const std::uint32_t limit = limit_of(layout, state.kind);
    for (const PageIndex item : state.items) {
      if (item < 0 || static_cast<std::uint32_t>(item) >= limit)
        return bad(fmt::format("item {} outside pool of {}", item, limit));
    }
    lists.at(static_cast<std::size_t>(state.kind)) = state.items;
  }
  return lists;
}

std::vector<StatePool> state_pools(const Layout& layout, std::optional<StateKind> kind) {
  std::vector<StatePool> pools;
  for (const Slab& slab : layout.slabs) {
    if (slab.component == Component::kAux || state_of(slab.component) != kind) continue;
    StatePool* last = pools.empty() ? nullptr : &pools.back();
    if (last != nullptr && last->component == slab.component && last->layer == slab.layer &&
        last->blocks.back().item_stride == slab.item_stride &&
        slab.base == last->base + last->item_bytes) {
      last->item_bytes += slab.item_bytes;
      last->blocks.push_back(slab);
    } else {
      pools.push_back({slab.component, slab.layer, slab.base, slab.item_bytes, {slab}});
    }
  }
  return pools;
}

std::vector<GrantSlab> grant_slabs(const Layout& layout, Shares share) {
  std::vector<GrantSlab> slabs;
  for (const Slab& slab : layout.slabs) {
    if (share_of(slab) == share)
      slabs.push_back({slab.base, slab.item_stride, slab.item_bytes, slab.item_count});
  }
  std::sort(slabs.begin(), slabs.end(),
            [](const GrantSlab& a, const GrantSlab& b) { return a.base < b.base; });
  std::vector<GrantSlab> merged;
  for (const GrantSlab& slab : slabs) {
    GrantSlab* last = merged.empty() ? nullptr : &merged.back();
    const std::uint64_t offset = last != nullptr ? slab.base - last->base : 0;
    if (last != nullptr && last->item_stride == slab.item_stride &&
        offset + slab.item_bytes <= slab.item_stride) {
      last->item_bytes = std::max(last->item_bytes, offset + slab.item_bytes);
      last->item_count = std::min(last->item_count, slab.item_count);
    } else {
      merged.push_back(slab);
    }
  }
  return merged;
}

std::vector<Region> regions_of(const Layout& layout) {
  std::vector<Region> regions;
  for (const Slab& slab : layout.slabs)  // a block ends with its last item, not with its pool's
    regions.push_back(
        {slab.base, slab.item_stride * (slab.item_count - 1) + slab.item_bytes, slab.memory});
  return regions;
}

}  // namespace kvferry::plan
