#include "src/data/copier.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvferry::data {
namespace {

void plain_copy(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

#if defined(__x86_64__)

constexpr std::size_t kLine = 64;
constexpr std::size_t kStreamLeast = 128;  // below, the ragged ends are all of it

// The lines that lie whole inside the target, by `Lines`; the ragged rest with ordinary stores.
template <void (*Lines)(char*, const char*, std::size_t)>
void streaming_copy(void* to, const void* from, std::size_t bytes) {
  auto* t = static_cast<char*>(to);
  const auto* f = static_cast<const char*>(from);
  if (bytes < kStreamLeast) {
    std::memcpy(t, f, bytes);
    return;
  }
  const std::size_t head =
      (kLine - (reinterpret_cast<std::uintptr_t>(t) & (kLine - 1))) & (kLine - 1);
  if (head > 0) std::memcpy(t, f, head);
  const std::size_t lines = (bytes - head) / kLine;
  Lines(t + head, f + head, lines);
  const std::size_t done = head + lines * kLine;
  if (done < bytes) std::memcpy(t + done, f + done, bytes - done);
}

__attribute__((target("avx512f"))) void lines_avx512(char* to, const char* from,
                                                     std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i * kLine),
                        _mm512_loadu_si512(from + i * kLine));
}

__attribute__((target("avx2"))) void lines_avx2(char* to, const char* from, std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * kLine));
    const __m256i high =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * kLine + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i * kLine), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i * kLine + 32), high);
  }
}

#endif

}  // namespace

CopyFunction landing_copy() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return streaming_copy<lines_avx512>;
  if (__builtin_cpu_supports("avx2")) return streaming_copy<lines_avx2>;
#endif
  return plain_copy;
}

void landing_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace kvferry::data
