// Memory that two processes share: an anonymous file, sealed so that it cannot shrink under a
// mapping, handed over as a descriptor.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "kvferry/status.h"

namespace kvferry::data {

// A descriptor that closes itself.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedFd();
  [[nodiscard]] int get() const { return fd_; }
  // The caller closes it.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A mapping of such a file, or of part of one.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : at_(std::exchange(other.at_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();
  // kRefused when the file is shorter than `bytes` or may still shrink: touching it could end the
  // process.
  static Result<Mapping> of(int fd, std::uint64_t bytes, bool writable);

  [[nodiscard]] char* data() const { return at_; }
  [[nodiscard]] std::uint64_t size() const { return bytes_; }
  explicit operator bool() const { return at_ != nullptr; }

 private:
  char* at_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// A new file of so many bytes, all zero, sealed.
Result<OwnedFd> create_memory_file(const std::string& name, std::uint64_t bytes);

}  // namespace kvferry::data
