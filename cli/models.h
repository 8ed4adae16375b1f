// KV geometries of models: built in, or from a Hugging Face config.json.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kvferry/status.h"
#include "src/plan/geometry.h"

namespace kvferry::cli {

// A name of model_names(), or the path of a config.json. Errors name the field that is missing.
Result<plan::Geometry> load_model(const std::string& name_or_path);
std::vector<std::string> model_names();
// Bytes that one token takes in the whole model, on one copy: the KV cache and an index cache.
std::uint64_t bytes_per_token(const plan::Geometry& geometry);
// For a child process.
nlohmann::json to_json(const plan::Geometry& geometry);
plan::Geometry geometry_from_json(const nlohmann::json& json);

}  // namespace kvferry::cli
