#include "cli/models.h"

#include <algorithm>
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

std::vector<std::uint32_t> layers_where(std::uint32_t layers, const auto& holds) {
  std::vector<std::uint32_t> which;
  for (std::uint32_t i = 0; i < layers; ++i) {
    if (holds(i)) which.push_back(i);
  }
  return which;
}

// Layers of linear attention beside `full`: the tail of a convolution over query, key and value,
// and a matrix for each value head.
struct LinearAttention {
  std::uint32_t key_heads = 0, key_width = 0, value_heads = 0, value_width = 0, kernel = 0;
};
void add_linear(plan::Geometry& g, std::vector<std::uint32_t> full, const LinearAttention& a) {
  const std::vector<std::uint32_t> linear = layers_where(g.layers, [&](std::uint32_t i) {
    return std::find(full.begin(), full.end(), i) == full.end();
  });
  const std::uint32_t element = g.dtype == DType::kFloat32 ? 4 : 2;
  g.kv_layers = std::move(full);
  g.states.push_back(
      {Component::kMambaConv,
       linear,
       {a.key_heads * a.key_width, a.key_heads * a.key_width, a.value_heads * a.value_width},
       (a.kernel - 1) * element,
       g.dtype});
  g.states.push_back({Component::kMambaTemporal,
                      linear,
                      {a.value_heads},
                      a.key_width * a.value_width * 4,
                      DType::kFloat32});
}

// Layers that look back over `window` tokens beside `full`; their K and V have pools of their own.
void add_sliding(plan::Geometry& g, std::vector<std::uint32_t> full, std::uint32_t window) {
  const std::vector<std::uint32_t> sliding = layers_where(g.layers, [&](std::uint32_t i) {
    return std::find(full.begin(), full.end(), i) == full.end();
  });
  g.kv_layers = std::move(full);
  g.sliding_window = window;
  g.states.push_back({Component::kSlidingKey, sliding, {g.kv_heads}, g.key_head_bytes, g.dtype});
  g.states.push_back(
      {Component::kSlidingValue, sliding, {g.kv_heads}, g.value_head_bytes, g.dtype});
}

// An index key of 8-bit elements with one scale for each token, in every layer.
void add_index(plan::Geometry& g, std::uint32_t width) {
  g.states.push_back({Component::kIndex,
                      layers_where(g.layers, [](std::uint32_t) { return true; }),
                      {},
                      width + 4,
                      DType::kInt8});
}

auto every(std::uint32_t nth) {
  return [nth](std::uint32_t layer) { return (layer + 1) % nth == 0; };
}

plan::Geometry qwen3_next() {
  plan::Geometry g = dense("qwen3-next", 48, 2, 256, 2, DType::kBFloat16);
  add_linear(g, layers_where(48, every(4)), {16, 128, 32, 128, 4});
  return g;
}
plan::Geometry gemma_3() {
  plan::Geometry g = dense("gemma-3", 48, 8, 256, 2, DType::kBFloat16);
  add_sliding(g, layers_where(48, every(6)), 1024);
  return g;
}
plan::Geometry deepseek_v32() {
  plan::Geometry g = latent("deepseek-v3.2", 61, 512 + 64, 2, DType::kBFloat16);
  add_index(g, 128);
  return g;
}

const std::vector<plan::Geometry>& built_in() {
  static const std::vector<plan::Geometry> all = {
      dense("llama-3.1-8b", 32, 8, 128, 2, DType::kBFloat16),
      dense("llama-3.1-70b", 80, 8, 128, 2, DType::kBFloat16),
      dense("qwen3-30b-a3b", 48, 4, 128, 2, DType::kBFloat16),
      latent("deepseek-v3", 61, 512 + 64, 2, DType::kBFloat16),
      qwen3_next(),
      gemma_3(),
      deepseek_v32(),
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
  // Which layers have a cache of the whole prompt: a list of kinds, or every n-th.
  const auto full_layers = [&](const char* interval) {
    if (const auto types = json.find("layer_types");
        types != json.end() && types->is_array() && types->size() == layers) {
      return layers_where(layers, [&](std::uint32_t i) { return (*types)[i] == "full_attention"; });
    }
    return layers_where(layers, every(number(interval, std::nullopt)));
  };
  if (json.contains("linear_num_value_heads")) {
    const LinearAttention linear{.key_heads = number("linear_num_key_heads", std::nullopt),
                                 .key_width = number("linear_key_head_dim", std::nullopt),
                                 .value_heads = number("linear_num_value_heads", std::nullopt),
                                 .value_width = number("linear_value_head_dim", std::nullopt),
                                 .kernel = number("linear_conv_kernel_dim", std::nullopt)};
    if (problem.ok() && linear.kernel < 2)
      problem = Status(Code::kInvalidArgument, path + ": linear_conv_kernel_dim is below 2");
    auto full = full_layers("full_attention_interval");
    if (problem.ok()) add_linear(geometry, std::move(full), linear);
  } else if (json.contains("sliding_window") && json["sliding_window"].is_number() &&
             (json.contains("layer_types") || json.contains("sliding_window_pattern"))) {
    const std::uint32_t window = number("sliding_window", std::nullopt);
    auto full = full_layers("sliding_window_pattern");
    if (problem.ok()) add_sliding(geometry, std::move(full), window);
  } else if (json.contains("index_head_dim")) {
    const std::uint32_t width = number("index_head_dim", std::nullopt);
    if (problem.ok()) add_index(geometry, width);
  }
  if (problem.ok() && geometry.kv_layers.empty() && geometry.states.size() > 1)
    problem = Status(Code::kInvalidArgument, path + ": no layer has a full attention");
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

std::uint64_t bytes_per_token(const plan::Geometry& geometry) {
  const std::uint64_t layers =
      geometry.kv_layers.empty() ? geometry.layers : geometry.kv_layers.size();
  std::uint64_t bytes =
      layers * geometry.kv_heads * (geometry.key_head_bytes + geometry.value_head_bytes);
  for (const plan::StateGeometry& state : geometry.states) {
    if (state.component == Component::kIndex) bytes += state.layers.size() * state.unit_bytes;
  }
  return bytes;
}

nlohmann::json to_json(const plan::Geometry& g) {
  Json states = Json::array();
  for (const plan::StateGeometry& s : g.states)
    states.push_back({{"component", s.component},
                      {"layers", s.layers},
                      {"blocks", s.blocks},
                      {"unit_bytes", s.unit_bytes},
                      {"dtype", s.dtype}});
  return {{"name", g.name},
          {"layers", g.layers},
          {"mla", g.attention.mla},
          {"hybrid_mla", g.attention.hybrid_mla},
          {"kv_heads", g.kv_heads},
          {"key_head_bytes", g.key_head_bytes},
          {"value_head_bytes", g.value_head_bytes},
          {"dtype", g.dtype},
          {"aux_bytes", g.aux_bytes},
          {"kv_layers", g.kv_layers},
          {"states", states},
          {"sliding_window", g.sliding_window}};
}

plan::Geometry geometry_from_json(const nlohmann::json& j) {
  plan::Geometry g;
  g.name = j["name"];
  g.layers = j["layers"];
  g.attention = {j["mla"], j["hybrid_mla"]};
  g.kv_heads = j["kv_heads"];
  g.key_head_bytes = j["key_head_bytes"];
  g.value_head_bytes = j["value_head_bytes"];
  g.dtype = j["dtype"].get<DType>();
  g.aux_bytes = j["aux_bytes"].get<std::vector<std::uint32_t>>();
  g.kv_layers = j["kv_layers"].get<std::vector<std::uint32_t>>();
  g.sliding_window = j["sliding_window"];
  for (const Json& s : j["states"])
    g.states.push_back(
        {s["component"].get<Component>(), s["layers"].get<std::vector<std::uint32_t>>(),
         s["blocks"].get<std::vector<std::uint32_t>>(), s["unit_bytes"], s["dtype"].get<DType>()});
  return g;
}

}  // namespace kvferry::cli
