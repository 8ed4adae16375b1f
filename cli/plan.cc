#include "cli/plan.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/models.h"
#include "src/base/random.h"
#include "src/plan/components.h"
#include "src/plan/geometry.h"
#include "src/plan/proof.h"

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;
using plan::PlannedRank;

// Two instances and what must be known beside their layouts.
struct Instances {
  std::vector<PlannedRank> sources, targets;
  plan::InstanceRules rules;
  std::uint32_t sliding_window = 0;
};

// --- layouts as JSON

Component component_from(const std::string& name) {
  for (const plan::ComponentRow& row : plan::component_rows()) {
    if (row.name == name) return row.component;
  }
  throw std::runtime_error("component '" + name + "' is not known");
}

Json slab_to_json(const Slab& s) {
  return {{"component", to_string(s.component)},
          {"layer", s.layer},
          {"dtype", s.dtype},
          {"base", s.base},
          {"item_count", s.item_count},
          {"item_bytes", s.item_bytes},
          {"item_stride", s.item_stride},
          {"rows_per_item", s.rows_per_item},
          {"row_stride", s.row_stride},
          {"head_begin", s.head_begin},
          {"head_count", s.head_count},
          {"head_bytes", s.head_bytes},
          {"head_stride", s.head_stride}};
}

Slab slab_from_json(const Json& j) {
  Slab s;
  s.component = component_from(j.at("component"));
  s.layer = j.value("layer", 0U);
  s.dtype = j.value("dtype", DType::kUnknown);
  s.base = j.at("base");
  s.item_count = j.at("item_count");
  s.item_bytes = j.at("item_bytes");
  s.item_stride = j.value("item_stride", s.item_bytes);
  s.rows_per_item = j.value("rows_per_item", 1U);
  s.head_begin = j.value("head_begin", 0U);
  s.head_count = j.value("head_count", 1U);
  s.head_bytes = j.at("head_bytes");
  s.head_stride = j.value("head_stride", std::uint64_t{s.head_bytes});
  s.row_stride = j.value("row_stride", s.head_stride * s.head_count);
  return s;
}

std::string rank_name(const char* side, const RankPlace& p) {
  std::string name = fmt::format("{} tp{}", side, p.tp_rank);
  if (p.pp_size > 1) name += fmt::format(" pp{}", p.pp_rank);
  if (p.cp_size > 1) name += fmt::format(" cp{}", p.cp_rank);
  return name;
}

Json instance_to_json(const std::vector<PlannedRank>& ranks, const plan::InstanceRules& rules,
                      std::uint32_t sliding_window) {
  Json list = Json::array();
  for (const PlannedRank& rank : ranks) {
    Json slabs = Json::array();
    for (const Slab& slab : rank.layout.slabs) slabs.push_back(slab_to_json(slab));
    list.push_back({{"tp_rank", rank.place.tp_rank},
                    {"tp_size", rank.place.tp_size},
                    {"pp_rank", rank.place.pp_rank},
                    {"pp_size", rank.place.pp_size},
                    {"cp_rank", rank.place.cp_rank},
                    {"cp_size", rank.place.cp_size},
                    {"slabs", slabs}});
  }
  return {{"page_tokens", ranks.front().layout.page_tokens},
          {"mla", rules.attention.mla},
          {"hybrid_mla", rules.attention.hybrid_mla},
          {"kv_heads", rules.kv_heads},
          {"model_layers", rules.model_layers},
          {"sliding_window", sliding_window},
          {"ranks", list}};
}

// Throws with a reason; run_plan() catches it.
std::vector<PlannedRank> instance_from_json(const std::string& path, const char* side,
                                            Instances& both) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + " cannot be read");
  const Json json = Json::parse(file);
  both.rules.attention = {json.value("mla", false), json.value("hybrid_mla", false)};
  both.rules.kv_heads = json.value("kv_heads", 0U);
  both.rules.model_layers = json.value("model_layers", 0U);
  both.sliding_window = json.value("sliding_window", 0U);
  std::vector<PlannedRank> ranks;
  for (const Json& j : json.at("ranks")) {
    PlannedRank rank;
    rank.place = {.tp_rank = j.value("tp_rank", 0U),
                  .tp_size = j.value("tp_size", 1U),
                  .pp_rank = j.value("pp_rank", 0U),
                  .pp_size = j.value("pp_size", 1U),
                  .cp_rank = j.value("cp_rank", 0U),
                  .cp_size = j.value("cp_size", 1U)};
    rank.name = rank_name(side, rank.place);
    rank.layout.page_tokens = json.at("page_tokens");
    for (const Json& slab : j.at("slabs")) rank.layout.slabs.push_back(slab_from_json(slab));
    if (const Status status = validate(rank.layout); !status.ok())
      throw std::runtime_error(path + ": " + rank.name + ": " + status.message());
    ranks.push_back(std::move(rank));
  }
  if (ranks.empty()) throw std::runtime_error(path + ": no ranks");
  return ranks;
}

std::vector<PlannedRank> instance_of(const plan::Geometry& geometry, const Cut& cut,
                                     const char* side, std::uint32_t page_tokens,
                                     std::uint32_t tokens) {
  const std::uint32_t pages = (tokens + page_tokens - 1) / page_tokens;
  std::vector<PlannedRank> ranks;
  for (std::uint32_t tp = 0; tp < cut.tp; ++tp) {
    for (std::uint32_t pp = 0; pp < cut.pp; ++pp) {
      for (std::uint32_t cp = 0; cp < cut.cp; ++cp) {
        PlannedRank rank;
        rank.place = {.tp_rank = tp,
                      .tp_size = cut.tp,
                      .pp_rank = pp,
                      .pp_size = cut.pp,
                      .cp_rank = cp,
                      .cp_size = cut.cp};
        rank.name = rank_name(side, rank.place);
        rank.layout = plan::layout_of_rank(geometry, rank.place, page_tokens, pages, 1);
        plan::place_slabs(rank.layout, 1 << 20, 64);
        ranks.push_back(std::move(rank));
      }
    }
  }
  return ranks;
}

// --- one request

// Its pages in any order, its state as the kinds have it.
plan::RequestItems items_of(const Layout& layout, const Instances& both, std::uint32_t tokens,
                            std::uint64_t seed) {
  const std::uint32_t page = layout.page_tokens, pages = (tokens + page - 1) / page;
  Random random(seed);
  const auto shuffled = [&random](std::uint32_t count) {
    std::vector<PageIndex> list(count);
    std::iota(list.begin(), list.end(), 0);
    for (std::size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[random.below(i)]);
    return list;
  };
  plan::RequestItems items{shuffled(pages), {}};
  for (const StateKind kind : plan::kinds_of(layout)) {
    std::uint32_t count = plan::row_of(kind).pairing == plan::Pairing::kPages ? pages : 1;
    if (kind == StateKind::kSlidingWindow && both.sliding_window > 0)
      count = std::min(count, both.sliding_window / page + 1);
    items.states.at(static_cast<std::size_t>(kind)) = shuffled(count);
  }
  return items;
}

// "0-3,8" of a set.
std::string ranges(const std::set<std::uint32_t>& set) {
  std::string text;
  for (auto it = set.begin(); it != set.end();) {
    const std::uint32_t first = *it;
    std::uint32_t last = first;
    for (++it; it != set.end() && *it == last + 1; ++it) ++last;
    text += (text.empty() ? "" : ",") +
            (first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last));
  }
  return text.empty() ? "-" : text;
}

// What one pair moves.
struct Traffic {
  std::uint64_t bytes = 0, copies = 0;
  std::set<std::uint32_t> heads, layers;  // of the KV cache; layers of state too
};

void add_traffic(const CopyPlan& plan, Traffic& traffic) {
  traffic.bytes += bytes_of(plan);
  for (const CopyGroup& group : plan) {
    for (const Lane& lane : group.lanes) {
      const bool dense =
          lane.rows == 1 && lane.bytes == lane.source_item && lane.bytes == lane.target_item;
      for (const Run& run : group.runs)
        traffic.copies += dense ? 1 : std::uint64_t{run.count} * lane.rows;
    }
  }
}

void add_ground(const PlannedRank& source, const PlannedRank& target, plan::Shares writes,
                Traffic& traffic) {
  for (const Slab& from : source.layout.slabs) {
    if ((plan::share_of(from) & writes) == 0) continue;
    for (const Slab& to : target.layout.slabs) {
      if (to.component != from.component || to.layer != from.layer) continue;
      const std::uint32_t begin = std::max(from.head_begin, to.head_begin),
                          end = std::min(from.head_begin + from.head_count,
                                         to.head_begin + to.head_count);
      if (begin >= end) continue;
      traffic.layers.insert(from.layer);
      for (std::uint32_t h = begin; h < end && plan::share_of(from) == plan::kKvShare; ++h)
        traffic.heads.insert(h);
    }
  }
}

std::uint32_t number_of(const RankPlace& place) {
  return place.unique_rank();
}

bool write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (file) return true;
  fmt::print(stderr, "kvferry plan: cannot write {}\n", path);
  return false;
}

// Both instances, from cuts of a model or from files.
Instances load(const PlanOptions& o) {
  const auto is_file = [](const std::string& text) { return text.ends_with(".json"); };
  if (is_file(o.prefill) != is_file(o.decode))
    throw std::runtime_error("--prefill and --decode are two cuts or two JSON files");
  Instances both;
  if (is_file(o.prefill)) {
    both.targets = instance_from_json(o.decode, "decode", both);
    both.sources = instance_from_json(o.prefill, "prefill", both);
  } else {
    const auto geometry = load_model(o.model);
    if (!geometry.ok()) throw std::runtime_error(geometry.status().message());
    const auto p = parse_cut(o.prefill), d = parse_cut(o.decode);
    if (!p.ok()) throw std::runtime_error("--prefill: " + p.status().message());
    if (!d.ok()) throw std::runtime_error("--decode: " + d.status().message());
    both.sliding_window = geometry->sliding_window;
    both.rules.attention = geometry->attention;
    both.rules.kv_heads = geometry->kv_heads;
    both.sources = instance_of(*geometry, *p, "prefill", o.page_size, o.tokens);
    both.targets =
        instance_of(*geometry, *d, "decode",
                    o.decode_page_size == 0 ? o.page_size : o.decode_page_size, o.tokens);
  }
  both.rules.native = o.codec == "native";
  both.rules.all_cp_ranks = o.all_cp_ranks || both.rules.attention.hybrid_mla;
  return both;
}

}  // namespace

Status check_cuts(const plan::Geometry& geometry, const Cut& prefill, const Cut& decode,
                  bool native, std::uint32_t page_size, std::uint32_t decode_page_size) {
  const auto sources = instance_of(geometry, prefill, "prefill", page_size, page_size),
             targets = instance_of(geometry, decode, "decode", decode_page_size, decode_page_size);
  return plan::plan_instances(sources, targets,
                              {.native = native,
                               .attention = geometry.attention,
                               .kv_heads = geometry.kv_heads,
                               .model_layers = geometry.layers,
                               .all_cp_ranks = geometry.attention.hybrid_mla})
      .status();
}

int run_plan(const PlanOptions& o) {
  Instances both;
  try {
    both = load(o);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kvferry plan: {}\n", error.what());
    return kExitUsage;
  }
  if (!o.save_layouts.empty()) {
    for (const auto& [side, ranks] :
         {std::pair{"-prefill.json", &both.sources}, {"-decode.json", &both.targets}}) {
      if (!write_file(o.save_layouts + side,
                      instance_to_json(*ranks, both.rules, both.sliding_window).dump(1) + "\n"))
        return kExitUsage;
    }
  }

  Json json = {{"proved", false},
               {"problems", Json::array()},
               {"redundant", Json::array()},
               {"pairs", Json::array()},
               {"dummies", Json::array()},
               {"responses_expected", 0},
               {"responses_by_decode_rank", Json::array()}};
  const auto finish = [&](int code) {
    if (!o.json.empty() && !write_file(o.json, json.dump(2) + "\n")) return kExitUsage;
    return code;
  };
  const auto refuse = [&](const Status& status) {
    fmt::print("refused: {}\n", status.message());
    json["problems"].push_back(status.message());
    return finish(kExitWrong);
  };
  const auto plan = plan::plan_instances(both.sources, both.targets, both.rules);
  if (!plan.ok()) return refuse(plan.status());

  std::vector<plan::RequestItems> source_items, target_items;
  std::vector<plan::ProofRank> from, to;
  for (std::size_t i = 0; i < both.sources.size(); ++i) {
    source_items.push_back(items_of(both.sources[i].layout, both, o.tokens, 1));
    from.push_back({both.sources[i].name, &both.sources[i].layout, source_items.back()});
  }
  for (std::size_t i = 0; i < both.targets.size(); ++i) {
    target_items.push_back(items_of(both.targets[i].layout, both, o.tokens, 2));
    to.push_back({both.targets[i].name, &both.targets[i].layout, target_items.back()});
  }
  const auto deliveries = plan::deliveries_of(*plan, both.sources, both.targets, both.rules,
                                              source_items, target_items);
  if (!deliveries.ok()) return refuse(deliveries.status());
  const plan::Proof proof = plan::prove(
      from, to, *deliveries,
      {.replicas_allowed = !both.rules.native, .model_layers = both.rules.model_layers});

  const std::uint32_t page = both.sources.front().layout.page_tokens,
                      their_page = both.targets.front().layout.page_tokens;
  fmt::print(
      "{} prefill ranks, {} decode ranks, {}; one request of {} tokens, pages of {}\n\n",
      both.sources.size(), both.targets.size(), o.codec, o.tokens,
      page == their_page ? fmt::format("{}", page) : fmt::format("{} and {}", page, their_page));
  fmt::print("{:<22}{:<16}{:<12}{:<14}{:>14}{:>10}{:>12}\n", "from", "to", "heads", "layers",
             "bytes", "copies", "mean bytes");
  std::vector<PlanArrow> arrows;
  std::uint64_t total = 0;
  for (const plan::PlannedPair& pair : plan->pairs) {
    const PlannedRank &source = both.sources[pair.source], &target = both.targets[pair.target];
    if (pair.dummy()) {
      json["dummies"].push_back(
          {{"prefill_rank", number_of(source.place)}, {"decode_rank", number_of(target.place)}});
      continue;
    }
    Traffic traffic;
    for (const plan::Delivery& delivery : *deliveries) {
      if (delivery.source == pair.source && delivery.target == pair.target)
        add_traffic(delivery.plan, traffic);
    }
    if (pair.writes_aux) add_traffic({CopyGroup{pair.lanes.aux, {Run{0, 0, 1}}}}, traffic);
    add_ground(source, target, pair.writes, traffic);
    const std::uint64_t mean = traffic.copies == 0 ? 0 : traffic.bytes / traffic.copies;
    fmt::print("{:<22}{:<16}{:<12}{:<14}{:>14}{:>10}{:>12}\n", source.name, target.name,
               ranges(traffic.heads), ranges(traffic.layers), traffic.bytes, traffic.copies, mean);
    json["pairs"].push_back({{"prefill_rank", number_of(source.place)},
                             {"decode_rank", number_of(target.place)},
                             {"bytes", traffic.bytes},
                             {"copies", traffic.copies},
                             {"mean_bytes", mean},
                             {"heads", ranges(traffic.heads)},
                             {"layers", ranges(traffic.layers)}});
    arrows.push_back({pair.source, pair.target, traffic.bytes});
    total += traffic.bytes;
  }
  const std::size_t dummies = json["dummies"].size();
  std::uint32_t most = 0;
  for (const std::uint32_t responses : plan->responses) {
    json["responses_by_decode_rank"].push_back(responses);
    most = std::max(most, responses);
  }
  json["responses_expected"] = most;
  json["proved"] = proof.proved;
  json["problems"] = proof.problems;
  json["redundant"] = proof.redundant;
  json["bytes"] = total;
  fmt::print("\n{} bytes; each decode rank waits for at most {} responses", total, most);
  fmt::print("; {} ranks that contact each other have nothing to send\n", dummies);
  for (const std::string& text : proof.redundant) fmt::print("redundant: {}\n", text);
  for (const std::string& text : proof.problems) fmt::print("PROBLEM: {}\n", text);
  if (proof.proved) {
    fmt::print(
        "proved: {} bytes of KV and state, each written {}\n", proof.promised_bytes,
        proof.redundant.empty() ? "exactly once" : "with one value, some of them by several ranks");
  } else {
    fmt::print("NOT proved\n");
  }
  if (!o.svg.empty()) {
    const std::string title =
        fmt::format("{} → {}, {} tokens, {} MB, {}", o.prefill, o.decode, o.tokens, total / 1000000,
                    proof.proved ? "proved" : "NOT proved");
    if (!write_file(o.svg, draw_plan(both.sources, both.targets, arrows, title))) return kExitUsage;
  }
  return finish(proof.proved ? kExitOk : kExitWrong);
}

}  // namespace kvferry::cli
