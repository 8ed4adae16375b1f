#include "cli/models.h"

#include <fstream>
#include <sstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

// Sizes of the small rows that go with a request's last chunk: output ids, log probabilities.
const std::vector<std::uint32_t> kAuxBytes = {64, 512};

plan::Geometry dense(std::string name, std::uint32_t layers, std::uint32_t heads,
                     std::uint32_t head_dim, std::uint32_t element_bytes, DType dtype) {
  return {.name = std::move(name),
          .layers = layers,
          .attention = {},
          .kv_heads = heads,
          .key_head_bytes = head_dim * element_bytes,
          .value_head_bytes = head_dim * element_bytes,
          .dtype = dtype,
          .aux_bytes = kAuxBytes};
}
plan::Geometry latent(std::string name, std::uint32_t layers, std::uint32_t width,
                      std::uint32_t element_bytes, DType dtype) {
  return {.name = std::move(name),
          .layers = layers,
          .attention = {.mla = true, .hybrid_mla = false},
          .kv_heads = 1,
          .key_head_bytes = width * element_bytes,
          .value_head_bytes = 0,
          .dtype = dtype,
          .aux_bytes = kAuxBytes};
}

const std::vector<plan::Geometry>& built_in() {
  static const std::vector<plan::Geometry> all = {
      dense("llama-3.1-8b", 32, 8, 128, 2, DType::kBFloat16),
      dense("llama-3.1-70b", 80, 8, 128, 2, DType::kBFloat16),
      dense("qwen3-30b-a3b", 48, 4, 128, 2, DType::kBFloat16),
      latent("deepseek-v3", 61, 512 + 64, 2, DType::kBFloat16),
  };
  return all;
}

Result<plan::Geometry> from_config(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    std::string names;
    for (const auto& g : built_in()) names += (names.empty() ? "" : ", ") + g.name;
    return Status(Code::kInvalidArgument,
                  fmt::format("model '{}' is neither built in ({}) nor a file that can be read",
                              path, names));
  }
  std::stringstream text;
  text << file.rdbuf();
  Json json = Json::parse(text.str(), nullptr, false);
  if (json.is_discarded() || !json.is_object())
    return Status(Code::kInvalidArgument, path + ": not a JSON object");
  if (json.contains("text_config") && json["text_config"].is_object())
    json = json["text_config"];  // multimodal models

  Status problem;
  const auto number = [&](const char* field,
                          std::optional<std::uint32_t> fallback) -> std::uint32_t {
    const auto it = json.find(field);
    if (it == json.end() || it->is_null()) {
      if (fallback) return *fallback;
      if (problem.ok())
        problem =
            Status(Code::kInvalidArgument, fmt::format("{}: field '{}' is missing", path, field));
      return 1;
    }
    if (!it->is_number_unsigned() || *it == 0 || *it > 1000000) {
      if (problem.ok())
        problem = Status(Code::kInvalidArgument,
                         fmt::format("{}: field '{}' is {}, not a whole number from 1 to 1000000",
                                     path, field, it->dump()));
      return 1;
    }
    return it->get<std::uint32_t>();
  };
  const std::string type = json.contains("model_type") && json["model_type"].is_string()
                               ? json["model_type"].get<std::string>()
                               : "";
  if (type.empty()) return Status(Code::kInvalidArgument, path + ": field 'model_type' is missing");
  const std::string dtype_name = json.contains("torch_dtype") && json["torch_dtype"].is_string()
                                     ? json["torch_dtype"].get<std::string>()
                                     : "bfloat16";
  const bool wide = dtype_name == "float32";
  const DType dtype = wide                      ? DType::kFloat32
                      : dtype_name == "float16" ? DType::kFloat16
                                                : DType::kBFloat16;
  const std::uint32_t element = wide ? 4 : 2;
  const std::uint32_t layers = number("num_hidden_layers", std::nullopt);
  plan::Geometry geometry;
  if (json.contains("kv_lora_rank") && !json["kv_lora_rank"].is_null()) {
    geometry =
        latent(type, layers,
               number("kv_lora_rank", std::nullopt) + number("qk_rope_head_dim", std::nullopt),
               element, dtype);
  } else {
    const std::uint32_t attention_heads = number("num_attention_heads", std::nullopt);
    const bool has_dim = json.contains("head_dim") && !json["head_dim"].is_null();
    const std::uint32_t head_dim = has_dim ? number("head_dim", std::nullopt)
                                           : number("hidden_size", std::nullopt) / attention_heads;
    if (problem.ok() && head_dim == 0)
      problem = Status(Code::kInvalidArgument,
                       fmt::format("{}: hidden_size is below num_attention_heads", path));
    geometry = dense(type, layers, number("num_key_value_heads", attention_heads), head_dim,
                     element, dtype);
  }
  if (!problem.ok()) return problem;
  return geometry;
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& geometry : built_in()) names.push_back(geometry.name);
  return names;
}

Result<plan::Geometry> load_model(const std::string& name_or_path) {
  for (const auto& geometry : built_in()) {
    if (geometry.name == name_or_path) return geometry;
  }
  return from_config(name_or_path);
}

std::uint64_t bytes_per_token(const plan::Geometry& g) {
  return std::uint64_t{g.layers} * g.kv_heads * (g.key_head_bytes + g.value_head_bytes);
}

}  // namespace kvferry::cli
