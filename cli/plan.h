// `kvferry plan`: who sends what to whom between two instances, and whether every byte arrives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/demo.h"
#include "kvferry/status.h"
#include "src/plan/geometry.h"
#include "src/plan/instance_plan.h"

namespace kvferry::cli {

struct PlanOptions {
  std::string model = "llama-3.1-8b";
  // Cuts ("tp=2,pp=1"), or JSON files that describe the ranks' layouts.
  std::string prefill = "tp=2", decode = "tp=4";
  std::string codec = "native";
  std::uint32_t tokens = 2048, page_size = 16;
  std::uint32_t decode_page_size = 0;  // 0: as page_size
  bool all_cp_ranks = false;
  std::string json, svg;
  std::string save_layouts;  // a prefix: writes PREFIX-prefill.json and PREFIX-decode.json
};

// Whether ranks of two cuts of a model can be brought together at all.
Status check_cuts(const plan::Geometry& geometry, const Cut& prefill, const Cut& decode,
                  bool native, std::uint32_t page_size, std::uint32_t decode_page_size);

// kExitOk: proved; kExitWrong: not proved, or refused; kExitUsage: bad arguments.
int run_plan(const PlanOptions& options);

// One pair of ranks in a picture.
struct PlanArrow {
  std::size_t source = 0, target = 0;
  std::uint64_t bytes = 0;
};
// Ranks as boxes (layers downwards, heads to the right, what they hold filled), arrows between them
// as wide as their bytes.
std::string draw_plan(const std::vector<plan::PlannedRank>& sources,
                      const std::vector<plan::PlannedRank>& targets,
                      const std::vector<PlanArrow>& arrows, const std::string& title);

}  // namespace kvferry::cli
