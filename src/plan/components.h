// The registry of what a layout may hold: one row for each component, and one for each kind of
// state with its rules. A new one is a row here, a number in kvferry/layout.h, and a test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "kvferry/layout.h"
#include "kvferry/status.h"
#include "src/plan/parts.h"

namespace kvferry::plan {

struct ComponentRow {
  Component component{};
  std::string_view name;
  std::optional<StateKind> kind;  // nothing: KV or aux
};
std::span<const ComponentRow> component_rows();

// How a source's list of items and a target's are brought together.
enum class Pairing : std::uint8_t {
  kOneEach,  // exactly one item on each side
  kPages,    // pages of the same tokens; one side may have a page more at its end (a sampled token,
             // padding)
  kRows,     // the same number; none on both sides: nothing to send
};
// How the ranks of a reference instance share the sharded axis, which its lists do not say.
enum class Sharding : std::uint8_t {
  kNone,    // all hold the same
  kBlocks,  // each an equal part of every block
  kHeads,   // each an equal part of the heads; all the same under MLA
  kFixed,   // cannot be told: both sides need the same TP size and one stage
};
struct StateRow {
  StateKind kind{};
  std::string_view name;  // the reference's
  Pairing pairing{};
  Sharding sharding{};
  // Pages of different sizes can be paired: the lists begin at the first token of the request.
  bool divisible = false;
};
const StateRow& row_of(StateKind kind);

// Compressed MLA keeps a row of its latent pages for every 4 or 128 tokens, or has none at a layer.
inline constexpr std::uint32_t kIndexedRatio = 4, kCoarseRatio = 128;
// Such a model's lists at reference ranks go section after section: the pools of one component of
// all layers of one ratio, or of all layers.
struct Section {
  Component component{};
  std::optional<std::uint32_t> ratio;
};
// Of the list of one kind of state, or of the KV cache. Empty: no list of a compressed model.
std::span<const Section> sections_of(std::optional<StateKind> kind);

// How many parts are copied, the first ones of both lists: items, where both sides' are of one
// size. kRefused with both counts and names.
Result<std::uint64_t> pair_items(StateKind kind, Parts parts, std::size_t source,
                                 std::size_t target, std::string_view source_name,
                                 std::string_view target_name);

}  // namespace kvferry::plan
