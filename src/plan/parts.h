// Items of two sides that hold different numbers of tokens, cut into parts of equally many.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>

namespace kvferry::plan {

// How many parts an item of each side has. A part holds as many tokens as both sizes are a multiple
// of, and no fewer; items of one size are one part each.
struct Parts {
  std::uint32_t source = 1, target = 1;
  [[nodiscard]] bool whole() const { return source == 1 && target == 1; }
  friend bool operator==(const Parts&, const Parts&) = default;
};

inline Parts parts_of(std::uint32_t source_tokens, std::uint32_t target_tokens) {
  const std::uint32_t part = std::gcd(source_tokens, target_tokens);
  return part == 0 ? Parts{} : Parts{source_tokens / part, target_tokens / part};
}

// The part at which two lists of the same tokens end together: the source's begins at part 0, the
// target's at `target_first`. Each may end inside its last item, so the last item of the longer one
// must begin before the other's end; `slack` more items are allowed. Nothing: they are not of the
// same tokens.
inline std::optional<std::uint64_t> common_end(Parts parts, std::uint64_t source_items,
                                               std::uint64_t target_first,
                                               std::uint64_t target_items,
                                               std::uint64_t slack = 0) {
  const std::uint64_t source_end = source_items * parts.source,
                      target_end = target_first + target_items * parts.target;
  if (source_end >= target_end + (1 + slack) * parts.source ||
      target_end >= source_end + (1 + slack) * parts.target)
    return std::nullopt;
  return std::min(source_end, target_end);
}

}  // namespace kvferry::plan
