// Walks the bytes of a plan in its one order: group, lane, run, item, row, byte. Source and target
// walk alike, so only the plan crosses between them, never a list.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvferry/data_plane.h"

namespace kvferry::data {

class PlanCursor {
 public:
  // The plan must outlive the cursor and stay as it is.
  explicit PlanCursor(const CopyPlan& plan) : plan_(&plan), left_(bytes_of(plan)) { skip_empty(); }

  [[nodiscard]] std::uint64_t left() const { return left_; }

  // Visits the next `budget` bytes (or what is left) as pieces: visit(source, target, bytes).
  // Returns the bytes visited.
  template <class Visit>
  std::uint64_t advance(std::uint64_t budget, Visit&& visit) {
    budget = std::min(budget, left_);
    std::uint64_t want = budget;
    while (want > 0) {
      const CopyGroup& group = (*plan_)[group_];
      const Lane& lane = group.lanes[lane_];
      const Run& run = group.runs[run_];
      // A run whose items are dense on both sides is one piece.
      const bool dense =
          lane.rows == 1 && lane.bytes == lane.source_item && lane.bytes == lane.target_item;
      const std::uint64_t source = lane.source + run.source_first * lane.source_item;
      const std::uint64_t target = lane.target + run.target_first * lane.target_item;
      if (dense) {
        const std::uint64_t total = std::uint64_t{lane.bytes} * run.count;
        const std::uint64_t n = std::min(want, total - offset_);
        visit(source + offset_, target + offset_, n);
        offset_ += n;
        want -= n;
        if (offset_ == total) next_run();
        continue;
      }
      std::uint64_t s = source + item_ * lane.source_item, t = target + item_ * lane.target_item;
      for (;;) {
        // Whole rows first, with everything in registers: this loop runs once for each row.
        if (offset_ == 0 && want >= lane.bytes) {
          const std::uint64_t bytes = lane.bytes;
          const auto rows =
              static_cast<std::uint32_t>(std::min<std::uint64_t>(lane.rows - row_, want / bytes));
          std::uint64_t from = s + std::uint64_t{row_} * lane.source_row,
                        to = t + std::uint64_t{row_} * lane.target_row;
          const std::uint64_t from_step = lane.source_row, to_step = lane.target_row;
          for (std::uint32_t i = 0; i < rows; ++i, from += from_step, to += to_step)
            visit(from, to, bytes);
          want -= rows * bytes;
          row_ += rows;
          if (row_ == lane.rows) {
            row_ = 0;
            if (++item_ == run.count) {
              next_run();
              break;
            }
            s += lane.source_item;
            t += lane.target_item;
          }
          if (want == 0) break;
          continue;
        }
        const std::uint64_t n = std::min<std::uint64_t>(want, lane.bytes - offset_);
        visit(s + std::uint64_t{row_} * lane.source_row + offset_,
              t + std::uint64_t{row_} * lane.target_row + offset_, n);
        want -= n;
        offset_ += n;
        if (offset_ < lane.bytes) break;
        offset_ = 0;
        if (++row_ == lane.rows) {
          row_ = 0;
          if (++item_ == run.count) {
            next_run();
            break;
          }
          s += lane.source_item;
          t += lane.target_item;
        }
        if (want == 0) break;
      }
    }
    left_ -= budget;
    return budget;
  }

 private:
  void next_run() {
    offset_ = 0;
    item_ = row_ = 0;
    if (++run_ < (*plan_)[group_].runs.size()) return;
    run_ = 0;
    if (++lane_ < (*plan_)[group_].lanes.size()) return;
    lane_ = 0;
    ++group_;
    skip_empty();
  }
  void skip_empty() {
    while (group_ < plan_->size() &&
           ((*plan_)[group_].lanes.empty() || (*plan_)[group_].runs.empty()))
      ++group_;
  }

  const CopyPlan* plan_;
  std::size_t group_ = 0, lane_ = 0, run_ = 0;
  std::uint32_t item_ = 0, row_ = 0;
  std::uint64_t offset_ = 0, left_;
};

// A plan from outside may name rows, lanes or runs of size zero; nothing may walk such a one.
inline bool is_walkable(const CopyPlan& plan) {
  for (const CopyGroup& group : plan) {
    for (const Lane& lane : group.lanes) {
      if (lane.rows == 0 || lane.bytes == 0) return false;
    }
    for (const Run& run : group.runs) {
      if (run.count == 0) return false;
    }
  }
  return true;
}

}  // namespace kvferry::data
