#include "src/data/copier/kernels.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvferry::data {
namespace {

// Lines of pieces to come are asked for while earlier ones are copied: rows at random places defeat
// the hardware's own guess.
constexpr std::size_t kAheadBytes = 2048, kAheadPieceBytes = 1024;

template <bool Ahead, class Copy>
inline __attribute__((always_inline)) void each_piece(std::span<const Piece> pieces, Copy copy) {
  if constexpr (!Ahead) {
    for (const Piece& p : pieces) copy(p.to, p.from, p.bytes);
  } else {
    std::size_t next = 0, asked = 0, copied = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      while (next < pieces.size() && (next <= i || asked < copied + kAheadBytes)) {
        const Piece& p = pieces[next++];
        const std::size_t n = std::min(p.bytes, kAheadPieceBytes);
        for (std::size_t at = 0; at < n; at += kLine) __builtin_prefetch(p.from + at, 0, 3);
        asked += p.bytes;
      }
      copy(pieces[i].to, pieces[i].from, pieces[i].bytes);
      copied += pieces[i].bytes;
    }
  }
}

template <bool Ahead>
void with_memcpy(std::span<const Piece> pieces) {
  each_piece<Ahead>(pieces,
                    [](char* to, const char* from, std::size_t n) { std::memcpy(to, from, n); });
}

#if defined(__x86_64__)

constexpr std::size_t kWideLeast = 2 * kLine;  // below, the ragged ends are all of it

// The lines that lie whole inside the target by `lines`, the ragged rest with ordinary stores.
template <class Lines>
inline __attribute__((always_inline)) void by_lines(char* to, const char* from, std::size_t bytes,
                                                    Lines lines) {
  if (bytes < kWideLeast) {
    std::memcpy(to, from, bytes);
    return;
  }
  const std::size_t head =
      (kLine - (reinterpret_cast<std::uintptr_t>(to) & (kLine - 1))) & (kLine - 1);
  if (head > 0) std::memcpy(to, from, head);
  const std::size_t count = (bytes - head) / kLine;
  lines(to + head, from + head, count);
  const std::size_t done = head + count * kLine;
  if (done < bytes) std::memcpy(to + done, from + done, bytes - done);
}

template <bool Ahead, bool Stream>
__attribute__((target("avx512f"))) void with_avx512(std::span<const Piece> pieces) {
  each_piece<Ahead>(
      pieces, [](char* to, const char* from, std::size_t n) __attribute__((target("avx512f"))) {
        by_lines(
            to, from, n,
            [](char* t, const char* f, std::size_t lines) __attribute__((target("avx512f"))) {
              for (std::size_t i = 0; i < lines; ++i) {
                const __m512i line = _mm512_loadu_si512(f + i * kLine);
                auto* at = reinterpret_cast<__m512i*>(t + i * kLine);
                if constexpr (Stream) {
                  _mm512_stream_si512(at, line);
                } else {
                  _mm512_store_si512(at, line);
                }
              }
            });
      });
}

template <bool Ahead, bool Stream>
__attribute__((target("avx2"))) void with_avx2(std::span<const Piece> pieces) {
  each_piece<Ahead>(
      pieces, [](char* to, const char* from, std::size_t n) __attribute__((target("avx2"))) {
        by_lines(
            to, from, n,
            [](char* t, const char* f, std::size_t lines) __attribute__((target("avx2"))) {
              for (std::size_t i = 0; i < lines; ++i) {
                const auto* source = reinterpret_cast<const __m256i*>(f + i * kLine);
                auto* at = reinterpret_cast<__m256i*>(t + i * kLine);
                const __m256i low = _mm256_loadu_si256(source),
                              high = _mm256_loadu_si256(source + 1);
                if constexpr (Stream) {
                  _mm256_stream_si256(at, low);
                  _mm256_stream_si256(at + 1, high);
                } else {
                  _mm256_store_si256(at, low);
                  _mm256_store_si256(at + 1, high);
                }
              }
            });
      });
}

#endif

std::vector<Kernel> find_kernels() {
  std::vector<Kernel> all{{"memcpy", with_memcpy<false>}, {"memcpy, ahead", with_memcpy<true>}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    all.push_back({"avx2", with_avx2<false, false>});
    all.push_back({"avx2, ahead", with_avx2<true, false>});
    all.push_back({"avx2, streaming", with_avx2<false, true>});
    all.push_back({"avx2, streaming, ahead", with_avx2<true, true>});
  }
  if (__builtin_cpu_supports("avx512f")) {
    all.push_back({"avx512", with_avx512<false, false>});
    all.push_back({"avx512, ahead", with_avx512<true, false>});
    all.push_back({"avx512, streaming", with_avx512<false, true>});
    all.push_back({"avx512, streaming, ahead", with_avx512<true, true>});
  }
#endif
  return all;
}

// --- the measurement

constexpr std::size_t kSide = 1 << 20;              // bytes on either side
constexpr std::size_t kBuffer = 64 << 10;           // the small buffer of gather and scatter
constexpr std::size_t kMoved = 128 << 10;           // bytes of one timed run
constexpr int kRuns = 2;                            // the better one counts
constexpr std::size_t kSmall = 256, kLarge = 4096;  // stand for class 1 and for what is above

#if defined(__x86_64__)
__attribute__((target("clflushopt"))) void flush_lines_together(const char* at, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kLine) _mm_clflushopt(const_cast<char*>(at) + i);
}
void flush_lines(const char* at, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kLine) _mm_clflush(at + i);
}
bool has_clflushopt() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & (1U << 23)) != 0;
}
#endif

// Out of every cache, so that a small block of memory behaves as gigabytes of pages do.
void evict([[maybe_unused]] const std::vector<Piece>& pieces, [[maybe_unused]] CopyKind kind) {
#if defined(__x86_64__)
  static const auto flush = has_clflushopt() ? flush_lines_together : flush_lines;
  for (const Piece& p : pieces) {
    if (kind != CopyKind::kScatter) flush(p.from, p.bytes);
    if (kind != CopyKind::kGather) flush(p.to, p.bytes);
  }
  _mm_mfence();
#endif
}

}  // namespace

std::span<const Kernel> kernels() {
  static const std::vector<Kernel> all = find_kernels();
  return all;
}

void landing_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

KernelChoice measure_kernels() {
  const auto source = std::make_unique<char[]>(kSide), target = std::make_unique<char[]>(kSide),
             buffer = std::make_unique<char[]>(kBuffer);
  std::memset(source.get(), 1, kSide);
  std::memset(target.get(), 1, kSide);
  std::memset(buffer.get(), 1, kBuffer);
  KernelChoice choice;
  std::vector<Piece> pieces;
  for (std::size_t k = 0; k < kCopyKinds; ++k) {
    const auto kind = static_cast<CopyKind>(k);
    for (const std::size_t bytes : {kSmall, kLarge}) {
      const std::size_t places = kSide / bytes;
      pieces.clear();
      for (std::size_t i = 0; i < kMoved / bytes; ++i) {
        // Scattered over the block, each place once: the steps share no factor with a power of two.
        char* const from = source.get() + (i * 37 % places) * bytes;
        char* const to = target.get() + (i * 41 % places) * bytes;
        char* const small = buffer.get() + i * bytes % kBuffer;
        pieces.push_back({kind == CopyKind::kGather ? small : to,
                          kind == CopyKind::kScatter ? small : from, bytes});
      }
      double best = 0;
      std::uint8_t chosen = 0;
      for (std::size_t candidate = 0; candidate < kernels().size(); ++candidate) {
        double fastest = 0;
        for (int run = 0; run < kRuns; ++run) {
          evict(pieces, kind);
          const auto begin = std::chrono::steady_clock::now();
          kernels()[candidate].copy(pieces);
          landing_fence();
          const double took =
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
          fastest = run == 0 ? took : std::min(fastest, took);
        }
        // Another way must be clearly better than those before it in the list, which are simpler.
        if (candidate == 0 || fastest < best * 0.97) {
          best = fastest;
          chosen = static_cast<std::uint8_t>(candidate);
        }
      }
      choice.kernel[k][1] = bytes == kSmall ? chosen : choice.kernel[k][1];
      if (bytes == kLarge) choice.kernel[k][2] = choice.kernel[k][3] = chosen;
    }
  }
  return choice;
}

const KernelChoice& measured_kernels() {
  static const KernelChoice choice = measure_kernels();
  return choice;
}

}  // namespace kvferry::data
