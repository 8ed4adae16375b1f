// Golden vectors, read at run time: from the folder that KVFERRY_VECTORS names, else from
// tests/golden.
//
// A file that is absent in another folder is reported and passed over; a file without cases, that
// does not parse or lacks its schema's fields is a failure. Where we differ from the reference on
// purpose, the test computes the right answer by a rule over the input, never from names.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace kvferry::vectors {

using Json = nlohmann::json;

std::string folder();

// Runs `check(input, expected)` for every case of FILE.json, prints how many there were. Schema
// errors are failures.
void each_case(const std::string& file,
               const std::function<void(const Json& input, const Json& expected)>& check);
// The whole file, or null when it is absent (which is reported).
Json load(const std::string& file);

std::string from_hex(const std::string& hex);
std::string to_hex(const std::string& bytes);
std::vector<std::string> frames_from_hex(const Json& list);
Json frames_to_hex(const std::vector<std::string>& frames);
// Decimal digits alone: what we take for a number where the reference's parser also takes blanks,
// signs and underscores.
bool is_plain_number(const std::string& text, std::uint64_t most = ~std::uint64_t{0});

}  // namespace kvferry::vectors
