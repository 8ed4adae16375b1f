// The memory of one rank, described by itself: what lies where, in which units, for which layer and
// heads.
//
// A slab is one pool. Strides replace packing rules: [tokens, heads], [heads, tokens], K and V
// interleaved in one block are all the same to the planner. Values only; nobody owns memory here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvferry/export.h"
#include "kvferry/status.h"
#include "kvferry/types.h"

namespace kvferry {

// What a slab holds. kKey, kValue, kLatent and kLatentIndex are the KV cache, whose items are the
// pages of a request; the others but kAux are state, each of one StateKind.
enum class Component : std::uint8_t {
  kKey = 0,
  kValue = 1,
  kLatent = 2,  // MLA: one compressed vector per token, the same on every TP rank
  kIndex = 3,   // of a sparse attention (DSA): the same on every TP rank
  kMambaConv = 4,
  kMambaTemporal = 5,
  kSlidingKey = 6,
  kSlidingValue = 7,
  kSlidingRing = 8,
  kCompressedState = 9,
  kMiniMaxIndexKey = 10,
  kLatentIndex = 11,             // of compressed MLA: the index beside a layer's latent pages
  kSlidingCompressed = 12,       // of compressed MLA: what a layer has compressed of its window
  kSlidingCompressedIndex = 13,  // and the index of that
  kAux = 15,  // one small row per request; `layer` is the number of the aux buffer
};
KVF_API std::string_view to_string(Component component);

// Memory that a request owns beside its KV pages. Each kind has its own list of items on either
// side of a room; the numbers are those of the native protocol.
enum class StateKind : std::uint8_t {
  kMamba = 0,          // one slot: kMambaConv, kMambaTemporal
  kSlidingWindow = 1,  // pages of sliding-window layers: kSlidingKey, kSlidingValue,
                       // kSlidingCompressed, kSlidingCompressedIndex
  kSparseIndex = 2,    // pages of the index cache: kIndex
  kSlidingRing = 3,    // rows: kSlidingRing
  kCompressed = 4,     // rows: kCompressedState
  kMiniMaxIndex = 5,   // pages: kMiniMaxIndexKey
};
inline constexpr std::size_t kStateKinds = 6;
KVF_API std::string_view to_string(StateKind kind);
// Nothing for the KV cache and for aux rows.
KVF_API std::optional<StateKind> state_of(Component component);

// The items that a request owns of one kind, in order; what a slab of that kind has `item_count`
// of.
struct StateItems {
  StateKind kind{};
  std::vector<PageIndex> items;
  friend bool operator==(const StateItems&, const StateItems&) = default;
};

enum class DType : std::uint8_t {
  kUnknown = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat8 = 3,
  kFloat32 = 4,
  kInt8 = 5
};

// Where the bytes are. Host only, so far; device numbers the accelerator.
struct Memory {
  enum class Kind : std::uint8_t { kHost = 0, kDevice = 1 } kind = Kind::kHost;
  std::uint32_t device = 0;
  friend auto operator<=>(const Memory&, const Memory&) = default;
};

struct Slab {
  Component component = Component::kKey;
  std::uint32_t layer = 0;  // counted over the whole model, draft layers after it
  DType dtype = DType::kUnknown;
  Memory memory;
  std::uint64_t base = 0;           // address in the owner's process
  std::uint32_t item_count = 0;     // items: pages, state slots or aux rows
  std::uint64_t item_bytes = 0;     // extent of one item, gaps between its rows included
  std::uint64_t item_stride = 0;    // from one item to the next
  std::uint32_t rows_per_item = 1;  // tokens in a page; 1 for slots and aux rows
  std::uint64_t row_stride = 0;     // from one row (token) to the next inside an item
  // The part of the model's sharded axis that lives here, [head_begin, +head_count): heads, or
  // whatever a state is cut along. What is cut in several blocks (a mamba convolution of query, key
  // and value) is one slab for each block, all in the same items.
  std::uint32_t head_begin = 0;
  std::uint32_t head_count = 1;
  std::uint32_t head_bytes = 0;  // bytes of one head in one row
  std::uint64_t head_stride = 0;
  friend auto operator<=>(const Slab&, const Slab&) = default;
};

struct Layout {
  std::uint32_t page_tokens = 1;
  std::vector<Slab> slabs;
  friend bool operator==(const Layout&, const Layout&) = default;
};

// Checks a layout for itself: sizes positive, rows and heads inside the item, address arithmetic
// without overflow, no two slabs for the same component, layer and head. Says which slab and which
// value.
KVF_API Status validate(const Layout& layout);

// A number for all that plans are made from, everything but the bases: ranks whose layouts have the
// same one are planned for alike. The same on every machine; stands in messages.
KVF_API std::uint64_t layout_hash(const Layout& layout);

}  // namespace kvferry
