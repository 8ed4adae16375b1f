// Strict parsing of numbers and addresses that come from outside.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

#include "kvferry/status.h"
#include "kvferry/types.h"

namespace kvferry {

// All of `text` must be decimal digits (a leading '-' for signed types); nothing else, no blanks.
template <class Int>
std::optional<Int> parse_int(std::string_view text) {
  Int value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

// "host:port" or "[v6]:port"; a bare v6 address has no port and is refused.
Result<Address> parse_address(std::string_view text);
// A host as a person writes it: brackets around a v6 address are taken off.
std::string_view without_brackets(std::string_view host);
bool is_ipv6(std::string_view host);
bool is_wildcard(std::string_view host);

}  // namespace kvferry
