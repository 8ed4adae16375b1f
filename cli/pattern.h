// What every byte of a demo's KV cache is: a function of (content of the prompt's block, layer,
// kind, head, token, byte). Source and target compute it on their own, so that no byte is compared
// with a copy of itself. Never equal to the poison.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvferry::cli {

inline constexpr std::uint8_t kPoison = 0xEE;  // even; all bytes of the pattern are odd

struct PatternPlace {
  std::uint64_t content = 0;  // hash id of the block, or number of the request
  std::uint32_t kind = 0, layer = 0, head = 0;
  std::uint64_t token = 0;  // within the prompt
};

inline std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

inline std::uint64_t pattern_seed(const PatternPlace& p) {
  return mix(mix(p.content * 0x9E3779B97F4A7C15ULL + p.kind) + (std::uint64_t{p.layer} << 40) +
             (std::uint64_t{p.head} << 24) + p.token * 0xD1B54A32D192ED03ULL);
}
inline std::uint64_t pattern_word(std::uint64_t seed, std::uint64_t word) {
  const std::uint64_t z = (seed + word * 0x9E3779B97F4A7C15ULL) * 0xBF58476D1CE4E5B9ULL;
  return (z ^ (z >> 29)) | 0x0101010101010101ULL;
}

inline void fill_pattern(std::uint8_t* to, std::size_t bytes, const PatternPlace& place) {
  const std::uint64_t seed = pattern_seed(place);
  for (std::size_t i = 0; i < bytes; i += 8) {
    const std::uint64_t word = pattern_word(seed, i / 8);
    std::memcpy(to + i, &word, bytes - i < 8 ? bytes - i : 8);
  }
}

// Bytes that are not what they should be.
inline std::uint64_t count_wrong(const std::uint8_t* at, std::size_t bytes,
                                 const PatternPlace& place) {
  const std::uint64_t seed = pattern_seed(place);
  std::uint64_t wrong = 0;
  for (std::size_t i = 0; i < bytes; i += 8) {
    const std::uint64_t expected = pattern_word(seed, i / 8);
    std::uint64_t found = expected;
    const std::size_t n = bytes - i < 8 ? bytes - i : 8;
    std::memcpy(&found, at + i, n);
    if (found == expected) continue;
    for (std::size_t b = 0; b < n; ++b)
      wrong += ((found ^ expected) >> (8 * b) & 0xFF) != 0 ? 1 : 0;
  }
  return wrong;
}

}  // namespace kvferry::cli
