// Who sends to whom: the decode rank's view of a prefill instance.
#pragma once

#include <cstdint>
#include <vector>

#include "kvferry/status.h"
#include "kvferry/types.h"

namespace kvferry::plan {

// Sizes of a prefill instance, as its bootstrap server tells them.
struct InstanceShape {
  std::uint32_t tp_size = 1, pp_size = 1, cp_size = 1, dp_size = 1;
  friend auto operator<=>(const InstanceShape&, const InstanceShape&) = default;
};

struct AttentionKind {
  bool mla = false;         // the KV is the same on every TP rank
  bool hybrid_mla = false;  // MLA beside layers with sharded state
  // One rank can send all that a request owns.
  [[nodiscard]] bool same_everywhere() const { return mla && !hybrid_mla; }
  friend auto operator<=>(const AttentionKind&, const AttentionKind&) = default;
};

struct RankMapping {
  std::vector<std::uint32_t> tp_ranks;  // ascending; the first one is the selected one under MLA
  std::vector<std::uint32_t> cp_ranks;
  std::vector<std::uint32_t> pp_ranks;  // ascending
  // Decode ranks that a contacted prefill rank hears from, by its place in `tp_ranks`.
  std::vector<std::uint32_t> required_destinations;
  std::uint32_t required_responses =
      1;  // Success messages that complete a room of a reference peer
  friend bool operator==(const RankMapping&, const RankMapping&) = default;
};

// `decode_tp_rank` may be an engine rank beyond the TP size; it is taken modulo. TP sizes that do
// not divide each other, a decode CP other than 1 and a decode PP that is neither 1 nor equal are
// refused with both sizes.
Result<RankMapping> map_ranks(const RankPlace& decode, AttentionKind attention,
                              const InstanceShape& prefill, bool all_cp_ranks);

// The same between native ranks, whatever their sizes: where sizes and heads do not all divide each
// other, a decode rank hears from every prefill rank that holds one of its heads (`kv_heads` of the
// model) and from every one whose even part of the whole meets its own (state, MLA). A decode
// instance with several stages contacts every prefill stage, since the two may be cut differently;
// those that hold nothing for it write nothing. Refused: sizes of 0, decode CP other than 1, heads
// that are not known but needed.
Result<RankMapping> map_native_ranks(const RankPlace& decode, AttentionKind attention,
                                     std::uint32_t kv_heads, const InstanceShape& prefill,
                                     bool all_cp_ranks);

// Contiguous part of `total` page positions that context-parallel rank `rank` of `size` sends:
// [begin, end).
struct PagePart {
  std::uint64_t begin = 0, end = 0;
  friend auto operator<=>(const PagePart&, const PagePart&) = default;
};
PagePart cp_part(std::uint64_t total, std::uint32_t size, std::uint32_t rank);

}  // namespace kvferry::plan
