#include "src/plan/ranks.h"

#include <algorithm>

#include <fmt/format.h>

#include "src/plan/planner.h"

namespace kvferry::plan {

namespace {

Status refused(std::string message) {
  return Status(Code::kRefused, std::move(message));
}

Status check_sizes(const RankPlace& decode, const InstanceShape& prefill) {
  if (prefill.tp_size == 0 || decode.tp_size == 0 || prefill.pp_size == 0 || decode.pp_size == 0 ||
      prefill.cp_size == 0 || prefill.dp_size == 0) {
    return refused(fmt::format("a size of 0: prefill tp={} pp={} cp={} dp={}, decode tp={} pp={}",
                               prefill.tp_size, prefill.pp_size, prefill.cp_size, prefill.dp_size,
                               decode.tp_size, decode.pp_size));
  }
  if (decode.cp_size != 1) {
    return refused(fmt::format("context parallelism on the decode side: decode cp={} (must be 1)",
                               decode.cp_size));
  }
  return {};
}

bool divide(std::uint32_t a, std::uint32_t b) {
  return std::max(a, b) % std::min(a, b) == 0;
}

// Which of `p` prefill ranks decode rank `rank` of `d` contacts, [first, last].
struct TpRange {
  std::uint32_t first = 0, last = 0;
  [[nodiscard]] bool contains(std::uint32_t tp) const { return first <= tp && tp <= last; }
};
// Those whose even part of the whole meets this rank's.
TpRange share_of(std::uint32_t rank, std::uint32_t d, std::uint32_t p) {
  const auto first = static_cast<std::uint32_t>(std::uint64_t{rank} * p / d);
  const auto end = static_cast<std::uint32_t>(((std::uint64_t{rank} + 1) * p + d - 1) / d);
  return {first, end - 1};
}
TpRange holders_of(HeadRange heads, std::uint32_t kv_heads, std::uint32_t p) {
  TpRange range{p, 0};
  for (std::uint32_t tp = 0; tp < p; ++tp) {
    const HeadRange held = heads_of_rank(kv_heads, p, tp);
    if (held.begin >= heads.begin + heads.count || heads.begin >= held.begin + held.count) continue;
    range.first = std::min(range.first, tp);
    range.last = tp;
  }
  return range;
}

// Every rank, or the first one only; so many more Successes come from all of them.
std::uint32_t add_cp_ranks(RankMapping& map, std::uint32_t cp_size, bool all) {
  for (std::uint32_t i = 0; i < (all ? cp_size : 1); ++i) map.cp_ranks.push_back(i);
  return static_cast<std::uint32_t>(map.cp_ranks.size());
}

}  // namespace

Result<RankMapping> map_ranks(const RankPlace& decode, AttentionKind attention,
                              const InstanceShape& prefill, bool all_cp_ranks) {
  KVF_RETURN_IF_ERROR(check_sizes(decode, prefill));
  const std::uint32_t p = prefill.tp_size, d = decode.tp_size;
  if (!divide(p, d)) {
    return refused(
        fmt::format("tp sizes do not divide each other: prefill tp={}, decode tp={}", p, d));
  }
  if (decode.pp_size != 1 && decode.pp_size != prefill.pp_size) {
    return refused(fmt::format("decode pp={} is neither 1 nor prefill pp={}", decode.pp_size,
                               prefill.pp_size));
  }

  RankMapping map;
  const TpRange range = share_of(decode.tp_rank % d, d, p);
  for (std::uint32_t tp = range.first; tp <= range.last; ++tp) map.tp_ranks.push_back(tp);
  map.required_destinations.assign(map.tp_ranks.size(), d > p ? d / p : 1);
  std::uint32_t responses =
      attention.same_everywhere() ? 1 : static_cast<std::uint32_t>(map.tp_ranks.size());
  responses *= add_cp_ranks(map, prefill.cp_size, all_cp_ranks);
  if (decode.pp_size == prefill.pp_size) {
    map.pp_ranks = {decode.pp_rank};
  } else {
    for (std::uint32_t i = 0; i < prefill.pp_size; ++i) map.pp_ranks.push_back(i);
    responses *= prefill.pp_size;
  }
  map.required_responses = responses;
  return map;
}

Result<RankMapping> map_native_ranks(const RankPlace& decode, AttentionKind attention,
                                     std::uint32_t kv_heads, const InstanceShape& prefill,
                                     bool all_cp_ranks) {
  KVF_RETURN_IF_ERROR(check_sizes(decode, prefill));
  const std::uint32_t p = prefill.tp_size, d = decode.tp_size;
  // Ranks nest in each other when all sizes divide; else their heads say who meets whom.
  const bool nested =
      divide(p, d) && (kv_heads == 0 || (divide(kv_heads, p) && divide(kv_heads, d)));
  const bool by_heads = !nested && !attention.mla;
  if (by_heads && kv_heads == 0) {
    return refused(fmt::format(
        "tp sizes do not divide each other (prefill tp={}, decode tp={}) and the number of KV "
        "heads is not known",
        p, d));
  }
  // Whatever else is shared evenly over the ranks (state of any extent) lies in a rank's own part
  // of the whole.
  const auto contacts = [&](std::uint32_t rank) {
    const TpRange part = share_of(rank, d, p);
    if (!by_heads) return part;
    const TpRange heads = holders_of(heads_of_rank(kv_heads, d, rank), kv_heads, p);
    return TpRange{std::min(part.first, heads.first), std::max(part.last, heads.last)};
  };
  RankMapping map;
  const TpRange range = contacts(decode.tp_rank % d);
  for (std::uint32_t tp = range.first; tp <= range.last; ++tp) {
    map.tp_ranks.push_back(tp);
    std::uint32_t destinations = 0;
    for (std::uint32_t other = 0; other < d; ++other)
      destinations += contacts(other).contains(tp) ? 1 : 0;
    map.required_destinations.push_back(destinations * decode.pp_size);
  }
  add_cp_ranks(map, prefill.cp_size, all_cp_ranks);
  for (std::uint32_t i = 0; i < prefill.pp_size; ++i) map.pp_ranks.push_back(i);
  map.required_responses =
      static_cast<std::uint32_t>(map.tp_ranks.size() * map.cp_ranks.size() * map.pp_ranks.size());
  return map;
}

PagePart cp_part(std::uint64_t total, std::uint32_t size, std::uint32_t rank) {
  const std::uint64_t base = total / size, rest = total % size;
  const std::uint64_t begin = rank * base + std::min<std::uint64_t>(rank, rest);
  return {begin, begin + base + (rank < rest ? 1 : 0)};
}

}  // namespace kvferry::plan
