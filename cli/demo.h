// `kvferry demo`: KV caches move between real processes; every byte is checked.
#pragma once

#include <optional>
#include <string>

#include "src/plan/ranks.h"

namespace kvferry::cli {

struct Cut {
  std::uint32_t tp = 1, pp = 1, cp = 1, dp = 1;
};
// "tp=2,pp=1,cp=1,dp=1"; what is not named is 1.
Result<Cut> parse_cut(const std::string& text);

struct DemoOptions {
  std::string model = "llama-3.1-8b";
  Cut prefill{.tp = 2, .pp = 1, .cp = 1, .dp = 1}, decode{.tp = 4, .pp = 1, .cp = 1, .dp = 1};
  std::string plane = "auto", codec = "native";
  std::uint32_t page_size = 16;
  std::uint32_t decode_page_size = 0;  // 0: as page_size, which is then of both sides
  std::string trace;
  std::optional<std::uint64_t> requests, tokens;
  std::uint32_t concurrency = 4;
  std::optional<double> scale;
  double speed = 0;  // 0: as fast as it goes
  std::string json;
  std::string sabotage;
  std::string shared_directory = "/dev/shm";
  bool private_memory = false;  // prefill pools that no other process may map
};

inline constexpr int kExitOk = 0, kExitWrong = 1, kExitUsage = 2, kExitInterrupted = 130;
int run_demo(const DemoOptions& options);

}  // namespace kvferry::cli
