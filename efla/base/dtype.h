// Element types of the operators: float32, bfloat16 (storage only) and, for the reference, float64.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace efla {

// A bfloat16 number as stored. Arithmetic happens in float32.
struct bfloat16 {
  std::uint16_t bits = 0;
};
static_assert(sizeof(bfloat16) == 2);

constexpr float to_float(bfloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
constexpr float to_float(float x) { return x; }
constexpr double to_float(double x) { return x; }

// Rounds to nearest, ties to even; a NaN stays a NaN.
constexpr bfloat16 to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  using State = float;
  static constexpr std::string_view name = "float32";
};
template <>
struct DTypeOf<bfloat16> {
  using State = float;
  static constexpr std::string_view name = "bfloat16";
};
template <>
struct DTypeOf<double> {
  using State = double;
  static constexpr std::string_view name = "float64";
};

// The type of an operator's states, gates and accumulators: float32, or float64 in the reference.
template <class T>
using State = typename DTypeOf<T>::State;

template <class T>
constexpr T from_state(State<T> x) {
  if constexpr (sizeof(T) == sizeof(bfloat16)) {
    return to_bfloat16(x);
  } else {
    return x;
  }
}

}  // namespace efla
