// The memory of one rank, described by itself: what lies where, in which units, for which layer and
// heads.
//
// A slab is one pool. Strides replace packing rules: [tokens, heads], [heads, tokens], K and V
// interleaved in one block are all the same to the planner. Values only; nobody owns memory here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvferry/export.h"
#include "kvferry/status.h"

namespace kvferry {

// What a slab holds. State components have their place here; the planner refuses those that it does
// not know.
enum class Component : std::uint8_t {
  kKey = 0,
  kValue = 1,
  kLatent = 2,  // MLA: one compressed vector per token, the same on every TP rank
  kIndex = 3,
  kMambaConv = 4,
  kMambaTemporal = 5,
  kSlidingWindow = 6,
  kAux = 15,  // one small row per request; `layer` is the number of the aux buffer
};
KVF_API std::string_view to_string(Component component);

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
  std::uint32_t head_begin =
      0;  // the part of the sharded axis that lives here: [head_begin, +head_count)
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

}  // namespace kvferry
