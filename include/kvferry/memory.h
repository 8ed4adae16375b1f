// Memory that other processes of this host may map, so that a decode rank can copy pages straight
// out of a prefill rank's pools. Any memory works with kvferry; pools in this kind spare one copy
// on one host.
#pragma once

#include <cstdint>
#include <memory>

#include "kvferry/data_plane.h"
#include "kvferry/export.h"
#include "kvferry/status.h"

namespace kvferry {

// Owns the memory; it must outlive every endpoint that it was handed to. Zero at first.
class KVF_API SharedMemory {
 public:
  // kExhausted when the kernel gives no memory or descriptor. The pages are touched now: a first
  // touch during a transfer would cost more than the copy.
  static Result<SharedMemory> create(std::uint64_t bytes);
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  [[nodiscard]] void* data() const;
  [[nodiscard]] std::uint64_t size() const;
  // For EndpointOptions::shared.
  [[nodiscard]] Region region() const;

 private:
  struct State;
  explicit SharedMemory(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvferry
