#include "src/plan/staging.h"

#include <algorithm>

namespace kvferry::plan {

Layout staging_layout(const Layout& pools, HeadRange heads, std::uint32_t pages,
                      std::uint64_t base) {
  Layout packed;
  packed.page_tokens = pools.page_tokens;
  for (const Slab& pool : pools.slabs) {
    if (heads.count == 0) break;  // a rank without a share of them
    if (share_of(pool) != kKvShare) continue;
    Slab& slab = packed.slabs.emplace_back(pool);
    slab.base = base;
    slab.item_count = pages;
    slab.head_begin = heads.begin;
    slab.head_count = heads.count;
    slab.head_stride = slab.head_bytes;
    slab.row_stride = std::uint64_t{slab.head_bytes} * heads.count;
    slab.item_bytes = slab.item_stride = slab.row_stride * slab.rows_per_item;
    base += slab.item_stride * pages;
  }
  return packed;
}

std::vector<HeadRange> staging_writers(std::uint32_t kv_heads, std::uint32_t source_tp,
                                       std::uint32_t target_tp, std::uint32_t target_rank) {
  const std::uint32_t writers = std::max(1U, source_tp / target_tp);
  const std::uint32_t first =
      source_tp >= target_tp ? target_rank * writers : target_rank / (target_tp / source_tp);
  const HeadRange wanted = heads_of_rank(kv_heads, target_tp, target_rank);
  std::vector<HeadRange> parts;
  for (std::uint32_t rank = first; rank < first + writers; ++rank) {
    const HeadRange held = heads_of_rank(kv_heads, source_tp, rank);
    const std::uint32_t begin = std::max(held.begin, wanted.begin),
                        end = std::min(held.begin + held.count, wanted.begin + wanted.count);
    parts.push_back({begin, end > begin ? end - begin : 0});
  }
  return parts;
}

}  // namespace kvferry::plan
