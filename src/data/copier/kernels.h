// Copies of many small pieces, in every way that this processor knows, and which way is best for
// what: measured once, because it differs from machine to machine. Ordinary stores first read each
// line that they are about to overwrite; streaming stores do not, but go all the way to memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kvferry::data {

inline constexpr std::size_t kLine = 64;  // bytes of a line of memory, as caches know it

struct Piece {
  char* to = nullptr;
  const char* from = nullptr;
  std::size_t bytes = 0;
};

struct Kernel {
  std::string_view name;
  // Copies every piece. What it wrote is visible to other threads after landing_fence().
  void (*copy)(std::span<const Piece> pieces);
};
// Those that this processor can run. The first is memcpy; the numbers are those of the setting
// copier_kernel, less one.
std::span<const Kernel> kernels();

// Orders streaming stores of this thread before what it does next.
void landing_fence();

// What a copy does to the caches.
enum class CopyKind : std::uint8_t {
  kGather,   // from pages that nobody read lately into a small buffer that is sent at once
  kScatter,  // from such a buffer into pages that nobody reads soon
  kDirect    // from pages into pages
};
inline constexpr std::size_t kCopyKinds = 3;

// Pieces that behave alike.
inline constexpr std::array<std::size_t, 4> kSizeClasses{128, 1024, 8192, SIZE_MAX};  // up to
inline std::size_t size_class(std::size_t bytes) {
  std::size_t c = 0;
  while (bytes >= kSizeClasses[c] && c + 1 < kSizeClasses.size()) ++c;
  return c;
}

// Index of the kernel for each kind and class.
struct KernelChoice {
  std::array<std::array<std::uint8_t, kSizeClasses.size()>, kCopyKinds> kernel{};
  [[nodiscard]] const Kernel& at(CopyKind kind, std::size_t piece_bytes) const {
    return kernels()[kernel[static_cast<std::size_t>(kind)][size_class(piece_bytes)]];
  }
  friend bool operator==(const KernelChoice&, const KernelChoice&) = default;
};

// Takes a few milliseconds and 2 MiB of memory for a moment.
KernelChoice measure_kernels();
// measure_kernels() at the first call, the same answer ever after: it is a fact of the machine.
const KernelChoice& measured_kernels();

}  // namespace kvferry::data
