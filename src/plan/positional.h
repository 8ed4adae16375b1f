// Layouts from the reference's positional lists: what a peer says that registers only pointers and
// item lengths.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvferry/layout.h"
#include "kvferry/status.h"
#include "kvferry/types.h"
#include "src/plan/ranks.h"

namespace kvferry::plan {

// What must be known beside the lists to tell which layer and head a pool holds.
struct PositionalContext {
  AttentionKind attention = {};
  std::uint32_t page_tokens = 1;
  std::uint32_t total_kv_heads = 0;  // of the model; not needed for MLA
  // First layer and number of layers of the prefill stage that the lists are paired with.
  std::uint32_t stage_begin = 0, stage_layers = 0;
  // Where only some layers have a KV cache (hybrid models): which ones, of our stage. Empty: all.
  std::span<const std::uint32_t> kv_layers = {};
  // Layers of the whole model without draft layers; 0 when unknown. Settles what list lengths
  // cannot: an uneven pipeline split against a draft model.
  std::uint32_t model_layers = 0;
  // Compressed MLA: of each layer of the model, 0 where it has no pages; empty: not compressed.
  std::span<const std::uint32_t> compression_ratios = {};
  // Kinds of state of the model, in the order of the lists: our stage may lack some.
  std::span<const StateKind> state_kinds = {};
};

// What the peer registered.
struct PositionalLists {
  std::span<const std::uint64_t> kv_pointers = {};
  std::span<const std::uint64_t> kv_item_lengths = {};  // one for all pools, or one a pool
  std::span<const std::uint64_t> aux_pointers = {};
  std::span<const std::uint64_t> aux_item_lengths =
      {};  // of the source's rows: the wire does not carry the peer's
  // Of each pool, where the peer says them; else pools pair by position.
  std::span<const std::uint32_t> kv_layer_ids = {};
  std::uint32_t tp_rank = 0, tp_size = 1;
};

// State as the peer registered it: one list a kind, in the order of context.state_kinds.
struct PositionalState {
  std::span<const std::vector<std::uint64_t>> pointers = {};
  std::span<const std::vector<std::uint32_t>> item_lengths = {};
  std::span<const std::vector<std::uint32_t>> layer_ids = {};  // of each list, may be empty
  std::uint32_t tp_rank = 0, tp_size = 1;
};

// Appends the slabs of the peer's state that answer ours: its n-th pool with a layer's number to
// our n-th of that layer; without numbers by section where the model is compressed, else by
// position, where the counts agree. An item length of 0 says that the peer has no such memory.
// kRefused with names and both values where lists, lengths or TP sizes fit no rule of the kind
// (components.h).
Status add_state_from_lists(const Layout& own, const RankPlace& place,
                            const PositionalContext& context, const PositionalState& lists,
                            std::string_view peer, Layout& layout);

// All that the peer registered: its KV pools, aux rows and state, as they answer ours.
Result<Layout> layout_of_peer(const Layout& own, const RankPlace& place,
                              const PositionalContext& context, const PositionalLists& lists,
                              const PositionalState& states, std::string_view peer);

// Pool count of a positional list is not sent; any page index that int32 can carry is taken to
// exist.
inline constexpr std::uint32_t kUnknownItemCount = std::uint32_t{1} << 31;

// The layout of the target, cut to the stage that the source holds, but for its state and the KV
// pools of compressed MLA, whose shape is ours (layout_of_peer). kRefused with the counts when the
// lists fit no rule.
Result<Layout> layout_from_lists(const PositionalContext& context, const PositionalLists& lists);

// Which entries of a decode rank's K/V list pair with a stage's layers.
struct KeyValueEntries {
  std::size_t key_begin = 0, value_begin = 0;
};
Result<KeyValueEntries> pair_key_value(std::size_t target_pools, const PositionalContext& context);

// The model's KV heads from what a rank knows: the total if it is set, else heads per rank times TP
// size.
Result<std::uint32_t> resolve_total_kv_heads(std::int64_t total, std::int64_t per_rank,
                                             std::uint32_t tp_size);

}  // namespace kvferry::plan
