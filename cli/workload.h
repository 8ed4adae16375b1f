// The requests that a demo replays: from a trace, or made.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvferry/status.h"

namespace kvferry::cli {

struct Request {
  double arrival_ms = 0;
  std::uint64_t tokens = 0;  // of the prompt, after scaling
  std::vector<std::uint64_t>
      block_ids;  // content of each block of block_tokens tokens; empty: the request's own content
};

struct Workload {
  std::vector<Request> requests;
  std::uint64_t block_tokens = 512;  // after scaling
  double scale = 1;
  // Content of token t of request i.
  [[nodiscard]] std::uint64_t content_of(std::size_t request, std::uint64_t token) const;
};

struct WorkloadOptions {
  std::string trace;  // path; empty: requests are made
  std::optional<std::uint64_t> requests;
  std::optional<std::uint64_t> tokens;  // of each made request, before scaling
  std::optional<double> scale;          // nothing: chosen so that about `target_bytes` move
  std::uint64_t bytes_per_token = 1;    // moved, over all decode ranks
};

inline constexpr std::uint64_t kTraceBlockTokens = 512;

Result<Workload> make_workload(const WorkloadOptions& options);

}  // namespace kvferry::cli
