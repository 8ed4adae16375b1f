#include "src/plan/ranks.h"

#include <algorithm>

#include <fmt/format.h>

namespace kvferry::plan {

Result<RankMapping> map_ranks(const RankPlace& decode, AttentionKind attention,
                              const InstanceShape& prefill, bool all_cp_ranks) {
  const auto refused = [](std::string message) {
    return Status(Code::kRefused, std::move(message));
  };
  const std::uint32_t p = prefill.tp_size, d = decode.tp_size;
  if (p == 0 || d == 0 || prefill.pp_size == 0 || prefill.cp_size == 0 || prefill.dp_size == 0) {
    return refused(fmt::format("a size of 0: prefill tp={} pp={} cp={} dp={}, decode tp={}", p,
                               prefill.pp_size, prefill.cp_size, prefill.dp_size, d));
  }
  if (std::max(p, d) % std::min(p, d) != 0) {
    return refused(
        fmt::format("tp sizes do not divide each other: prefill tp={}, decode tp={}", p, d));
  }
  if (decode.cp_size != 1) {
    return refused(fmt::format("context parallelism on the decode side: decode cp={} (must be 1)",
                               decode.cp_size));
  }
  if (decode.pp_size != 1 && decode.pp_size != prefill.pp_size) {
    return refused(fmt::format("decode pp={} is neither 1 nor prefill pp={}", decode.pp_size,
                               prefill.pp_size));
  }

  RankMapping map;
  const std::uint32_t rank = decode.tp_rank % d;
  std::uint32_t responses = 1;
  if (p == d) {
    map.tp_ranks = {rank};
  } else if (d > p) {
    map.tp_ranks = {rank / (d / p)};
    map.required_destinations = d / p;
  } else {
    const std::uint32_t ratio = p / d;
    for (std::uint32_t i = 0; i < ratio; ++i) map.tp_ranks.push_back(rank * ratio + i);
    responses = attention.mla ? 1 : ratio;
  }

  if (prefill.cp_size == 1 || !all_cp_ranks) {
    map.cp_ranks = {0};
  } else {
    for (std::uint32_t i = 0; i < prefill.cp_size; ++i) map.cp_ranks.push_back(i);
    responses *= prefill.cp_size;
  }

  if (decode.pp_size == prefill.pp_size) {
    map.pp_ranks = {decode.pp_rank};
  } else {
    for (std::uint32_t i = 0; i < prefill.pp_size; ++i) map.pp_ranks.push_back(i);
    responses *= prefill.pp_size;
  }
  map.required_responses = responses;
  return map;
}

PagePart cp_part(std::uint64_t total, std::uint32_t size, std::uint32_t rank) {
  const std::uint64_t base = total / size, rest = total % size;
  const std::uint64_t begin = rank * base + std::min<std::uint64_t>(rank, rest);
  return {begin, begin + base + (rank < rest ? 1 : 0)};
}

}  // namespace kvferry::plan
