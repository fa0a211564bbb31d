#include "efla/base/quantise.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "efla/base/dtype.h"

namespace efla {
namespace {

// Returns the number of the largest magnitude.
float extreme_of(std::span<const float, 32> numbers) {
  return *std::ranges::max_element(numbers, {}, [](float x) { return std::abs(x); });
}

}  // namespace

void quantise_q8_0(std::span<const float, 32> numbers, std::uint8_t* block) {
  const float scale = std::abs(extreme_of(numbers)) / 127.0F, inverse = scale > 0.0F ? 1.0F / scale : 0.0F;
  const float16 stored = to_float16(scale);
  std::memcpy(block, &stored, sizeof(stored));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    block[sizeof(stored) + i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(std::round(numbers[i] * inverse)));
  }
}

void quantise_q4_0(std::span<const float, 32> numbers, std::uint8_t* block) {
  constexpr float kLargestScale = 65504.0F;  // of float16
  constexpr std::size_t kHalf = 16;          // the first half lies in the low bits
  const float16 scale = to_float16(std::clamp(extreme_of(numbers) / -8.0F, -kLargestScale, kLargestScale));
  const float inverse = to_float(scale) != 0.0F ? 1.0F / to_float(scale) : 0.0F;
  const auto integer = [&](float x) { return static_cast<int>(std::clamp(std::round(x * inverse), -8.0F, 7.0F)) + 8; };
  std::memcpy(block, &scale, sizeof(scale));
  for (std::size_t i = 0; i < kHalf; ++i) {
    block[sizeof(scale) + i] = static_cast<std::uint8_t>(integer(numbers[i]) | integer(numbers[kHalf + i]) << 4);
  }
}

}  // namespace efla
