#include "src/plan/components.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace kvferry::plan {
namespace {

constexpr ComponentRow kComponents[] = {
    {Component::kKey, "key", {}},
    {Component::kValue, "value", {}},
    {Component::kLatent, "latent", {}},
    {Component::kIndex, "index", StateKind::kSparseIndex},
    {Component::kMambaConv, "mamba-conv", StateKind::kMamba},
    {Component::kMambaTemporal, "mamba-temporal", StateKind::kMamba},
    {Component::kSlidingKey, "sliding-key", StateKind::kSlidingWindow},
    {Component::kSlidingValue, "sliding-value", StateKind::kSlidingWindow},
    {Component::kSlidingRing, "sliding-ring", StateKind::kSlidingRing},
    {Component::kCompressedState, "compressed-state", StateKind::kCompressed},
    {Component::kMiniMaxIndexKey, "minimax-index-key", StateKind::kMiniMaxIndex},
    {Component::kLatentIndex, "latent-index", {}},
    {Component::kSlidingCompressed, "sliding-compressed", StateKind::kSlidingWindow},
    {Component::kSlidingCompressedIndex, "sliding-compressed-index", StateKind::kSlidingWindow},
    {Component::kAux, "aux", {}},
};

// By number.
constexpr std::array<StateRow, kStateKinds> kStates = {{
    {StateKind::kMamba, "mamba", Pairing::kOneEach, Sharding::kBlocks},
    {StateKind::kSlidingWindow, "swa", Pairing::kPages, Sharding::kHeads},
    {StateKind::kSparseIndex, "dsa", Pairing::kPages, Sharding::kNone, true},
    {StateKind::kSlidingRing, "swa_ring", Pairing::kRows, Sharding::kNone},
    {StateKind::kCompressed, "c128_state", Pairing::kRows, Sharding::kNone},
    {StateKind::kMiniMaxIndex, "minimax_index_k", Pairing::kPages, Sharding::kFixed, true},
}};

constexpr Section kKvSections[] = {{Component::kLatent, kIndexedRatio},
                                   {Component::kLatentIndex, kIndexedRatio},
                                   {Component::kLatent, kCoarseRatio}};
constexpr Section kSlidingSections[] = {{Component::kSlidingKey, {}},
                                        {Component::kSlidingCompressed, kIndexedRatio},
                                        {Component::kSlidingCompressedIndex, kIndexedRatio}};
constexpr Section kRingSections[] = {{Component::kSlidingRing, {}}};
constexpr Section kCompressedSections[] = {{Component::kCompressedState, kCoarseRatio}};

const ComponentRow* find(Component component) {
  const auto* const it =
      std::find_if(std::begin(kComponents), std::end(kComponents),
                   [&](const ComponentRow& row) { return row.component == component; });
  return it == std::end(kComponents) ? nullptr : it;
}

}  // namespace

std::span<const ComponentRow> component_rows() {
  return kComponents;
}

const StateRow& row_of(StateKind kind) {
  return kStates.at(static_cast<std::size_t>(kind));
}

std::span<const Section> sections_of(std::optional<StateKind> kind) {
  if (!kind) return kKvSections;
  switch (*kind) {
    case StateKind::kSlidingWindow:
      return kSlidingSections;
    case StateKind::kSlidingRing:
      return kRingSections;
    case StateKind::kCompressed:
      return kCompressedSections;
    case StateKind::kMamba:
    case StateKind::kSparseIndex:
    case StateKind::kMiniMaxIndex:
      break;
  }
  return {};
}

Result<std::uint64_t> pair_items(StateKind kind, Parts parts, std::size_t source,
                                 std::size_t target, std::string_view source_name,
                                 std::string_view target_name) {
  const StateRow& row = row_of(kind);
  const auto refused = [&](std::string_view rule) {
    return Status(Code::kRefused, fmt::format("state {}: {} items on {} and {} on {}: {}", row.name,
                                              source, source_name, target, target_name, rule));
  };
  switch (row.pairing) {
    case Pairing::kOneEach:
      if (source != 1 || target != 1) return refused("exactly one on each side");
      return std::uint64_t{1};
    case Pairing::kPages: {
      const auto end = common_end(parts, source, 0, target, 1);
      if (!end || (source == 0) != (target == 0))
        return refused("at most one page more on one side");
      return *end;
    }
    case Pairing::kRows:
      if (source != target) return refused("the same number on both sides");
      return std::uint64_t{source};
  }
  return refused("no rule");
}

}  // namespace kvferry::plan

namespace kvferry {

std::string_view to_string(Component component) {
  const plan::ComponentRow* row = plan::find(component);
  return row == nullptr ? "unknown" : row->name;
}

std::string_view to_string(StateKind kind) {
  return static_cast<std::size_t>(kind) < kStateKinds ? plan::row_of(kind).name : "unknown";
}

std::optional<StateKind> state_of(Component component) {
  const plan::ComponentRow* row = plan::find(component);
  return row == nullptr ? std::nullopt : row->kind;
}

}  // namespace kvferry
