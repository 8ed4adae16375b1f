#include "src/plan/proof.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "src/plan/components.h"
#include "src/plan/parts.h"

namespace kvferry::plan {
namespace {

// One byte of an item, by what it means.
struct Cell {
  std::uint32_t row = 0, head = 0, byte = 0;
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
  std::uint32_t parts = 1;      // of the pool's items, which are the lane's items
  std::vector<Interval> bytes;  // ascending, as of part 0
};

// How the items that a lane steps through on one side lie in a pool.
struct Steps {
  std::uint32_t rows = 1;   // of the pool's item
  std::uint32_t parts = 1;  // of the pool's item
  std::uint32_t row = 0;    // where the lane begins in its part
  friend auto operator<=>(const Steps&, const Steps&) = default;
};
// What the runs of a group must lead through.
struct Path {
  std::size_t list = 0;
  Steps source, target;
  friend auto operator<=>(const Path&, const Path&) = default;
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
      promised_.emplace_back();
      for (std::size_t list = 0; list < kLists; ++list) {
        const auto& items = list_of(rank.items, list);
        for (std::size_t k = 0; k < items.size(); ++k) {
          if (!lists.at(list).emplace(items[k], k).second)
            problem(fmt::format("{}: item {} is there twice", rank.name, items[k]));
        }
        promised_.back().at(list) = promised_parts(rank, list);
      }
    }
    writings_.resize(targets.size());
  }

  void add(const Delivery& delivery) {
    if (delivery.source >= sources_.size() || delivery.target >= targets_.size())
      return problem("a delivery between ranks that are not there");
    for (const CopyGroup& group : delivery.plan) {
      std::set<Path> paths;
      for (const Lane& lane : group.lanes) {
        if (const auto path = add_lane(delivery, lane, group.runs)) paths.insert(*path);
      }
      for (const Path& path : paths) check_runs(delivery, group.runs, path);
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

  // Of one list: how the items of all sources, which are of one instance, and a target's divide.
  [[nodiscard]] Parts parts_of_list(const ProofRank& target, std::size_t list) const {
    const bool pages =
        list == 0 || row_of(static_cast<StateKind>(list - 1)).pairing == Pairing::kPages;
    return !pages || sources_.empty()
               ? Parts{}
               : parts_of(sources_.front().layout->page_tokens, target.layout->page_tokens);
  }
  // Items of a list that a target had before and that are not in it.
  static std::uint64_t prefix_items(const ProofRank& target, std::size_t list) {
    return list == 0 ? target.items.prefix_tokens / target.layout->page_tokens : 0;
  }
  // How many parts of its items a target may count on: each side's last page may end before the
  // other's.
  std::uint64_t promised_parts(const ProofRank& target, std::size_t list) {
    const Parts parts = parts_of_list(target, list);
    const std::uint64_t count = list_of(target.items, list).size();
    std::uint64_t promised = count * parts.target;
    const bool state = list != 0;
    const std::uint64_t held = prefix_items(target, list) * parts.target;
    if (state && row_of(static_cast<StateKind>(list - 1)).pairing != Pairing::kPages)
      return promised;
    for (const ProofRank& source : sources_) {
      const auto end =
          common_end(parts, list_of(source.items, list).size(), held, count, state ? 1 : 0);
      if (!end || source.layout->page_tokens != sources_.front().layout->page_tokens) {
        problem(
            fmt::format("{} items of {} tokens on {} and {} of {} on {} are not of the same "
                        "tokens",
                        list_of(source.items, list).size(), source.layout->page_tokens, source.name,
                        count, target.layout->page_tokens, target.name));
      } else {
        promised = std::min(promised, *end - std::min(*end, held));
      }
    }
    return promised;
  }

  // Each run leads from where the source keeps a token to where the target keeps the same.
  void check_runs(const Delivery& delivery, const std::vector<Run>& runs, const Path& path) {
    const auto& from = list_of(sources_[delivery.source].items, path.list);
    const auto& positions = positions_[delivery.target].at(path.list);
    const std::uint64_t prefix = prefix_items(targets_[delivery.target], path.list);
    const auto inside = [](const Steps& steps, std::uint64_t item) {
      return item % steps.parts * (steps.rows / steps.parts) + steps.row;
    };
    for (const Run& run : runs) {
      for (std::uint32_t i = 0; i < run.count; ++i) {
        const std::uint64_t source = std::uint64_t{run.source_first} + i,
                            target = std::uint64_t{run.target_first} + i;
        const std::uint64_t source_page = source / path.source.parts,
                            target_page = target / path.target.parts;
        const auto it = positions.find(static_cast<PageIndex>(target_page));
        if (it == positions.end())
          return problem(
              fmt::format("{}: page {} is not of the request", pair_name(delivery), target_page));
        const std::uint64_t row =
            (prefix + it->second) * path.target.rows + inside(path.target, target);
        const std::uint64_t position = row / path.source.rows;
        if (position >= from.size() || from[position] != static_cast<PageIndex>(source_page) ||
            row % path.source.rows != inside(path.source, source))
          return problem(fmt::format("{}: page {} goes to page {}, which is another position",
                                     pair_name(delivery), source_page, target_page));
      }
    }
  }

  // What its runs must lead through; nothing when it is wrong.
  std::optional<Path> add_lane(const Delivery& delivery, const Lane& lane,
                               const std::vector<Run>& runs) {
    const Slab* from = source_slabs_[delivery.source].find(lane.source);
    const Slab* to = target_slabs_[delivery.target].find(lane.target);
    if (from == nullptr || to == nullptr) {
      problem(fmt::format("{}: the copy {:#x} to {:#x} begins in no pool", pair_name(delivery),
                          lane.source, lane.target));
      return std::nullopt;
    }
    const auto wrong = [&](std::string_view what) -> std::optional<Path> {
      problem(fmt::format("{}: a copy from {} into {} {}", pair_name(delivery), pool_name(*from),
                          pool_name(*to), what));
      return std::nullopt;
    };
    if (from->component != to->component || from->layer != to->layer)
      return wrong("mixes two pools");
    Path path{list_of(*to), {}, {}};
    const Parts parts = parts_of_list(targets_[delivery.target], path.list);
    const auto steps = [](const Slab& slab, std::uint64_t item, std::uint32_t most, Steps& out) {
      out.rows = slab.rows_per_item;
      if (item == slab.item_stride) return true;
      // From part to part, through the end of an item as everywhere.
      out.parts = most;
      return slab.rows_per_item % most == 0 && item * most == slab.item_stride &&
             slab.item_stride == slab.rows_per_item * slab.row_stride;
    };
    if (!steps(*from, lane.source_item, parts.source, path.source) ||
        !steps(*to, lane.target_item, parts.target, path.target))
      return wrong("takes wrong steps from page to page");
    if (std::uint64_t{from->rows_per_item} * parts.target !=
        std::uint64_t{to->rows_per_item} * parts.source)
      return wrong("is between pages of different sizes");
    Writing writing{delivery.source, &runs, path.target.parts, {}};
    std::optional<std::pair<std::uint32_t, std::uint32_t>> first;
    for (std::uint32_t row = 0; row < lane.rows; ++row) {
      const std::uint64_t source = lane.source - from->base + std::uint64_t{row} * lane.source_row,
                          target = lane.target - to->base + std::uint64_t{row} * lane.target_row;
      // Cell by cell: the same token and head at both ends.
      for (std::uint64_t at = 0; at < lane.bytes;) {
        const auto s = cell_at(*from, source + at), t = cell_at(*to, target + at);
        if (!s || !t) return wrong("touches bytes between the heads or behind the item");
        if (!first) first = std::pair(s->row, t->row);
        path.source.row = std::min(first->first, s->row);
        path.target.row = std::min(first->second, t->row);
        first = std::pair(path.source.row, path.target.row);
        if (s->row - path.source.row != t->row - path.target.row ||
            s->row >= from->rows_per_item / path.source.parts ||
            t->row >= to->rows_per_item / path.target.parts ||
            from->head_begin + s->head != to->head_begin + t->head || s->byte != t->byte ||
            from->head_bytes != to->head_bytes)
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
    return path;
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
    const std::uint64_t promised =
        promised_[t].at(list_of(slab)) *
        (slab.rows_per_item / parts_of_list(target, list_of(slab)).target);
    proof_.promised_bytes += promised * slab.head_count * slab.head_bytes;
    // Which writings touch a position: few sets of them, and each set is looked at once.
    std::vector<Touches> touched(items.size());
    for (std::uint32_t w = 0; w < writings.size(); ++w) {
      for (const Run& run : *writings[w].runs) {
        for (std::uint32_t i = 0; i < run.count; ++i) {
          const std::uint64_t item = std::uint64_t{run.target_first} + i;
          const auto at = positions.find(static_cast<PageIndex>(item / writings[w].parts));
          if (at != positions.end())
            touched[at->second].emplace_back(w,
                                             static_cast<std::uint32_t>(item % writings[w].parts));
        }
      }
    }
    std::set<std::pair<std::uint64_t, Touches>> seen;
    for (std::size_t k = 0; k < touched.size(); ++k) {
      const std::uint64_t before = std::uint64_t{k} * slab.rows_per_item;
      const auto rows = static_cast<std::uint32_t>(
          promised < before ? 0 : std::min<std::uint64_t>(promised - before, slab.rows_per_item));
      if (seen.emplace(rows, touched[k]).second)
        check_item(target, slab, writings, touched[k], k, rows);
    }
  }

  // Writings that touch one item, each with the part of it.
  using Touches = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

  // The bytes of one item, as those writings leave them. Its first `rows` rows are waited for.
  void check_item(const ProofRank& target, const Slab& slab, const std::vector<Writing>& writings,
                  const Touches& set, std::size_t position, std::uint32_t rows) {
    std::vector<Interval> written;
    std::set<std::size_t> from;
    for (const auto& [w, part] : set) {
      const std::uint64_t shift = part * (slab.item_stride / writings[w].parts);
      for (const Interval& i : writings[w].bytes)
        written.push_back({i.begin + shift, i.end + shift});
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
    cells.reserve(std::size_t{rows} * slab.head_count);
    for (std::uint32_t row = 0; row < rows; ++row) {
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
  std::vector<std::array<std::uint64_t, kLists>> promised_;  // of each target and list, in parts
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
