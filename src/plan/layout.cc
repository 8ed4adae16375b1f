#include "kvferry/layout.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "src/base/hash.h"

namespace kvferry {

std::uint64_t layout_hash(const Layout& layout) {
  Fnv hash;
  const auto add = [&hash](auto... numbers) {
    (hash.add(static_cast<std::uint64_t>(numbers)), ...);
  };
  add(layout.page_tokens, layout.slabs.size());
  for (const Slab& s : layout.slabs) {
    add(s.component, s.layer, s.dtype, s.memory.kind, s.memory.device, s.item_count, s.item_bytes,
        s.item_stride, s.rows_per_item, s.row_stride, s.head_begin, s.head_count, s.head_bytes,
        s.head_stride);
  }
  return hash.value();
}

Status validate(const Layout& layout) {
  const auto bad = [](const Slab& slab, const std::string& why) {
    return Status(Code::kInvalidArgument, fmt::format("slab {} of layer {}: {}",
                                                      to_string(slab.component), slab.layer, why));
  };
  if (layout.page_tokens == 0) return Status(Code::kInvalidArgument, "page_tokens is 0");
  std::map<std::tuple<Component, std::uint32_t>,
           std::vector<std::pair<std::uint64_t, std::uint64_t>>>
      heads;
  for (const Slab& slab : layout.slabs) {
    if (to_string(slab.component) == "unknown") {
      return bad(slab,
                 fmt::format("component number {} is not known", static_cast<int>(slab.component)));
    }
    if (slab.item_count == 0 || slab.item_bytes == 0) {
      return bad(slab, fmt::format("{} items of {} bytes", slab.item_count, slab.item_bytes));
    }
    if (slab.item_stride < slab.item_bytes) {
      return bad(slab, fmt::format("item stride {} is below item size {}", slab.item_stride,
                                   slab.item_bytes));
    }
    if (slab.head_count == 0 || slab.head_bytes == 0 || slab.rows_per_item == 0) {
      return bad(slab, fmt::format("{} rows of {} heads of {} bytes", slab.rows_per_item,
                                   slab.head_count, slab.head_bytes));
    }
    constexpr std::uint64_t kStrideMax = std::numeric_limits<std::uint32_t>::max();
    if (slab.item_bytes > kStrideMax || slab.row_stride > kStrideMax ||
        slab.head_stride > kStrideMax || slab.item_stride > (std::uint64_t{1} << 40)) {
      return bad(slab,
                 fmt::format("an item of {} bytes, row stride {}, head stride {} is beyond 4 GiB",
                             slab.item_bytes, slab.row_stride, slab.head_stride));
    }
    const std::uint64_t extent = std::uint64_t{slab.rows_per_item - 1} * slab.row_stride +
                                 std::uint64_t{slab.head_count - 1} * slab.head_stride +
                                 slab.head_bytes;
    if (extent > slab.item_bytes) {
      return bad(slab, fmt::format("rows and heads need {} bytes, the item has {}", extent,
                                   slab.item_bytes));
    }
    const unsigned __int128 end =
        static_cast<unsigned __int128>(slab.base) +
        static_cast<unsigned __int128>(slab.item_stride) * slab.item_count;
    if (end > std::numeric_limits<std::uint64_t>::max()) {
      return bad(slab, fmt::format("base {:#x} + {} items of stride {} overflows", slab.base,
                                   slab.item_count, slab.item_stride));
    }
    auto& ranges = heads[{slab.component, slab.layer}];
    for (const auto& [begin, count] : ranges) {
      if (slab.head_begin < begin + count &&
          begin < std::uint64_t{slab.head_begin} + slab.head_count) {
        return bad(slab, fmt::format("heads from {} are there twice",
                                     std::max<std::uint64_t>(begin, slab.head_begin)));
      }
    }
    ranges.emplace_back(slab.head_begin, slab.head_count);
  }
  return {};
}

}  // namespace kvferry
