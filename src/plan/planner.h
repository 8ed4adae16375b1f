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
#include "src/plan/parts.h"

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

// A lane from the first part of an item to the first part of another, and the steps to the others.
struct SplitLane {
  Lane lane;
  std::uint64_t source_part = 0, target_part = 0;  // bytes from one part of an item to the next
  friend bool operator==(const SplitLane&, const SplitLane&) = default;
};
// The lanes of all pools whose items are of one list, to be crossed with the list (plan_list).
struct ListLanes {
  Parts parts;
  // Between pools that go from part to part as they do from item to item, or whose items are one
  // part: part k of item i is item i * parts + k of the lane.
  std::vector<Lane> even;
  std::vector<SplitLane> split;  // between others
  [[nodiscard]] bool empty() const { return even.empty() && split.empty(); }
  void clear() {
    even.clear();
    split.clear();
  }
  friend bool operator==(const ListLanes&, const ListLanes&) = default;
};
// Most pairs of parts that pools that are not even may be cut into: each becomes a group of copies.
inline constexpr std::uint64_t kSplitPartsMax = 128;

// Lanes of one pair of ranks.
struct PairLanes {
  ListLanes kv;
  std::vector<Lane> aux;  // to be crossed with one run of one row
  std::array<ListLanes, kStateKinds> states;
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
  // What a target holds already, whole pages: the first of `pages` begins behind it.
  std::uint64_t prefix_tokens = 0;
};

// Every byte that both layouts hold: same component, layer and head. Slabs that only one side has
// are no error (pipeline stages, other heads); two slabs for the same thing that do not fit (row
// counts, bytes per head, dtype) are kRefused with both values. `source_name` and `target_name` go
// into messages. Pages of different sizes are cut into parts, where the registry (components.h)
// says that lists of them can be paired. Aux rows: the buffers that both sides have; a row is
// copied whole, so its size must agree.
Result<PairLanes> pair_lanes(const Layout& source, const Layout& target,
                             std::string_view source_name, std::string_view target_name);

// Groups pages that advance by exactly one on both sides. The lists have equal length; negative
// indices and lists of different length are refused.
Result<std::vector<Run>> make_runs(std::span<const PageIndex> source,
                                   std::span<const PageIndex> target);

// One chunk of a request on its way to one target. All in parts of pages, but where it says pages.
struct ChunkCut {
  Parts parts;
  std::uint64_t source_pages = 0;  // of the request, all chunks together
  std::uint64_t first_page = 0, page_count = 0;
  std::uint64_t held = 0;          // from here on the target waits for it
  std::uint64_t target_pages = 0;  // that it lent
  // It lends exactly what is sent; else it may lend more, as the reference does for padding and
  // speculative tokens.
  bool exact = true;
  std::uint32_t cp_size = 1, cp_rank = 0;  // which part of what it waits for this source sends
};
struct PartRange {
  std::uint64_t begin = 0, end = 0;
  friend bool operator==(const PartRange&, const PartRange&) = default;
};
// The parts of the request to copy, maybe none (begin >= end). Nothing: the pages of both sides are
// not of the same tokens.
std::optional<PartRange> range_of(const ChunkCut& cut);

// Items of one list that are at hand, the first of which begins at part `first` of the request.
struct ListSpan {
  std::span<const PageIndex> items;
  std::uint64_t first = 0;
};
// Appends the copies of parts [begin, end) of the request, which both lists must hold. One group
// for all even pools; one for each pair of parts for the others. Negative indices are refused.
Status plan_list(const ListLanes& lanes, ListSpan source, ListSpan target, std::uint64_t begin,
                 std::uint64_t end, CopyPlan& plan);

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
