#include "src/plan/planner.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "src/plan/components.h"

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

  PairLanes lanes;
  for (const Slab& from : source.slabs) {
    const std::optional<StateKind> kind = state_of(from.component);
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
      if (from.rows_per_item != to.rows_per_item) {
        return mismatch(from, "tokens per page", from.rows_per_item, source_name, to.rows_per_item,
                        target_name);
      }
      if (from.dtype != to.dtype && from.dtype != DType::kUnknown && to.dtype != DType::kUnknown) {
        return mismatch(from, "dtype number", static_cast<std::uint64_t>(from.dtype), source_name,
                        static_cast<std::uint64_t>(to.dtype), target_name);
      }
      add_lanes(from, to, head_begin, head_end - head_begin,
                from.component == Component::kAux ? lanes.aux
                : kind                            ? lanes.states.at(static_cast<std::size_t>(*kind))
                                                  : lanes.kv);
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

Status plan_states(const PairLanes& lanes, Shares shares, const StateLists& source,
                   const StateLists& target, std::string_view source_name,
                   std::string_view target_name, CopyPlan& plan) {
  for (std::size_t k = 0; k < kStateKinds; ++k) {
    const auto kind = static_cast<StateKind>(k);
    if (lanes.states[k].empty() || (shares & share_of(kind)) == 0) continue;
    const auto count =
        pair_items(kind, source[k].size(), target[k].size(), source_name, target_name);
    if (!count.ok()) return count.status();
    auto runs = make_runs(std::span(source[k]).first(*count), std::span(target[k]).first(*count));
    if (!runs.ok())
      return Status(runs.status().code(),
                    fmt::format("state {}: {}", to_string(kind), runs.status().message()));
    if (!runs->empty()) plan.push_back({lanes.states[k], std::move(*runs)});
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
