// Little-endian binary form of described structs. Lengths are checked against the bytes that remain
// before anything is allocated; integers go by shifts, so the form is the same on every machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "src/wire/messages.h"

namespace kvferry::wire {

class BinaryWriter {
 public:
  template <class T>
  void put(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      bytes_.push_back(value ? 1 : 0);
    } else if constexpr (std::is_enum_v<T>) {
      put(static_cast<std::underlying_type_t<T>>(value));
    } else if constexpr (std::is_integral_v<T>) {
      auto raw = static_cast<std::uint64_t>(value);
      for (std::size_t i = 0; i < sizeof(T); ++i) {
        bytes_.push_back(static_cast<char>(raw & 0xFF));
        raw >>= 8;
      }
    } else {
      describe(value, [this](const char*, const auto& field) { this->put(field); });
    }
  }
  void put(const std::string& text) {
    put(static_cast<std::uint32_t>(text.size()));
    bytes_ += text;
  }
  template <class T>
  void put(const std::vector<T>& list) {
    put(static_cast<std::uint32_t>(list.size()));
    for (const T& item : list) put(item);
  }
  template <class T>
  void put(const std::optional<T>& maybe) {
    put(maybe.has_value());
    if (maybe) put(*maybe);
  }
  [[nodiscard]] std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class BinaryReader {
 public:
  // `lenient`: the message is of an older version, so fields missing at its end keep their
  // defaults.
  BinaryReader(std::string_view bytes, bool lenient) : bytes_(bytes), lenient_(lenient) {}

  [[nodiscard]] bool ok() const { return ok_; }
  [[nodiscard]] bool at_end() const { return bytes_.empty(); }

  template <class T>
  void message(T& value) {
    describe(value, [this](const char*, auto& field) {
      if (lenient_ && at_end()) return;
      get(field);
    });
  }

  template <class T>
  void get(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      std::uint8_t raw = 0;
      get(raw);
      if (raw > 1) ok_ = false;
      value = raw == 1;
    } else if constexpr (std::is_enum_v<T>) {
      std::underlying_type_t<T> raw{};
      get(raw);
      value = static_cast<T>(raw);
    } else if constexpr (std::is_integral_v<T>) {
      if (!need(sizeof(T))) return;
      std::uint64_t raw = 0;
      for (std::size_t i = 0; i < sizeof(T); ++i)
        raw |= std::uint64_t{static_cast<unsigned char>(bytes_[i])} << (8 * i);
      bytes_.remove_prefix(sizeof(T));
      value = static_cast<T>(raw);
    } else {
      describe(value, [this](const char*, auto& field) { this->get(field); });
    }
  }
  void get(std::string& text) {
    std::uint32_t size = 0;
    get(size);
    if (!need(size)) return;
    text.assign(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
  }
  template <class T>
  void get(std::vector<T>& list) {
    std::uint32_t count = 0;
    get(count);
    // Every element takes at least one byte (an integer its own size), so a count beyond that is a
    // lie.
    std::size_t least = 1;
    if constexpr (std::is_integral_v<T>) least = sizeof(T);
    if (!ok_ || std::uint64_t{count} * least > bytes_.size()) {
      ok_ = false;
      return;
    }
    list.clear();
    list.reserve(std::is_integral_v<T> ? count : std::min<std::size_t>(count, 4096));
    for (std::uint32_t i = 0; i < count && ok_; ++i) get(list.emplace_back());
  }
  template <class T>
  void get(std::optional<T>& maybe) {
    bool there = false;
    get(there);
    maybe.reset();
    if (ok_ && there) get(maybe.emplace());
  }

 private:
  bool need(std::size_t size) {
    if (size > bytes_.size()) ok_ = false;
    return ok_;
  }
  std::string_view bytes_;
  bool lenient_;
  bool ok_ = true;
};

}  // namespace kvferry::wire
