// Counter-based random numbers (Philox 4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
// Number n of a stream depends only on the seed, the stream and n, so results repeat on any machine and with any number
// of threads.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace efla {

class Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t stream = 0) : seed_(seed), stream_(stream) {}

  // Returns 32 uniformly random bits.
  std::uint32_t bits() {
    if (used_ == 4) {
      block_ = philox(counter_++);
      used_ = 0;
    }
    return block_[used_++];
  }

  // Returns a uniform number in [0, 1), a multiple of 2⁻²⁴ (exact in float32).
  double uniform() { return (bits() >> 8) * 0x1p-24; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }

  // Returns a uniform integer in [0, n), n ≥ 1, without bias (by rejection).
  std::uint32_t below(std::uint32_t n) {
    const std::uint32_t threshold = (0U - n) % n;
    for (;;) {
      const std::uint32_t x = bits();
      if (x >= threshold) return x % n;
    }
  }

  // Returns a standard normal number (the Box-Muller transform; both of its values are used).
  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2.0 * std::log1p(-uniform()));
    const double angle = 2.0 * std::numbers::pi * uniform();
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }

 private:
  std::array<std::uint32_t, 4> philox(std::uint64_t counter) const {
    std::array<std::uint32_t, 4> x{static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                                   static_cast<std::uint32_t>(stream_), static_cast<std::uint32_t>(stream_ >> 32)};
    auto k0 = static_cast<std::uint32_t>(seed_);
    auto k1 = static_cast<std::uint32_t>(seed_ >> 32);
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * x[0];
      const std::uint64_t p1 = std::uint64_t{0xCD9E8D57U} * x[2];
      x = {static_cast<std::uint32_t>(p1 >> 32) ^ x[1] ^ k0, static_cast<std::uint32_t>(p1),
           static_cast<std::uint32_t>(p0 >> 32) ^ x[3] ^ k1, static_cast<std::uint32_t>(p0)};
      k0 += 0x9E3779B9U;
      k1 += 0xBB67AE85U;
    }
    return x;
  }

  std::uint64_t seed_, stream_, counter_ = 0;
  std::array<std::uint32_t, 4> block_{};
  int used_ = 4;
  double spare_ = 0.0;
  bool has_spare_ = false;
};

}  // namespace efla
