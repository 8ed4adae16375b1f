// FNV-1a, for digests that must be the same on every machine. Not for anything that an adversary
// chooses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvferry {

class Fnv {
 public:
  void add_bytes(const void* data, std::size_t size) {
    const auto* p = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < size; ++i) value_ = (value_ ^ p[i]) * 0x100000001B3ULL;
  }
  void add(std::string_view text) { add_bytes(text.data(), text.size()); }
  void add(std::uint64_t number) {
    for (int i = 0; i < 8; ++i) value_ = (value_ ^ ((number >> (8 * i)) & 0xFF)) * 0x100000001B3ULL;
  }
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325ULL;
};

}  // namespace kvferry
