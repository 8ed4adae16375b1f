#include "cli/workload.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "src/base/random.h"

namespace kvferry::cli {
namespace {

constexpr std::uint64_t kTargetBytes = 3000000000ULL;  // auto scale: within 2 to 4 GB
constexpr std::uint64_t kMadeRequests = 48;
constexpr std::uint64_t kTokensMax = 1ULL << 24;

Result<std::vector<Request>> read_trace(const std::string& path, std::uint64_t limit) {
  std::ifstream file(path);
  if (!file) return Status(Code::kInvalidArgument, fmt::format("trace '{}' cannot be read", path));
  std::vector<Request> requests;
  std::string line;
  for (std::size_t number = 1; requests.size() < limit && std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto json = nlohmann::json::parse(line, nullptr, false);
    const auto bad = [&](std::string_view why) {
      return Status(Code::kInvalidArgument, fmt::format("{}:{}: {}", path, number, why));
    };
    if (json.is_discarded() || !json.is_object()) return bad("not a JSON object");
    for (const char* field : {"timestamp", "input_length", "hash_ids"}) {
      if (!json.contains(field)) return bad(fmt::format("field '{}' is missing", field));
    }
    if (!json["timestamp"].is_number() || !json["input_length"].is_number_unsigned() ||
        !json["hash_ids"].is_array())
      return bad("a field has another type");
    Request request;
    request.arrival_ms = json["timestamp"].get<double>();
    request.tokens = json["input_length"].get<std::uint64_t>();
    if (request.tokens == 0 || request.tokens > kTokensMax)
      return bad(fmt::format("input_length {} is not from 1 to {}", request.tokens, kTokensMax));
    for (const auto& id : json["hash_ids"]) {
      if (!id.is_number_unsigned()) return bad("a hash id is no whole number");
      request.block_ids.push_back(id.get<std::uint64_t>() + 1);
    }
    requests.push_back(std::move(request));
  }
  if (requests.empty())
    return Status(Code::kInvalidArgument, fmt::format("trace '{}' has no requests", path));
  return requests;
}

std::vector<Request> make_requests(std::uint64_t count, std::optional<std::uint64_t> tokens) {
  std::vector<Request> requests(count);
  Random random(2024);
  for (std::uint64_t i = 0; i < count; ++i) {
    requests[i].arrival_ms = static_cast<double>(i) * 50;
    const std::uint64_t drawn = 128ULL << random.below(5);
    requests[i].tokens = tokens.value_or(drawn + random.below(drawn));
  }
  return requests;
}

// Tokens that move when blocks that an earlier request held are not sent again.
double moved_tokens(const std::vector<Request>& requests) {
  std::set<std::uint64_t> held;
  double total = 0;
  for (const Request& request : requests) {
    std::size_t leading = 0;
    while (leading < request.block_ids.size() && held.contains(request.block_ids[leading]))
      ++leading;
    const std::uint64_t skipped = std::min(request.tokens, leading * kTraceBlockTokens);
    total += static_cast<double>(request.tokens - skipped);
    held.insert(request.block_ids.begin(), request.block_ids.end());
  }
  return total;
}

}  // namespace

std::uint64_t Workload::content_of(std::size_t request, std::uint64_t token) const {
  const Request& r = requests[request];
  if (r.block_ids.empty()) return 0x5EED0000ULL + request;
  return r.block_ids[std::min<std::uint64_t>(token / block_tokens, r.block_ids.size() - 1)];
}

Result<Workload> make_workload(const WorkloadOptions& options) {
  Workload workload;
  if (options.trace.empty()) {
    workload.requests = make_requests(options.requests.value_or(kMadeRequests), options.tokens);
  } else {
    auto requests = read_trace(options.trace, options.requests.value_or(~std::uint64_t{0}));
    if (!requests.ok()) return requests.status();
    workload.requests = std::move(*requests);
  }
  const double bytes =
      moved_tokens(workload.requests) * static_cast<double>(options.bytes_per_token);
  workload.scale = options.scale.value_or(std::max(1.0, bytes / static_cast<double>(kTargetBytes)));
  const auto scaled = [&](std::uint64_t n) {
    return std::max<std::uint64_t>(
        1, static_cast<std::uint64_t>(std::llround(static_cast<double>(n) / workload.scale)));
  };
  workload.block_tokens = scaled(kTraceBlockTokens);
  for (Request& request : workload.requests) request.tokens = scaled(request.tokens);
  return workload;
}

}  // namespace kvferry::cli
