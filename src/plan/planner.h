// Layouts in, copy plans out. Pure: no clock, no I/O, no state.
//
// A pair of ranks is planned once, when they meet (pair_lanes): which bytes of which pool go where,
// for any page. A chunk is planned when its pages are known (make_runs): O(pages) once, whatever
// the number of layers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvferry/data_plane.h"
#include "kvferry/layout.h"
#include "kvferry/status.h"
#include "kvferry/types.h"

namespace kvferry::plan {

// Half-open range of KV heads of the whole model.
struct HeadRange {
  std::uint32_t begin = 0, count = 0;
  friend auto operator<=>(const HeadRange&, const HeadRange&) = default;
};

// The KV heads that rank `tp_rank` of `tp_size` holds when the model has `heads`:
// tp_size <= heads: [r*H/T, (r+1)*H/T); tp_size > heads: the one head r*H/T (several ranks hold the
// same).
HeadRange heads_of_rank(std::uint32_t heads, std::uint32_t tp_size, std::uint32_t tp_rank);

// Lanes of one pair of ranks.
struct PairLanes {
  std::vector<Lane> kv;                               // to be crossed with runs of pages
  std::vector<Lane> aux;                              // to be crossed with one run of one row
  std::array<std::vector<Lane>, kStateKinds> states;  // each with runs of the items of its kind
  friend bool operator==(const PairLanes&, const PairLanes&) = default;
};

// Shares of a target's memory that a source writes, as a set of bits: the KV cache, and each kind
// of state. Aux rows are apart.
using Shares = std::uint32_t;
inline constexpr Shares kKvShare = 1, kAllShares = ~Shares{0};
constexpr Shares share_of(StateKind kind) {
  return Shares{2} << static_cast<std::uint32_t>(kind);
}
inline Shares share_of(const Slab& slab) {
  const auto kind = state_of(slab.component);
  return slab.component == Component::kAux ? 0 : kind ? share_of(*kind) : kKvShare;
}

// The lists of one request on one rank: position k of the request, or of a kind of state, is item
// [k].
using StateLists = std::array<std::vector<PageIndex>, kStateKinds>;
struct RequestItems {
  std::vector<PageIndex> pages;
  StateLists states;
};

// Every byte that both layouts hold: same component, layer and head. Slabs that only one side has
// are no error (pipeline stages, other heads); two slabs for the same thing that do not fit (row
// counts, bytes per head, dtype) are kRefused with both values. `source_name` and `target_name` go
// into messages. Aux rows: the buffers that both sides have; a row is copied whole, so its size
// must agree.
Result<PairLanes> pair_lanes(const Layout& source, const Layout& target,
                             std::string_view source_name, std::string_view target_name);

// Groups pages that advance by exactly one on both sides. The lists have equal length; negative
// indices and lists of different length are refused. `limit` bounds the pages (0: no bound is
// checked).
Result<std::vector<Run>> make_runs(std::span<const PageIndex> source,
                                   std::span<const PageIndex> target);

// Appends the copies of all state in `shares` that both layouts hold. kRefused with both counts
// when the lists of a kind cannot be paired (components.h).
Status plan_states(const PairLanes& lanes, Shares shares, const StateLists& source,
                   const StateLists& target, std::string_view source_name,
                   std::string_view target_name, CopyPlan& plan);

// One range of a flat list of copies; what a list-moving engine would be handed.
struct Block {
  std::uint64_t source = 0, target = 0, bytes = 0;
  friend auto operator<=>(const Block&, const Block&) = default;
};
// The plan as a list, neighbours inside a run merged. For tests, tools and engines that know only
// lists.
std::vector<Block> expand(const CopyPlan& plan);

}  // namespace kvferry::plan
