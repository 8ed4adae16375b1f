#include "src/plan/positional.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/plan/components.h"
#include "src/plan/geometry.h"
#include "src/plan/planner.h"

namespace kvferry::plan {
namespace {

Status refused(std::string message) {
  return Status(Code::kRefused, std::move(message));
}

}  // namespace

Result<KeyValueEntries> pair_key_value(std::size_t target_pools, const PositionalContext& context) {
  const std::size_t stage = context.stage_layers;
  if (stage == 0 || target_pools % 2 != 0) {
    return refused(
        fmt::format("{} KV pools registered for a stage of {} layers: K and V need an even number",
                    target_pools, stage));
  }
  const std::size_t layers = target_pools / 2;
  if (layers == stage) return KeyValueEntries{0, layers};
  const std::size_t begin = context.stage_begin, end = begin + stage;
  if (end > layers) {
    return refused(fmt::format("prefill holds layers {}..{} but decode registered only {} layers",
                               begin, end, layers));
  }
  // With the model's depth known, whatever is beyond it are draft layers: [K main, V main, K draft,
  // V draft].
  if (context.model_layers != 0) {
    if (layers < context.model_layers) {
      return refused(fmt::format("decode registered {} layers, the model has {}", layers,
                                 context.model_layers));
    }
    return KeyValueEntries{begin, context.model_layers + begin};
  }
  if (layers % stage == 0) return KeyValueEntries{begin, layers + begin};
  return refused(
      fmt::format("decode registered {} layers, the prefill stage holds {}: an uneven pipeline "
                  "split and a draft model look alike; "
                  "set the number of model layers",
                  layers, stage));
}

Result<std::uint32_t> resolve_total_kv_heads(std::int64_t total, std::int64_t per_rank,
                                             std::uint32_t tp_size) {
  if (total > 0) return static_cast<std::uint32_t>(total);
  if (per_rank > 0) return static_cast<std::uint32_t>(per_rank * tp_size);
  return Status(
      Code::kInvalidArgument,
      fmt::format("neither total_kv_head_num ({}) nor kv_head_num ({}) is set", total, per_rank));
}

namespace {

// Which pool of the peer answers the `number`-th (K, V) pool of one of our layers.
struct LayerEntry {
  std::uint32_t layer = 0, number = 0;
  std::size_t pool = 0;
};

Result<std::vector<LayerEntry>> pair_by_layers(const PositionalContext& context,
                                               const PositionalLists& lists,
                                               std::uint32_t pools_per_layer) {
  std::vector<std::uint32_t> layers(context.kv_layers.begin(), context.kv_layers.end());
  for (std::uint32_t i = 0; context.kv_layers.empty() && i < context.stage_layers; ++i)
    layers.push_back(context.stage_begin + i);
  const std::size_t pools = lists.kv_pointers.size();
  const auto& ids = lists.kv_layer_ids;
  if (ids.empty() ? pools != layers.size() * pools_per_layer : ids.size() != pools) {
    return refused(
        fmt::format("{} KV pools and {} layer ids registered for {} layers with {} pools "
                    "each: layer ids needed",
                    pools, ids.size(), layers.size(), pools_per_layer));
  }
  std::vector<LayerEntry> entries;
  for (std::uint32_t number = 0; number < pools_per_layer; ++number) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      std::size_t pool = number * layers.size() + i;
      if (!ids.empty()) {
        std::uint32_t skip = number;
        pool = static_cast<std::size_t>(
            std::find_if(ids.begin(), ids.end(),
                         [&](std::uint32_t id) { return id == layers[i] && skip-- == 0; }) -
            ids.begin());
        if (pool == pools) {
          return refused(
              fmt::format("no KV pool number {} of layer {} is registered", number, layers[i]));
        }
      }
      entries.push_back({layers[i], number, pool});
    }
  }
  return entries;
}

}  // namespace

Result<Layout> layout_from_lists(const PositionalContext& context, const PositionalLists& lists) {
  Layout layout;
  layout.page_tokens = context.page_tokens;
  const std::size_t pools = context.compression_ratios.empty() ? lists.kv_pointers.size() : 0;
  const auto item_length = [&](std::size_t pool) {
    return lists.kv_item_lengths.size() == 1 ? lists.kv_item_lengths[0]
                                             : lists.kv_item_lengths[pool];
  };
  if (pools > 0 && lists.kv_item_lengths.size() != 1 && lists.kv_item_lengths.size() != pools) {
    return refused(
        fmt::format("{} item lengths for {} KV pools", lists.kv_item_lengths.size(), pools));
  }
  const auto add = [&](Component component, std::uint32_t layer, std::size_t pool,
                       HeadRange heads) -> Status {
    const std::uint64_t item = item_length(pool);
    const std::uint64_t token = item / context.page_tokens;
    if (item == 0 || item % context.page_tokens != 0 || token % heads.count != 0) {
      return refused(fmt::format("item length {} does not divide into {} tokens of {} heads", item,
                                 context.page_tokens, heads.count));
    }
    Slab slab;
    slab.component = component;
    slab.layer = layer;
    slab.base = lists.kv_pointers[pool];
    slab.item_count = kUnknownItemCount;
    slab.item_bytes = slab.item_stride = item;
    slab.rows_per_item = context.page_tokens;
    slab.row_stride = token;
    slab.head_begin = heads.begin;
    slab.head_count = heads.count;
    slab.head_bytes = static_cast<std::uint32_t>(token / heads.count);
    slab.head_stride = slab.head_bytes;
    layout.slabs.push_back(slab);
    return {};
  };

  const bool latent = context.attention.mla || context.attention.hybrid_mla;
  if (pools > 0 && !latent && context.total_kv_heads == 0)
    return refused("the number of KV heads is not known");
  const HeadRange rank_heads =
      latent || context.total_kv_heads == 0
          ? HeadRange{0, 1}
          : heads_of_rank(context.total_kv_heads, lists.tp_size, lists.tp_rank % lists.tp_size);
  if (pools > 0 && (!lists.kv_layer_ids.empty() || !context.kv_layers.empty())) {
    const auto entries = pair_by_layers(context, lists, latent ? 1 : 2);
    if (!entries.ok()) return entries.status();
    for (const LayerEntry& e : *entries) {
      KVF_RETURN_IF_ERROR(add(latent          ? Component::kLatent
                              : e.number == 0 ? Component::kKey
                                              : Component::kValue,
                              e.layer, e.pool, rank_heads));
    }
  } else if (pools > 0 && latent) {
    std::size_t first = 0;
    if (pools != context.stage_layers) {
      first = context.stage_begin;
      if (first + context.stage_layers > pools) {
        return refused(
            fmt::format("prefill holds layers {}..{} but decode registered only {} layers", first,
                        first + context.stage_layers, pools));
      }
    }
    for (std::uint32_t i = 0; i < context.stage_layers; ++i) {
      KVF_RETURN_IF_ERROR(add(Component::kLatent, context.stage_begin + i, first + i, {0, 1}));
    }
  } else if (pools > 0) {
    const auto entries = pair_key_value(pools, context);
    if (!entries.ok()) return entries.status();
    const HeadRange heads = rank_heads;
    for (std::uint32_t i = 0; i < context.stage_layers; ++i) {
      KVF_RETURN_IF_ERROR(
          add(Component::kKey, context.stage_begin + i, entries->key_begin + i, heads));
      KVF_RETURN_IF_ERROR(
          add(Component::kValue, context.stage_begin + i, entries->value_begin + i, heads));
    }
  }

  // The common rows, never beyond: the peer may have registered more or fewer buffers than we have.
  const std::size_t aux = std::min(lists.aux_pointers.size(), lists.aux_item_lengths.size());
  for (std::size_t i = 0; i < aux; ++i) {
    Slab slab;
    slab.component = Component::kAux;
    slab.layer = static_cast<std::uint32_t>(i);
    slab.base = lists.aux_pointers[i];
    slab.item_count = kUnknownItemCount;
    slab.item_bytes = slab.item_stride = lists.aux_item_lengths[i];
    slab.head_bytes = static_cast<std::uint32_t>(lists.aux_item_lengths[i]);
    slab.row_stride = slab.head_stride = slab.head_bytes;
    if (slab.item_bytes > 0) layout.slabs.push_back(slab);
  }
  return layout;
}

namespace {

// One list of a peer, and what of ours it answers: pools of one kind of state, or those of the KV
// cache of compressed MLA.
class ListPairing {
 public:
  ListPairing(std::optional<StateKind> kind, const RankPlace& place,
              const PositionalContext& context, std::uint32_t tp_rank, std::uint32_t tp_size,
              std::string_view peer)
      : kind_(kind),
        sharding_(kind ? row_of(*kind).sharding : Sharding::kNone),
        place_(place),
        context_(context),
        tp_rank_(tp_rank % tp_size),
        tp_size_(tp_size),
        peer_(peer) {}

  struct List {
    std::span<const std::uint64_t> pointers, lengths;
    std::span<const std::uint32_t> ids;
  };
  Status add(const Layout& own, const List& list, Layout& layout) {
    const std::vector<StatePool> pools = state_pools(own, kind_);
    if (pools.empty()) return {};  // a stage without such layers
    if (sharding_ == Sharding::kFixed && (place_.pp_size > 1 || place_.tp_size != tp_size_)) {
      return bad(
          fmt::format("needs one stage and equal TP sizes; prefill has pp {} and tp {}, "
                      "{} has tp {}",
                      place_.pp_size, place_.tp_size, peer_, tp_size_));
    }
    const std::size_t count = list.pointers.size();
    if (!list.ids.empty() && list.ids.size() != count)
      return bad(fmt::format("{} layer ids for {} pools of {}", list.ids.size(), count, peer_));
    const auto places = places_of(pools, list);
    if (!places.ok()) return places.status();
    // A KV list of one length says that of its first pool.
    const bool first_length = !kind_ && list.lengths.size() == 1;
    if (list.lengths.size() != count && !first_length)
      return bad(
          fmt::format("{} item lengths for {} pools of {}", list.lengths.size(), count, peer_));
    for (std::size_t i = 0; i < pools.size(); ++i) {
      const std::size_t at = (*places)[i];
      const std::uint64_t length =
          first_length && at > 0 ? pools[i].item_bytes : list.lengths[first_length ? 0 : at];
      if (length == 0) continue;
      KVF_RETURN_IF_ERROR(add_pool(pools[i], list.pointers[at], length, layout));
    }
    return {};
  }

 private:
  using Places = std::vector<std::size_t>;  // in the peer's list, of each pool of ours

  [[nodiscard]] Result<Places> places_of(const std::vector<StatePool>& pools,
                                         const List& list) const {
    if (!list.ids.empty()) return by_ids(pools, list.ids);
    if (!context_.compression_ratios.empty() && !sections_of(kind_).empty())
      return by_sections(pools, list.pointers.size());
    const std::size_t count = list.pointers.size();
    Places places(pools.size());
    // A list of one pool for each layer of the whole model, where we have each layer of our stage.
    const bool by_layer = pools.size() < count && is_stage(pools) &&
                          sharding_ != Sharding::kBlocks && pools.back().layer < count;
    if (count != pools.size() && !by_layer) {
      return bad(
          fmt::format("{} pools here and {} on {}: layer ids needed", pools.size(), count, peer_));
    }
    for (std::size_t i = 0; i < pools.size(); ++i) places[i] = by_layer ? pools[i].layer : i;
    return places;
  }

  // The n-th pool of a layer is the n-th with its number.
  [[nodiscard]] Result<Places> by_ids(const std::vector<StatePool>& pools,
                                      std::span<const std::uint32_t> ids) const {
    Places places(pools.size());
    for (std::size_t i = 0; i < pools.size(); ++i) {
      const auto same = [&](const StatePool& pool) { return pool.layer == pools[i].layer; };
      const auto before =
          std::count_if(pools.begin(), pools.begin() + static_cast<std::ptrdiff_t>(i), same);
      auto skip = before;
      places[i] = static_cast<std::size_t>(
          std::find_if(ids.begin(), ids.end(),
                       [&](std::uint32_t id) { return id == pools[i].layer && skip-- == 0; }) -
          ids.begin());
      if (places[i] == ids.size())
        return bad(
            fmt::format("{} has no pool number {} of layer {}", peer_, before, pools[i].layer));
    }
    return places;
  }

  // The peer has all sections of the whole model, or of our stage.
  [[nodiscard]] Result<Places> by_sections(const std::vector<StatePool>& pools,
                                           std::size_t count) const {
    struct Entry {
      Component component{};
      std::uint32_t layer = 0;
      std::size_t whole = 0, stage = 0;  // places in a list of all layers, or of our stage's
    };
    std::vector<Entry> entries;
    std::size_t whole = 0, stage = 0;
    const auto& ratios = context_.compression_ratios;
    const std::uint32_t begin = context_.stage_begin, end = begin + context_.stage_layers;
    for (const Section& section : sections_of(kind_)) {
      for (std::uint32_t layer = 0; layer < ratios.size(); ++layer) {
        if (section.ratio && ratios[layer] != *section.ratio) continue;
        if (layer >= begin && layer < end)
          entries.push_back({section.component, layer, whole, stage++});
        ++whole;
      }
    }
    if (pools.size() != stage || (count != whole && count != stage)) {
      return bad(
          fmt::format("{} pools here and {} on {}; compression ratios of {} layers say {} for "
                      "layers {}..{} and {} for the model",
                      pools.size(), count, peer_, ratios.size(), stage, begin, end, whole));
    }
    Places places(pools.size());
    for (std::size_t i = 0; i < pools.size(); ++i) {
      const auto entry = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) {
        return e.component == pools[i].component && e.layer == pools[i].layer;
      });
      if (entry == entries.end())
        return bad(fmt::format("compression ratios leave no place for {} of layer {}",
                               to_string(pools[i].component), pools[i].layer));
      places[i] = count == whole ? entry->whole : entry->stage;
    }
    return places;
  }

  // One pool for each layer, without gaps.
  static bool is_stage(const std::vector<StatePool>& pools) {
    for (std::size_t i = 0; i < pools.size(); ++i) {
      if (pools[i].layer != pools[0].layer + i || pools[i].component != pools[0].component)
        return false;
    }
    return !pools.empty();
  }
  [[nodiscard]] Status bad(const std::string& what) const {
    return refused(kind_ ? fmt::format("state {}: {}", to_string(*kind_), what) : "KV: " + what);
  }

  // The peer's part of a block of which we hold `own`.
  [[nodiscard]] Result<HeadRange> part_of(const Slab& own) const {
    const HeadRange range{own.head_begin, own.head_count};
    // Without MLA nothing says that all ranks hold the same; equal lengths may be chance.
    const bool replicated =
        context_.attention.mla && (sharding_ == Sharding::kNone || sharding_ == Sharding::kHeads);
    const bool same_rank = place_.tp_size == tp_size_ && tp_rank_ == place_.tp_rank;
    if (same_rank || replicated) return range;
    if (sharding_ == Sharding::kNone) {
      return bad(
          fmt::format("rank {} of tp {} here and rank {} of tp {} of {} need not hold the same",
                      place_.tp_rank, place_.tp_size, tp_rank_, tp_size_, peer_));
    }
    const std::uint64_t total = std::uint64_t{range.count} * place_.tp_size;
    const std::uint64_t before = std::uint64_t{range.count} * place_.tp_rank;
    if (range.begin < before || total % tp_size_ != 0) {
      return bad(
          fmt::format("{} of layer {}, {} steps from {} of {} ranks, cannot be shared by "
                      "the {} ranks of {}",
                      to_string(own.component), own.layer, range.count, range.begin, place_.tp_size,
                      tp_size_, peer_));
    }
    const auto count = static_cast<std::uint32_t>(total / tp_size_);
    return HeadRange{static_cast<std::uint32_t>(range.begin - before) + tp_rank_ * count, count};
  }

  Status add_pool(const StatePool& pool, std::uint64_t base, std::uint64_t length, Layout& layout) {
    std::uint64_t offset = 0;
    const std::size_t first = layout.slabs.size();
    for (const Slab& own : pool.blocks) {
      const auto part = part_of(own);
      if (!part.ok()) return part.status();
      Slab slab = own;
      slab.base = base + offset;
      slab.item_count = kUnknownItemCount;
      slab.head_begin = part->begin;
      slab.head_count = part->count;
      slab.head_stride = slab.head_bytes;
      slab.row_stride = std::uint64_t{slab.head_bytes} * slab.head_count;
      slab.item_bytes = slab.row_stride * slab.rows_per_item;
      offset += slab.item_bytes;
      layout.slabs.push_back(slab);
    }
    for (std::size_t i = first; i < layout.slabs.size(); ++i) layout.slabs[i].item_stride = offset;
    if (offset == length) return {};
    return bad(
        fmt::format("{} of layer {}: an item has {} bytes on {}, from {} bytes here its "
                    "part is {}",
                    to_string(pool.component), pool.layer, length, peer_, pool.item_bytes, offset));
  }

  const std::optional<StateKind> kind_;
  const Sharding sharding_;
  const RankPlace& place_;
  const PositionalContext& context_;
  const std::uint32_t tp_rank_, tp_size_;
  const std::string_view peer_;
};

}  // namespace

Status add_state_from_lists(const Layout& own, const RankPlace& place,
                            const PositionalContext& context, const PositionalState& lists,
                            std::string_view peer, Layout& layout) {
  const auto& kinds = context.state_kinds;
  if (kinds.size() != lists.pointers.size()) {
    return refused(fmt::format("{} registered state of {} kinds, this rank has {}", peer,
                               lists.pointers.size(), kinds.size()));
  }
  if (lists.tp_size == 0) return refused(fmt::format("{} has TP size 0", peer));
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    std::vector<std::uint64_t> lengths;
    if (i < lists.item_lengths.size())
      lengths.assign(lists.item_lengths[i].begin(), lists.item_lengths[i].end());
    ListPairing::List list{lists.pointers[i], lengths, {}};
    if (i < lists.layer_ids.size()) list.ids = lists.layer_ids[i];
    ListPairing pairing(kinds[i], place, context, lists.tp_rank, lists.tp_size, peer);
    KVF_RETURN_IF_ERROR(pairing.add(own, list, layout));
  }
  return {};
}

Result<Layout> layout_of_peer(const Layout& own, const RankPlace& place,
                              const PositionalContext& context, const PositionalLists& lists,
                              const PositionalState& states, std::string_view peer) {
  auto layout = layout_from_lists(context, lists);
  if (!layout.ok()) return layout;
  if (!context.compression_ratios.empty()) {
    if (!context.attention.mla || lists.tp_size == 0)
      return refused(
          fmt::format("{}, TP size {}: compression ratios are of MLA models", peer, lists.tp_size));
    ListPairing pairing({}, place, context, lists.tp_rank, lists.tp_size, peer);
    KVF_RETURN_IF_ERROR(
        pairing.add(own, {lists.kv_pointers, lists.kv_item_lengths, lists.kv_layer_ids}, *layout));
  }
  KVF_RETURN_IF_ERROR(add_state_from_lists(own, place, context, states, peer, *layout));
  return layout;
}

}  // namespace kvferry::plan
