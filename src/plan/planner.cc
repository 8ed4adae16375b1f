#include "src/plan/planner.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "src/plan/components.h"
#include "src/plan/ranks.h"

namespace kvferry::plan {
namespace {

std::string name_of(const Slab& slab) {
  return fmt::format("{} of layer {}", to_string(slab.component), slab.layer);
}

Status mismatch(const Slab& slab, std::string_view what, std::uint64_t source,
                std::string_view source_name, std::uint64_t target, std::string_view target_name) {
  return Status(Code::kRefused, fmt::format("{}: {} is {} on {} and {} on {}", name_of(slab), what,
                                            source, source_name, target, target_name));
}

// The copies of one item, as pieces of `unit` bytes in two nested dimensions. Dimensions that are
// dense on both sides melt into the piece, so that equal layouts become one piece for each item.
void add_lanes(const Slab& source, const Slab& target, std::uint32_t head_begin,
               std::uint32_t head_count, std::vector<Lane>& out) {
  Lane lane;
  lane.source = source.base + std::uint64_t{head_begin - source.head_begin} * source.head_stride;
  lane.target = target.base + std::uint64_t{head_begin - target.head_begin} * target.head_stride;
  lane.source_item = source.item_stride;
  lane.target_item = target.item_stride;
  const std::uint32_t rows = source.rows_per_item;
  const std::uint32_t unit = source.head_bytes;
  const auto dense = [](std::uint64_t a, std::uint64_t b, std::uint64_t bytes) {
    return a == bytes && b == bytes;
  };

  if (head_count == 1 || dense(source.head_stride, target.head_stride, unit)) {
    lane.bytes = unit * head_count;
    lane.rows = rows;
    if (rows > 1 && dense(source.row_stride, target.row_stride, lane.bytes)) {
      lane.bytes *= rows;
      lane.rows = 1;
    }
    lane.source_row = lane.rows > 1 ? static_cast<std::uint32_t>(source.row_stride) : 0;
    lane.target_row = lane.rows > 1 ? static_cast<std::uint32_t>(target.row_stride) : 0;
    out.push_back(lane);
    return;
  }
  if (rows == 1 ||
      dense(source.row_stride, target.row_stride, unit)) {  // [heads, tokens] on both sides
    lane.bytes = unit * rows;
    lane.rows = head_count;
    lane.source_row = static_cast<std::uint32_t>(source.head_stride);
    lane.target_row = static_cast<std::uint32_t>(target.head_stride);
    if (dense(source.head_stride, target.head_stride, lane.bytes)) {
      lane.bytes *= head_count;
      lane.rows = 1;
      lane.source_row = lane.target_row = 0;
    }
    out.push_back(lane);
    return;
  }
  lane.bytes = unit;
  lane.rows = rows;
  lane.source_row = static_cast<std::uint32_t>(source.row_stride);
  lane.target_row = static_cast<std::uint32_t>(target.row_stride);
  for (std::uint32_t h = 0; h < head_count; ++h) {
    out.push_back(lane);
    lane.source += source.head_stride;
    lane.target += target.head_stride;
  }
}

// A slab whose items are the parts of its items; nothing when the parts of one item do not lie as
// far apart as its last part and the next item.
std::optional<Slab> in_parts(Slab slab, std::uint32_t parts) {
  if (parts == 1) return slab;
  if (slab.item_stride != slab.rows_per_item * slab.row_stride) return std::nullopt;
  slab.rows_per_item /= parts;
  slab.item_stride /= parts;
  return slab;
}

// Between pools of pages of different sizes, cut into parts.
Status add_parts(const Slab& source, const Slab& target, std::uint32_t head_begin,
                 std::uint32_t head_count, std::string_view source_name,
                 std::string_view target_name, ListLanes& out) {
  const Parts parts = out.parts;
  const auto from = in_parts(source, parts.source), to = in_parts(target, parts.target);
  if (from && to) {
    add_lanes(*from, *to, head_begin, head_count, out.even);
    return {};
  }
  if (std::uint64_t{parts.source} * parts.target > kSplitPartsMax) {
    return Status(
        Code::kRefused,
        fmt::format("{}: pages of {} tokens on {} and {} on {} would be cut into {} times "
                    "{} parts, which is above {}",
                    name_of(source), source.rows_per_item, source_name, target.rows_per_item,
                    target_name, parts.source, parts.target, kSplitPartsMax));
  }
  Slab part = source;  // item strides stay: items are whole pages, which are entered at a part
  part.rows_per_item /= parts.source;
  std::vector<Lane> lanes;
  add_lanes(part, target, head_begin, head_count, lanes);
  for (const Lane& lane : lanes) {
    out.split.push_back({lane, part.rows_per_item * source.row_stride,
                         target.rows_per_item / parts.target * target.row_stride});
  }
  return {};
}

}  // namespace

HeadRange heads_of_rank(std::uint32_t heads, std::uint32_t tp_size, std::uint32_t tp_rank) {
  const auto at = [&](std::uint64_t r) { return static_cast<std::uint32_t>(r * heads / tp_size); };
  if (tp_size > heads) return {at(tp_rank), 1};
  return {at(tp_rank), at(std::uint64_t{tp_rank} + 1) - at(tp_rank)};
}

Result<PairLanes> pair_lanes(const Layout& source, const Layout& target,
                             std::string_view source_name, std::string_view target_name) {
  std::multimap<std::tuple<Component, std::uint32_t>, const Slab*> targets;
  for (const Slab& slab : target.slabs)
    targets.emplace(std::tuple(slab.component, slab.layer), &slab);

  const Parts parts = parts_of(source.page_tokens, target.page_tokens);
  PairLanes lanes;
  lanes.kv.parts = parts;
  for (std::size_t k = 0; k < kStateKinds; ++k) {
    if (row_of(static_cast<StateKind>(k)).pairing == Pairing::kPages) lanes.states[k].parts = parts;
  }
  for (const Slab& from : source.slabs) {
    const std::optional<StateKind> kind = state_of(from.component);
    ListLanes* list = from.component == Component::kAux ? nullptr
                      : kind ? &lanes.states.at(static_cast<std::size_t>(*kind))
                             : &lanes.kv;
    const Parts cut = list == nullptr ? Parts{} : list->parts;
    const auto [begin, end] = targets.equal_range(std::tuple(from.component, from.layer));
    for (auto it = begin; it != end; ++it) {
      const Slab& to = *it->second;
      const std::uint32_t head_begin = std::max(from.head_begin, to.head_begin);
      const std::uint32_t head_end =
          std::min(from.head_begin + from.head_count, to.head_begin + to.head_count);
      if (head_begin >= head_end) continue;
      if (from.head_bytes != to.head_bytes) {
        return mismatch(from, "bytes per head and token", from.head_bytes, source_name,
                        to.head_bytes, target_name);
      }
      // The same number of rows in each part.
      if (from.rows_per_item % cut.source != 0 || to.rows_per_item % cut.target != 0 ||
          from.rows_per_item / cut.source != to.rows_per_item / cut.target) {
        return mismatch(from, "tokens per page", from.rows_per_item, source_name, to.rows_per_item,
                        target_name);
      }
      if (from.dtype != to.dtype && from.dtype != DType::kUnknown && to.dtype != DType::kUnknown) {
        return mismatch(from, "dtype number", static_cast<std::uint64_t>(from.dtype), source_name,
                        static_cast<std::uint64_t>(to.dtype), target_name);
      }
      if (cut.whole()) {
        add_lanes(from, to, head_begin, head_end - head_begin,
                  list == nullptr ? lanes.aux : list->even);
        continue;
      }
      if (kind && !row_of(*kind).divisible) {
        return Status(Code::kRefused,
                      fmt::format("{}: pages of {} tokens on {} and {} on {}: a list of state {} "
                                  "does not say at which token it begins, so pages of different "
                                  "sizes cannot be paired",
                                  name_of(from), from.rows_per_item, source_name, to.rows_per_item,
                                  target_name, row_of(*kind).name));
      }
      KVF_RETURN_IF_ERROR(
          add_parts(from, to, head_begin, head_end - head_begin, source_name, target_name, *list));
    }
  }
  return lanes;
}

Result<std::vector<Run>> make_runs(std::span<const PageIndex> source,
                                   std::span<const PageIndex> target) {
  if (source.size() != target.size()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} source pages but {} target pages", source.size(), target.size()));
  }
  std::vector<Run> runs;
  const std::size_t n = source.size();
  for (std::size_t i = 0; i < n; ++i) {
    if (source[i] < 0 || target[i] < 0) {
      return Status(
          Code::kInvalidArgument,
          fmt::format("page index {} -> {} at position {} is negative", source[i], target[i], i));
    }
    const auto s = static_cast<std::uint32_t>(source[i]);
    const auto t = static_cast<std::uint32_t>(target[i]);
    if (!runs.empty()) {
      Run& last = runs.back();
      if (s == last.source_first + last.count && t == last.target_first + last.count) {
        ++last.count;
        continue;
      }
    } else {
      runs.reserve(n);
    }
    runs.push_back({s, t, 1});
  }
  return runs;
}

std::optional<PartRange> range_of(const ChunkCut& cut) {
  std::uint64_t request_end = cut.source_pages * cut.parts.source;
  if (cut.exact) {
    const auto common = common_end(cut.parts, cut.source_pages, cut.held, cut.target_pages);
    if (!common) return std::nullopt;
    request_end = *common;
  } else if (cut.held + cut.target_pages * cut.parts.target < request_end) {
    return std::nullopt;
  }
  const PagePart part =
      cp_part(request_end - std::min(request_end, cut.held), cut.cp_size, cut.cp_rank);
  const std::uint64_t chunk = cut.first_page * cut.parts.source;
  return PartRange{std::max(chunk, cut.held + part.begin),
                   std::min(chunk + cut.page_count * cut.parts.source, cut.held + part.end)};
}

Status plan_list(const ListLanes& lanes, ListSpan source, ListSpan target, std::uint64_t begin,
                 std::uint64_t end, CopyPlan& plan) {
  if (begin >= end || lanes.empty()) return {};
  const Parts parts = lanes.parts;
  const auto holds = [&](const ListSpan& list, std::uint32_t n) {
    return list.first <= begin && end <= list.first + list.items.size() * n;
  };
  if (!holds(source, parts.source) || !holds(target, parts.target)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("parts {}..{} of lists that hold {} source items from part {} on and "
                              "{} target items from part {} on",
                              begin, end, source.items.size(), source.first, target.items.size(),
                              target.first));
  }
  if (parts.whole()) {
    auto runs = make_runs(source.items.subspan(begin - source.first, end - begin),
                          target.items.subspan(begin - target.first, end - begin));
    if (!runs.ok()) return runs.status();
    plan.push_back({lanes.even, std::move(*runs)});
    return {};
  }
  const auto append = [](std::vector<Run>& runs, std::uint64_t s, std::uint64_t t) {
    if (!runs.empty()) {
      Run& last = runs.back();
      if (s == std::uint64_t{last.source_first} + last.count &&
          t == std::uint64_t{last.target_first} + last.count) {
        ++last.count;
        return;
      }
    }
    runs.push_back({static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(t), 1});
  };
  std::vector<Run> even;
  std::vector<std::vector<Run>> split(
      lanes.split.empty() ? 0 : std::size_t{parts.source} * parts.target);
  for (std::uint64_t at = begin; at < end; ++at) {
    const std::uint64_t s = at - source.first, t = at - target.first;
    const PageIndex from = source.items[s / parts.source], to = target.items[t / parts.target];
    const std::uint64_t a = s % parts.source, b = t % parts.target;
    const auto part_of = [](PageIndex item, std::uint32_t n, std::uint64_t part) {
      return static_cast<std::uint64_t>(item) * n + part;
    };
    constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
    if (from < 0 || to < 0 || part_of(from, parts.source, a) >= kMost ||
        part_of(to, parts.target, b) >= kMost) {
      return Status(Code::kInvalidArgument,
                    fmt::format("page index {} -> {}, of {} and {} parts, is negative or too large",
                                from, to, parts.source, parts.target));
    }
    if (!lanes.even.empty())
      append(even, part_of(from, parts.source, a), part_of(to, parts.target, b));
    if (!split.empty())
      append(split[a * parts.target + b], static_cast<std::uint64_t>(from),
             static_cast<std::uint64_t>(to));
  }
  if (!lanes.even.empty()) plan.push_back({lanes.even, std::move(even)});
  for (std::size_t pair = 0; pair < split.size(); ++pair) {
    if (split[pair].empty()) continue;
    CopyGroup group{{}, std::move(split[pair])};
    for (const SplitLane& lane : lanes.split) {
      group.lanes.push_back(lane.lane);
      group.lanes.back().source += pair / parts.target * lane.source_part;
      group.lanes.back().target += pair % parts.target * lane.target_part;
    }
    plan.push_back(std::move(group));
  }
  return {};
}

Status plan_states(const PairLanes& lanes, Shares shares, const StateLists& source,
                   const StateLists& target, std::string_view source_name,
                   std::string_view target_name, CopyPlan& plan) {
  for (std::size_t k = 0; k < kStateKinds; ++k) {
    const auto kind = static_cast<StateKind>(k);
    if (lanes.states[k].empty() || (shares & share_of(kind)) == 0) continue;
    const auto end = pair_items(kind, lanes.states[k].parts, source[k].size(), target[k].size(),
                                source_name, target_name);
    if (!end.ok()) return end.status();
    const Status planned =
        plan_list(lanes.states[k], {source[k], 0}, {target[k], 0}, 0, *end, plan);
    if (!planned.ok())
      return Status(planned.code(),
                    fmt::format("state {}: {}", to_string(kind), planned.message()));
  }
  return {};
}

std::vector<Block> expand(const CopyPlan& plan) {
  std::vector<Block> blocks;
  for (const CopyGroup& group : plan) {
    for (const Lane& lane : group.lanes) {
      const bool dense =
          lane.rows == 1 && lane.bytes == lane.source_item && lane.bytes == lane.target_item;
      for (const Run& run : group.runs) {
        const std::uint64_t s = lane.source + run.source_first * lane.source_item;
        const std::uint64_t t = lane.target + run.target_first * lane.target_item;
        if (dense) {
          blocks.push_back({s, t, std::uint64_t{lane.bytes} * run.count});
          continue;
        }
        for (std::uint32_t item = 0; item < run.count; ++item) {
          for (std::uint32_t row = 0; row < lane.rows; ++row) {
            blocks.push_back({s + item * lane.source_item + std::uint64_t{row} * lane.source_row,
                              t + item * lane.target_item + std::uint64_t{row} * lane.target_row,
                              lane.bytes});
          }
        }
      }
    }
  }
  return blocks;
}

}  // namespace kvferry::plan

namespace kvferry {

std::uint64_t bytes_of(const CopyPlan& plan) {
  std::uint64_t total = 0;
  for (const CopyGroup& group : plan) {
    std::uint64_t items = 0, bytes = 0;
    for (const Run& run : group.runs) items += run.count;
    for (const Lane& lane : group.lanes) bytes += std::uint64_t{lane.rows} * lane.bytes;
    total += items * bytes;
  }
  return total;
}

}  // namespace kvferry
