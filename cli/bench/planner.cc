#include <stdexcept>

#include <fmt/format.h>

#include "cli/bench/bench.h"
#include "cli/bench/common.h"
#include "kvferry/data_plane.h"
#include "src/plan/geometry.h"
#include "src/plan/instance_plan.h"
#include "src/plan/planner.h"

namespace kvferry::cli {
namespace {

constexpr std::size_t kBlocksMax = 1 << 20;

struct Case {
  const char* name;
  const char* text;
  std::uint32_t layers, source_tp, target_tp, page_tokens, pages;
  std::size_t blocks;  // of the flat list that an engine that moves lists must be handed
};

void one(const Case& c, const BenchOptions& options, std::vector<Figure>& figures) {
  const plan::Geometry geometry{.name = "llama-3.1-8b",
                                .layers = c.layers,
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
    CopyPlan plan;
    if (const Status status = plan::plan_list(lanes->kv, {s, 0}, {t, 0}, 0, c.pages, plan);
        !status.ok())
      throw std::runtime_error(status.to_string());
    plan_ms.push_back(seconds_since(begin) * 1e3);
    // A list of millions would measure the memory: of those a part, as often as it fits.
    const std::size_t parts = (c.blocks + kBlocksMax - 1) / kBlocksMax;
    CopyPlan part = plan;
    part[0].runs.resize(part[0].runs.size() / parts);
    begin = Clock::now();
    const auto list = plan::expand(part);
    list_ms.push_back(seconds_since(begin) * 1e3 * static_cast<double>(parts));
    std::uint64_t bytes = 0;
    for (const plan::Block& block : list) bytes += block.bytes;
    const bool whole = parts > 1 || list.size() == c.blocks;
    right += whole && bytes == bytes_of(part) ? 1 : 0;
  }
  if (right != options.pairs * 3) throw std::runtime_error("the plan is wrong");
  figures.push_back({c.name, median(plan_ms), "ms", median(list_ms)});
  fmt::print("planner, {}: {:.4f} ms (the same as a flat list of {} blocks: {:.1f} ms)\n", c.text,
             figures.back().value, c.blocks, figures.back().baseline);
}

// Two whole instances of 64 ranks each, of another size of pages' heads: who writes what, and the
// proof of it, as the ranks make it when they meet.
void prove_instances(const BenchOptions& options, std::vector<Figure>& figures) {
  constexpr std::uint32_t kRanks = 64;
  const plan::Geometry geometry{.name = "94 layers, 64 heads",
                                .layers = 94,
                                .attention = {},
                                .kv_heads = kRanks,
                                .key_head_bytes = 256,
                                .value_head_bytes = 256,
                                .dtype = DType::kBFloat16,
                                .aux_bytes = {64}};
  const auto instance = [&](const char* side, std::uint32_t tp, std::uint32_t pp) {
    std::vector<plan::PlannedRank> ranks;
    for (std::uint32_t i = 0; i < tp * pp; ++i) {
      plan::PlannedRank rank;
      rank.place = {.tp_rank = i / pp, .tp_size = tp, .pp_rank = i % pp, .pp_size = pp};
      rank.name = fmt::format("{} {}", side, i);
      rank.layout = plan::layout_of_rank(geometry, rank.place, 16, 4, 1);
      plan::place_slabs(rank.layout, 1 << 20, 64);
      ranks.push_back(std::move(rank));
    }
    return ranks;
  };
  const auto sources = instance("prefill", 16, 4), targets = instance("decode", kRanks, 1);
  plan::InstanceRules rules;
  rules.kv_heads = kRanks;
  const plan::RequestItems page{{0}, {}};
  const std::vector<plan::RequestItems> pages(kRanks, page);
  std::vector<plan::ProofRank> from, to;
  for (const auto& rank : sources) from.push_back({rank.name, &rank.layout, page});
  for (const auto& rank : targets) to.push_back({rank.name, &rank.layout, page});
  std::vector<double> plan_ms, proof_ms;
  for (std::uint32_t i = 0; i < options.pairs; ++i) {
    auto begin = Clock::now();
    const auto plan = plan::plan_instances(sources, targets, rules);
    if (!plan.ok()) throw std::runtime_error(plan.status().to_string());
    const auto deliveries = plan::deliveries_of(*plan, sources, targets, rules, pages, pages);
    plan_ms.push_back(seconds_since(begin) * 1e3);
    begin = Clock::now();
    const plan::Proof proof = plan::prove(from, to, *deliveries);
    proof_ms.push_back(seconds_since(begin) * 1e3);
    if (!proof.proved) throw std::runtime_error("not proved: " + proof.problems.front());
  }
  figures.push_back({"planner.prove_64x64_ms", median(proof_ms), "ms", median(plan_ms)});
  fmt::print("planner, proof of 64 x 64 ranks, 94 layers: {:.1f} ms (planning them: {:.1f} ms)\n",
             figures.back().value, figures.back().baseline);
}

}  // namespace

void bench_planner(const BenchOptions& options, std::vector<Figure>& figures) {
  one({"planner.fragmented_8k_ms", "8192 tokens, page size 1, all fragmented, 32 layers K and V",
       32, 1, 1, 1, 8192, 8192ULL * 64},
      options, figures);
  // Each target rank has half of a source rank's heads: every token is a row of its own.
  one({"planner.slices_2k_ms", "TP 4 to 8, 2048 tokens, page size 16, 32 layers K and V", 32, 4, 8,
       16, 128, 2048ULL * 64},
      options, figures);
  one({"planner.slices_128k_ms", "TP 4 to 8, 131072 tokens, page size 16, 94 layers K and V", 94, 4,
       8, 16, 8192, 131072ULL * 188},
      options, figures);
  prove_instances(options, figures);
}

}  // namespace kvferry::cli
