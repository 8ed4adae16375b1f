// Randomness: SplitMix64 for the simulator and for tests (the same on every machine), an entropy
// port for programs.
#pragma once

#include <cstdint>

#include "kvferry/types.h"

namespace kvferry {

// Where tokens and session ids come from. The simulator hands out a seeded one, programs the
// kernel's.
class Entropy {
 public:
  virtual ~Entropy() = default;
  virtual std::uint64_t next64() = 0;
  Token token() { return Token{next64(), next64() | 1}; }
};

class Random final : public Entropy {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next64() override {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  // Uniform in [0, bound), bound > 0. The bias of the modulo is below 2^-32 for every bound used
  // here.
  std::uint64_t below(std::uint64_t bound) { return next64() % bound; }
  std::uint64_t between(std::uint64_t low, std::uint64_t high) {
    return low + below(high - low + 1);
  }
  // True with probability percent / 100.
  bool chance(std::uint64_t percent) { return below(100) < percent; }

 private:
  std::uint64_t state_;
};

// getrandom(2). Throws CheckFailed when the kernel gives none: without randomness nothing is safe.
class KernelEntropy final : public Entropy {
 public:
  std::uint64_t next64() override;
};

}  // namespace kvferry
