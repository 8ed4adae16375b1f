// KV geometries of models: built in, or from a Hugging Face config.json.
#pragma once

#include <string>
#include <vector>

#include "kvferry/status.h"
#include "src/plan/geometry.h"

namespace kvferry::cli {

// A name of model_names(), or the path of a config.json. Errors name the field that is missing.
Result<plan::Geometry> load_model(const std::string& name_or_path);
std::vector<std::string> model_names();
// Bytes that one token takes in the whole model, on one copy.
std::uint64_t bytes_per_token(const plan::Geometry& geometry);

}  // namespace kvferry::cli
