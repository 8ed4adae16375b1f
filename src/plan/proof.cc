#include "src/plan/proof.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include <fmt/format.h>

namespace kvferry::plan {
namespace {

// One byte of an item, by what it means.
struct Cell {
  std::uint32_t row = 0, head = 0, byte = 0;
  friend auto operator<=>(const Cell&, const Cell&) = default;
};

std::uint64_t offset_of(const Slab& slab, std::uint32_t row, std::uint32_t head) {
  return std::uint64_t{row} * slab.row_stride + std::uint64_t{head} * slab.head_stride;
}

// What lies at `offset` of an item; nothing for the gaps between rows and heads.
std::optional<Cell> cell_at(const Slab& slab, std::uint64_t offset) {
  const auto index = [&offset](std::uint64_t stride, std::uint32_t count) {
    if (count <= 1 || stride == 0) return std::uint32_t{0};
    const auto i = static_cast<std::uint32_t>(std::min<std::uint64_t>(offset / stride, count - 1));
    offset -= i * stride;
    return i;
  };
  Cell cell;
  const bool rows_outside =
      slab.head_count <= 1 || (slab.rows_per_item > 1 && slab.row_stride >= slab.head_stride);
  if (rows_outside) cell.row = index(slab.row_stride, slab.rows_per_item);
  cell.head = index(slab.head_stride, slab.head_count);
  if (!rows_outside) cell.row = index(slab.row_stride, slab.rows_per_item);
  if (offset >= slab.head_bytes) return std::nullopt;
  cell.byte = static_cast<std::uint32_t>(offset);
  return cell;
}

// Finds the slab whose item 0 has a byte at an address. Pools may be interleaved.
class SlabIndex {
 public:
  explicit SlabIndex(const Layout& layout) {
    for (const Slab& slab : layout.slabs) {
      by_base_.emplace(slab.base, &slab);
      longest_ = std::max(longest_, slab.item_bytes);
    }
  }
  [[nodiscard]] const Slab* find(std::uint64_t address) const {
    for (auto it = by_base_.upper_bound(address); it != by_base_.begin();) {
      const Slab& slab = *(--it)->second;
      if (address - slab.base >= longest_) break;
      if (address - slab.base < slab.item_bytes && cell_at(slab, address - slab.base)) return &slab;
    }
    return nullptr;
  }

 private:
  std::multimap<std::uint64_t, const Slab*> by_base_;
  std::uint64_t longest_ = 0;
};

struct Interval {
  std::uint64_t begin = 0, end = 0;  // of bytes of an item
  friend auto operator<=>(const Interval&, const Interval&) = default;
};

// What one lane of one delivery writes into a pool of its target.
struct Writing {
  std::size_t source = 0;
  const std::vector<Run>* runs = nullptr;
  std::vector<Interval> bytes;  // ascending
};

std::string pool_name(const Slab& slab) {
  return fmt::format("{} of layer {}", to_string(slab.component), slab.layer);
}

// The list that a pool's items are of: 0 the pages, then the kinds of state.
constexpr std::size_t kLists = 1 + kStateKinds;
std::size_t list_of(const Slab& slab) {
  const auto kind = state_of(slab.component);
  return kind ? 1 + static_cast<std::size_t>(*kind) : 0;
}
const std::vector<PageIndex>& list_of(const RequestItems& items, std::size_t list) {
  return list == 0 ? items.pages : items.states.at(list - 1);
}

class Prover {
 public:
  Prover(std::span<const ProofRank> sources, std::span<const ProofRank> targets,
         const ProofOptions& options)
      : sources_(sources), targets_(targets), options_(options) {
    for (const ProofRank& rank : sources) source_slabs_.emplace_back(*rank.layout);
    for (const ProofRank& rank : targets) {
      target_slabs_.emplace_back(*rank.layout);
      auto& lists = positions_.emplace_back();
      for (std::size_t list = 0; list < kLists; ++list) {
        const auto& items = list_of(rank.items, list);
        for (std::size_t k = 0; k < items.size(); ++k) {
          if (!lists.at(list).emplace(items[k], k).second)
            problem(fmt::format("{}: item {} is there twice", rank.name, items[k]));
        }
      }
    }
    writings_.resize(targets.size());
  }

  void add(const Delivery& delivery) {
    if (delivery.source >= sources_.size() || delivery.target >= targets_.size())
      return problem("a delivery between ranks that are not there");
    for (const CopyGroup& group : delivery.plan) {
      std::set<std::size_t> lists;
      for (const Lane& lane : group.lanes) {
        if (const Slab* to = add_lane(delivery, lane, group.runs)) lists.insert(list_of(*to));
      }
      for (const std::size_t list : lists) check_runs(delivery, group.runs, list);
    }
  }

  Proof finish() {
    for (std::size_t t = 0; t < targets_.size(); ++t) {
      for (const Slab& slab : targets_[t].layout->slabs) {
        if (slab.component != Component::kAux) check_pool(t, slab);
      }
    }
    proof_.proved = proof_.problems.empty();
    return std::move(proof_);
  }

 private:
  void problem(std::string text) {
    if (proof_.problems.size() < kProblemsMax) proof_.problems.push_back(std::move(text));
  }
  [[nodiscard]] std::string pair_name(const Delivery& d) const {
    return sources_[d.source].name + " to " + targets_[d.target].name;
  }

  // Each run leads from where the source keeps a position to where the target keeps the same.
  void check_runs(const Delivery& delivery, const std::vector<Run>& runs, std::size_t list) {
    const auto& from = list_of(sources_[delivery.source].items, list);
    const auto& positions = positions_[delivery.target].at(list);
    for (const Run& run : runs) {
      for (std::uint32_t i = 0; i < run.count; ++i) {
        const std::uint64_t source = std::uint64_t{run.source_first} + i,
                            target = std::uint64_t{run.target_first} + i;
        const auto it = positions.find(static_cast<PageIndex>(target));
        if (it == positions.end())
          return problem(
              fmt::format("{}: page {} is not of the request", pair_name(delivery), target));
        if (it->second >= from.size() || from[it->second] != static_cast<PageIndex>(source))
          return problem(fmt::format("{}: page {} goes to page {}, which is another position",
                                     pair_name(delivery), source, target));
      }
    }
  }

  // The pool that it writes into; nothing when it is wrong.
  const Slab* add_lane(const Delivery& delivery, const Lane& lane, const std::vector<Run>& runs) {
    const Slab* from = source_slabs_[delivery.source].find(lane.source);
    const Slab* to = target_slabs_[delivery.target].find(lane.target);
    if (from == nullptr || to == nullptr) {
      problem(fmt::format("{}: the copy {:#x} to {:#x} begins in no pool", pair_name(delivery),
                          lane.source, lane.target));
      return nullptr;
    }
    const auto wrong = [&](std::string_view what) -> const Slab* {
      problem(fmt::format("{}: a copy from {} into {} {}", pair_name(delivery), pool_name(*from),
                          pool_name(*to), what));
      return nullptr;
    };
    if (from->component != to->component || from->layer != to->layer)
      return wrong("mixes two pools");
    if (lane.source_item != from->item_stride || lane.target_item != to->item_stride)
      return wrong("takes wrong steps from page to page");
    Writing writing{delivery.source, &runs, {}};
    for (std::uint32_t row = 0; row < lane.rows; ++row) {
      const std::uint64_t source = lane.source - from->base + std::uint64_t{row} * lane.source_row,
                          target = lane.target - to->base + std::uint64_t{row} * lane.target_row;
      // Cell by cell: the same token and head at both ends.
      for (std::uint64_t at = 0; at < lane.bytes;) {
        const auto s = cell_at(*from, source + at), t = cell_at(*to, target + at);
        if (!s || !t) return wrong("touches bytes between the heads or behind the item");
        if (s->row != t->row || from->head_begin + s->head != to->head_begin + t->head ||
            s->byte != t->byte || from->head_bytes != to->head_bytes)
          return wrong(
              fmt::format("puts token {}, head {}, byte {} where token {}, head {}, byte {} "
                          "belongs",
                          s->row, from->head_begin + s->head, s->byte, t->row,
                          to->head_begin + t->head, t->byte));
        at += from->head_bytes - s->byte;
      }
      writing.bytes.push_back({target, target + lane.bytes});
    }
    std::sort(writing.bytes.begin(), writing.bytes.end());
    std::uint64_t items = 0;
    for (const Run& run : runs) items += run.count;
    proof_.written_bytes += items * lane.rows * lane.bytes;
    writings_[delivery.target][to].push_back(std::move(writing));
    return to;
  }

  void check_pool(std::size_t t, const Slab& slab) {
    const ProofRank& target = targets_[t];
    const std::vector<PageIndex>& items = list_of(target.items, list_of(slab));
    const auto& positions = positions_[t].at(list_of(slab));
    const auto it = writings_[t].find(&slab);
    if (it == writings_[t].end()) {
      const bool draft = options_.model_layers != 0 && slab.layer >= options_.model_layers;
      if (!draft && !items.empty())
        problem(fmt::format("{}: nobody writes {}", target.name, pool_name(slab)));
      return;
    }
    const std::vector<Writing>& writings = it->second;
    proof_.promised_bytes +=
        std::uint64_t{items.size()} * slab.rows_per_item * slab.head_count * slab.head_bytes;
    // Which writings touch a position: few sets of them, and each set is looked at once.
    std::vector<std::vector<std::uint32_t>> touched(items.size());
    for (std::uint32_t w = 0; w < writings.size(); ++w) {
      for (const Run& run : *writings[w].runs) {
        for (std::uint32_t i = 0; i < run.count; ++i) {
          const auto at =
              positions.find(static_cast<PageIndex>(std::uint64_t{run.target_first} + i));
          if (at != positions.end()) touched[at->second].push_back(w);
        }
      }
    }
    std::set<std::vector<std::uint32_t>> seen;
    for (std::size_t k = 0; k < touched.size(); ++k) {
      if (seen.insert(touched[k]).second) check_item(target, slab, writings, touched[k], k);
    }
  }

  // The bytes of one item, as those writings leave them.
  void check_item(const ProofRank& target, const Slab& slab, const std::vector<Writing>& writings,
                  const std::vector<std::uint32_t>& set, std::size_t position) {
    std::vector<Interval> written;
    std::set<std::size_t> from;
    for (const std::uint32_t w : set) {
      written.insert(written.end(), writings[w].bytes.begin(), writings[w].bytes.end());
      from.insert(writings[w].source);
    }
    std::sort(written.begin(), written.end());
    bool twice = false;
    std::vector<Interval> merged;
    for (const Interval& i : written) {
      twice = twice || (!merged.empty() && i.begin < merged.back().end);
      if (!merged.empty() && i.begin <= merged.back().end) {
        merged.back().end = std::max(merged.back().end, i.end);
      } else {
        merged.push_back(i);
      }
    }
    if (twice) {
      std::string names;
      for (const std::size_t s : from) names += (names.empty() ? "" : ", ") + sources_[s].name;
      const std::string text = fmt::format("{}: {} is written more than once, by {}", target.name,
                                           pool_name(slab), names);
      if (options_.replicas_allowed && from.size() > 1) {
        if (proof_.redundant.size() < kProblemsMax) proof_.redundant.push_back(text);
      } else {
        problem(text);
      }
    }
    // Nothing between cells was written (add_lane), so it is enough that every cell was.
    std::size_t next = 0;
    std::vector<std::uint64_t> cells;
    cells.reserve(std::size_t{slab.rows_per_item} * slab.head_count);
    for (std::uint32_t row = 0; row < slab.rows_per_item; ++row) {
      for (std::uint32_t head = 0; head < slab.head_count; ++head)
        cells.push_back(offset_of(slab, row, head));
    }
    std::sort(cells.begin(), cells.end());
    for (const std::uint64_t cell : cells) {
      while (next < merged.size() && merged[next].end <= cell) ++next;
      if (next == merged.size() || merged[next].begin > cell ||
          merged[next].end < cell + slab.head_bytes) {
        const auto what = cell_at(slab, cell);
        return problem(fmt::format("{}: {}, position {}: token {}, head {} is not written",
                                   target.name, pool_name(slab), position, what->row,
                                   slab.head_begin + what->head));
      }
    }
  }

  const std::span<const ProofRank> sources_, targets_;
  const ProofOptions options_;
  std::vector<SlabIndex> source_slabs_, target_slabs_;
  // Of each target and list: where an item stands in it.
  std::vector<std::array<std::map<PageIndex, std::size_t>, kLists>> positions_;
  std::vector<std::map<const Slab*, std::vector<Writing>>> writings_;
  Proof proof_;
};

}  // namespace

Proof prove(std::span<const ProofRank> sources, std::span<const ProofRank> targets,
            std::span<const Delivery> deliveries, const ProofOptions& options) {
  Prover prover(sources, targets, options);
  for (const Delivery& delivery : deliveries) prover.add(delivery);
  return prover.finish();
}

}  // namespace kvferry::plan
