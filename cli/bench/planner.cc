#include <stdexcept>

#include <fmt/format.h>

#include "cli/bench/bench.h"
#include "cli/bench/common.h"
#include "kvferry/data_plane.h"
#include "src/plan/geometry.h"
#include "src/plan/planner.h"

namespace kvferry::cli {
namespace {

struct Case {
  const char* name;
  const char* text;
  std::uint32_t source_tp, target_tp, page_tokens, pages;
  std::size_t blocks;  // of the flat list that an engine that moves lists must be handed
};

void one(const Case& c, const BenchOptions& options, std::vector<Figure>& figures) {
  const plan::Geometry geometry{.name = "llama-3.1-8b",
                                .layers = 32,
                                .attention = {},
                                .kv_heads = 8,
                                .key_head_bytes = 256,
                                .value_head_bytes = 256,
                                .dtype = DType::kBFloat16,
                                .aux_bytes = {}};
  const auto layout_of = [&](std::uint32_t tp) {
    Layout layout = plan::layout_of_rank(geometry, {.tp_rank = 0, .tp_size = tp}, c.page_tokens,
                                         c.pages * 2, 0);
    plan::place_slabs(layout, 1 << 20, 4096);
    return layout;
  };
  const auto lanes =
      plan::pair_lanes(layout_of(c.source_tp), layout_of(c.target_tp), "source", "target");
  if (!lanes.ok()) throw std::runtime_error(lanes.status().to_string());
  const auto source = page_order(c.pages * 2, 1, true), target = page_order(c.pages * 2, 2, true);
  const std::span<const PageIndex> s(source.data(), c.pages), t(target.data(), c.pages);
  std::vector<double> plan_ms, list_ms;
  std::uint64_t right = 0;
  for (std::uint32_t i = 0; i < options.pairs * 3; ++i) {
    auto begin = Clock::now();
    auto runs = plan::make_runs(s, t);
    const CopyPlan plan{CopyGroup{lanes->kv, std::move(*runs)}};
    plan_ms.push_back(seconds_since(begin) * 1e3);
    begin = Clock::now();
    const auto list = plan::expand(plan);
    list_ms.push_back(seconds_since(begin) * 1e3);
    std::uint64_t bytes = 0;
    for (const plan::Block& block : list) bytes += block.bytes;
    right += list.size() == c.blocks && bytes == bytes_of(plan) ? 1 : 0;
  }
  if (right != options.pairs * 3) throw std::runtime_error("the plan is wrong");
  figures.push_back({c.name, median(plan_ms), "ms", median(list_ms)});
  fmt::print("planner, {}: {:.4f} ms (the same as a flat list of {} blocks: {:.1f} ms)\n", c.text,
             figures.back().value, c.blocks, figures.back().baseline);
}

}  // namespace

void bench_planner(const BenchOptions& options, std::vector<Figure>& figures) {
  one({"planner.fragmented_8k_ms", "8192 tokens, page size 1, all fragmented, 32 layers K and V", 1,
       1, 1, 8192, 8192ULL * 64},
      options, figures);
  // Each target rank has half of a source rank's heads: every token is a row of its own.
  one({"planner.slices_2k_ms", "TP 4 to 8, 2048 tokens, page size 16, 32 layers K and V", 4, 8, 16,
       128, 2048ULL * 64},
      options, figures);
}

}  // namespace kvferry::cli
