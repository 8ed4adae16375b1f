// The packed form of a chunk against what the reference packed and unpacked: real bytes, moved by
// the planner's copies.
#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>

#include "src/plan/geometry.h"
#include "src/plan/staging.h"
#include "tests/vectors/vectors.h"

namespace kvferry::vectors {
namespace {

using plan::HeadRange;

void copy(const CopyPlan& plan) {
  for (const plan::Block& block : plan::expand(plan))
    std::memcpy(reinterpret_cast<void*>(block.target), reinterpret_cast<const void*>(block.source),
                block.bytes);
}
std::uint64_t address(std::string& bytes) {
  return reinterpret_cast<std::uint64_t>(bytes.data());
}
std::uint64_t bytes_in(const Layout& layout) {
  std::uint64_t bytes = 0;
  for (const Slab& slab : layout.slabs) bytes += slab.item_stride * slab.item_count;
  return bytes;
}

// The K and V pools of one rank, one for each layer, as hex in a case.
struct Pools {
  Pools(const Json& in, HeadRange heads, std::uint32_t head_bytes) {
    const std::uint32_t layers = in.at("layers"), pages = in.at("pool_pages");
    layout.page_tokens = in.at("page_size");
    for (std::uint32_t i = 0; i < 2 * layers; ++i) {
      Slab slab;
      slab.component = i < layers ? Component::kKey : Component::kValue;
      slab.layer = i % layers;
      slab.item_count = pages;
      slab.rows_per_item = layout.page_tokens;
      slab.head_begin = heads.begin;
      slab.head_count = heads.count;
      slab.head_bytes = head_bytes;
      slab.head_stride = head_bytes;
      slab.row_stride = std::uint64_t{head_bytes} * heads.count;
      slab.item_bytes = slab.item_stride = slab.row_stride * slab.rows_per_item;
      memory.emplace_back(slab.item_stride * pages, '\0');
      slab.base = address(memory.back());
      layout.slabs.push_back(slab);
    }
  }
  // Of K or V: the pools' bytes, layer by layer.
  [[nodiscard]] Json hex(bool values) const {
    Json list = Json::array();
    const std::size_t half = memory.size() / 2;
    for (std::size_t i = values ? half : 0; i < (values ? 2 * half : half); ++i)
      list.push_back(to_hex(memory[i]));
    return list;
  }
  Layout layout;
  std::deque<std::string> memory;
};

TEST(Vector, ComputeStagingLayout) {
  int compared = 0;
  each_case("compute_staging_layout", [&compared](const Json& in, const Json& expected) {
    const std::uint32_t p = in.at("src_attn_tp_size"), d = in.at("dst_attn_tp_size"),
                        heads = in.at("total_kv_heads"), tokens = in.at("num_tokens");
    const auto divides = [](std::uint32_t a, std::uint32_t b) {
      return std::max(a, b) % std::min(a, b) == 0;
    };
    if (!divides(p, d)) return;  // refused when the ranks are mapped
    // Where heads and ranks do not divide, the reference divides down and loses heads.
    const bool even = divides(p, heads) && divides(d, heads);
    const std::uint32_t rank = in.at("dst_tp_rank");
    if (rank >= d) return;  // no such rank
    const auto parts = plan::staging_writers(heads, p, d, rank);
    ASSERT_EQ(parts.size(), expected.at("num_writers").get<std::size_t>());
    const plan::Geometry model{.layers = in.at("num_layers"),
                               .kv_heads = heads,
                               .key_head_bytes = in.at("bytes_per_head_token"),
                               .value_head_bytes = in.at("bytes_per_head_token"),
                               .aux_bytes = {8}};
    const Layout pools = plan::layout_of_rank(model, {.tp_rank = rank, .tp_size = d}, 1, 1, 1);
    Json bytes = Json::array();
    std::uint64_t total = 0;
    for (const HeadRange& part : parts) {
      bytes.push_back(bytes_in(plan::staging_layout(pools, part, tokens, 0)));
      total += bytes.back().get<std::uint64_t>();
    }
    if (even) {
      ++compared;
      EXPECT_EQ(bytes, expected.at("writer_bytes"));
      EXPECT_EQ(total, expected.at("total"));
    }
  });
  if (!IsSkipped()) {
    EXPECT_GE(compared, 50);
  }
}

TEST(Vector, StagingGatherLayout) {
  each_case("staging_gather_layout", [](const Json& in, const Json& expected) {
    const std::uint32_t heads = in.at("heads");
    Pools pools(in, {0, heads}, in.at("head_dim"));
    const std::uint32_t layers = in.at("layers");
    for (std::uint32_t i = 0; i < layers; ++i) {
      const std::string k = from_hex(in.at("k").at(i)), v = from_hex(in.at("v").at(i));
      ASSERT_EQ(k.size(), pools.memory[i].size());
      std::memcpy(pools.memory[i].data(), k.data(), k.size());
      std::memcpy(pools.memory[layers + i].data(), v.data(), v.size());
    }
    const auto pages = in.at("page_indices").get<std::vector<PageIndex>>();
    std::vector<PageIndex> chunk(pages.size());
    std::iota(chunk.begin(), chunk.end(), 0);
    std::string staging(expected.at("size").get<std::size_t>(), '\xEE');
    const Layout packed =
        plan::staging_layout(pools.layout, {in.at("head_start"), in.at("num_heads")},
                             static_cast<std::uint32_t>(pages.size()), address(staging));
    ASSERT_EQ(bytes_in(packed), staging.size());
    const auto lanes = plan::pair_lanes(pools.layout, packed, "pools", "staging");
    ASSERT_TRUE(lanes.ok()) << lanes.status().to_string();
    CopyPlan plan;
    ASSERT_TRUE(plan::plan_list(lanes->kv, {pages, 0}, {chunk, 0}, 0, pages.size(), plan).ok());
    copy(plan);
    EXPECT_EQ(to_hex(staging), expected.at("staging_hex"));
  });
}

TEST(Vector, StagingScatterLayout) {
  each_case("staging_scatter_layout", [](const Json& in, const Json& expected) {
    const std::uint32_t p = in.at("prefill_tp"), d = in.at("decode_tp"),
                        rank = in.at("dst_tp_rank"), heads = in.at("total_kv_heads");
    Pools pools(in, plan::heads_of_rank(heads, d, rank), in.at("head_dim"));
    const auto pages = in.at("page_indices").get<std::vector<PageIndex>>();
    std::vector<PageIndex> chunk(pages.size());
    std::iota(chunk.begin(), chunk.end(), 0);
    std::string staging = from_hex(in.at("staging_hex"));
    std::uint64_t at = address(staging);
    for (const HeadRange& part : plan::staging_writers(heads, p, d, rank)) {
      const Layout packed =
          plan::staging_layout(pools.layout, part, static_cast<std::uint32_t>(pages.size()), at);
      at += bytes_in(packed);
      const auto lanes = plan::pair_lanes(packed, pools.layout, "staging", "pools");
      ASSERT_TRUE(lanes.ok()) << lanes.status().to_string();
      CopyPlan plan;
      ASSERT_TRUE(plan::plan_list(lanes->kv, {chunk, 0}, {pages, 0}, 0, pages.size(), plan).ok());
      copy(plan);
    }
    EXPECT_EQ(at, address(staging) + staging.size());
    EXPECT_EQ(pools.hex(false), expected.at("k"));
    EXPECT_EQ(pools.hex(true), expected.at("v"));
  });
}

}  // namespace
}  // namespace kvferry::vectors
