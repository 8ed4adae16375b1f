#include "tests/vectors/vectors.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>

#include "src/base/parse.h"

namespace kvferry::vectors {
namespace fs = std::filesystem;

std::string folder() {
  const char* named = std::getenv("KVFERRY_VECTORS");
  return named != nullptr && *named != '\0' ? named : KVFERRY_GOLDEN;
}

Json load(const std::string& file) {
  const fs::path path = fs::path(folder()) / (file + ".json");
  if (!fs::exists(path)) {
    std::cout << "[ absent   ] " << path.string() << " is not there: passed over\n";
    return nullptr;
  }
  std::ifstream stream(path);
  Json json = Json::parse(stream, nullptr, false);
  if (json.is_discarded()) ADD_FAILURE() << path << " is not JSON";
  return json;
}

void each_case(const std::string& file,
               const std::function<void(const Json&, const Json&)>& check) {
  const Json json = load(file);
  if (json.is_null()) GTEST_SKIP() << file << " is absent";
  ASSERT_TRUE(json.is_array() && !json.empty()) << file << ": no cases";
  std::size_t number = 0;
  for (const Json& one : json) {
    ++number;
    ASSERT_TRUE(one.is_object() && one.contains("name") && one.contains("input") &&
                one.contains("expected"))
        << file << ": case " << number << " lacks name, input or expected";
    SCOPED_TRACE(file + ": " + one["name"].get<std::string>());
    try {
      check(one["input"], one["expected"]);
    } catch (const Json::exception& error) {
      ADD_FAILURE() << "the case does not follow the schema: " << error.what();
    }
  }
  std::cout << "[ cases    ] " << file << ": " << number << "\n";
}

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

std::string to_hex(const std::string& bytes) {
  static const char* digits = "0123456789abcdef";
  std::string hex;
  for (const char c : bytes) {
    hex += digits[static_cast<unsigned char>(c) >> 4];
    hex += digits[static_cast<unsigned char>(c) & 15];
  }
  return hex;
}

std::vector<std::string> frames_from_hex(const Json& list) {
  std::vector<std::string> frames;
  for (const Json& frame : list)
    frames.push_back(from_hex(frame.is_object() ? frame.at("hex").get<std::string>()
                                                : frame.get<std::string>()));
  return frames;
}

Json frames_to_hex(const std::vector<std::string>& frames) {
  Json list = Json::array();
  for (const std::string& frame : frames) list.push_back(to_hex(frame));
  return list;
}

bool is_plain_number(const std::string& text, std::uint64_t most) {
  const auto value = parse_int<std::uint64_t>(text);
  return value && *value <= most;
}

// A folder without any vectors is a failure; names for which there is no test are listed.
TEST(Vector, FolderHoldsVectors) {
  ASSERT_TRUE(fs::is_directory(folder())) << folder() << " is no folder";
  static const std::set<std::string> kTested = {"wire_register_encode",
                                                "wire_register_decode",
                                                "wire_transfer_info_encode",
                                                "wire_transfer_info_decode",
                                                "wire_small_messages",
                                                "pack_int_lists",
                                                "unpack_int_lists",
                                                "watermark_messages",
                                                "group_concurrent_contiguous",
                                                "send_kvcache",
                                                "send_kvcache_slice",
                                                "compute_head_slice_params",
                                                "send_aux",
                                                "rank_mapping",
                                                "mha_kv_ptrs_with_pp",
                                                "resolve_total_kv_heads",
                                                "decode_thread",
                                                "prefill_bootstrap_thread",
                                                "transfer_worker",
                                                "update_status",
                                                "sender_ctor",
                                                "sender_chunks",
                                                "sender_receiver_lifecycle",
                                                "receiver_setup",
                                                "parallel_info_checks",
                                                "manager_flags",
                                                "network_address",
                                                "register_buffers",
                                                "bootstrap_registration",
                                                "send_mamba_state",
                                                "send_mamba_state_slice",
                                                "maybe_send_extra",
                                                "dsa_skip_flags",
                                                "filter_kv_indices_for_cp_rank",
                                                "mla_kv_ptrs_with_pp",
                                                "compute_staging_layout",
                                                "staging_gather_layout",
                                                "staging_scatter_layout"};
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(folder())) {
    if (entry.path().extension() != ".json") continue;
    ++files;
    if (!kTested.contains(entry.path().stem().string()))
      std::cout << "[ untested ] " << entry.path().filename().string() << "\n";
  }
  EXPECT_GT(files, 0U) << "no vectors in " << folder();
}

}  // namespace kvferry::vectors
