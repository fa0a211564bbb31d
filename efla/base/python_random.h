// The numbers of Python's random.Random(seed): MT19937 (Matsumoto and Nishimura, "Mersenne Twister", 1998), seeded by
// its authors' init_by_array. lm-evaluation-harness bootstraps its standard errors with these numbers.
#pragma once

#include <array>
#include <cstdint>

namespace efla {

class PythonRandom {
 public:
  explicit PythonRandom(std::uint32_t seed) {
    fill(19650218U);
    std::uint32_t i = 1;
    const auto next = [&] {
      if (++i < kSize) return;
      state_[0] = state_[kSize - 1];
      i = 1;
    };
    for (std::uint32_t k = 0; k < kSize; ++k) {
      state_[i] = (state_[i] ^ (mixed(i) * 1664525U)) + seed;
      next();
    }
    for (std::uint32_t k = 0; k < kSize - 1; ++k) {
      state_[i] = (state_[i] ^ (mixed(i) * 1566083941U)) - i;
      next();
    }
    state_[0] = 0x80000000U;
  }

  // Returns 32 uniformly random bits, as getrandbits(32) does.
  std::uint32_t bits() {
    if (at_ == kSize) twist();
    std::uint32_t y = state_[at_++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680U;
    y ^= (y << 15) & 0xefc60000U;
    return y ^ (y >> 18);
  }

  // Returns a uniform number in [0, 1), a multiple of 2⁻⁵³, as random() does.
  double uniform() {
    const double high = bits() >> 5;
    return (high * 0x1p26 + (bits() >> 6)) * 0x1p-53;
  }

 private:
  static constexpr std::uint32_t kSize = 624, kMiddle = 397;

  void fill(std::uint32_t seed) {
    state_[0] = seed;
    for (std::uint32_t i = 1; i < kSize; ++i) state_[i] = 1812433253U * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }

  std::uint32_t mixed(std::uint32_t i) const { return state_[i - 1] ^ (state_[i - 1] >> 30); }

  void twist() {
    for (std::uint32_t i = 0; i < kSize; ++i) {
      const std::uint32_t y = (state_[i] & 0x80000000U) | (state_[(i + 1) % kSize] & 0x7fffffffU);
      state_[i] = state_[(i + kMiddle) % kSize] ^ (y >> 1) ^ ((y & 1U) * 0x9908b0dfU);
    }
    at_ = 0;
  }

  std::array<std::uint32_t, kSize> state_{};
  std::uint32_t at_ = kSize;
};

}  // namespace efla
