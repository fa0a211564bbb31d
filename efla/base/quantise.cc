#include "efla/base/quantise.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "efla/base/dtype.h"

namespace efla {
namespace {

// Returns the number of the largest magnitude; a NaN if some number is not finite, so that no number of the block is.
float extreme_of(std::span<const float, 32> numbers) {
  if (!std::ranges::all_of(numbers, [](float x) { return std::isfinite(x); })) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  return *std::ranges::max_element(numbers, {}, [](float x) { return std::abs(x); });
}

// Returns a scale within the range of float16, in which a block stores it.
float storable(float scale) {
  constexpr float kLargest = 65504.0F;
  return std::clamp(scale, -kLargest, kLargest);
}

// Returns the factor that makes integers of numbers: 1 / scale, or 0 for a scale that is stored as 0 or as a NaN.
float factor_of(float scale, float16 stored) { return std::abs(to_float(stored)) > 0.0F ? 1.0F / scale : 0.0F; }

// Returns x · factor as an integer from least to most.
int integer_of(float x, float factor, float least, float most) {
  return factor == 0.0F ? 0 : static_cast<int>(std::clamp(std::round(x * factor), least, most));
}

}  // namespace

void quantise_q8_0(std::span<const float, 32> numbers, std::uint8_t* block) {
  const float scale = storable(std::abs(extreme_of(numbers)) / 127.0F);
  const float16 stored = to_float16(scale);
  const float factor = factor_of(scale, stored);
  std::memcpy(block, &stored, sizeof(stored));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const int integer = integer_of(numbers[i], factor, -127.0F, 127.0F);
    block[sizeof(stored) + i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(integer));
  }
}

void quantise_q4_0(std::span<const float, 32> numbers, std::uint8_t* block) {
  constexpr std::size_t kHalf = 16;  // the first half lies in the low bits
  const float16 scale = to_float16(storable(extreme_of(numbers) / -8.0F));
  const float factor = factor_of(to_float(scale), scale);
  const auto integer = [&](float x) { return integer_of(x, factor, -8.0F, 7.0F) + 8; };
  std::memcpy(block, &scale, sizeof(scale));
  for (std::size_t i = 0; i < kHalf; ++i) {
    block[sizeof(scale) + i] = static_cast<std::uint8_t>(integer(numbers[i]) | integer(numbers[kHalf + i]) << 4);
  }
}

}  // namespace efla
