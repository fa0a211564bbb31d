// Element types of the operators: float32, bfloat16, float16 and, for the reference, float64. bfloat16 and float16 are
// types of storage only.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace efla {

// A bfloat16 number as stored. Arithmetic happens in float32.
struct bfloat16 {
  std::uint16_t bits = 0;

  constexpr bfloat16() = default;
  constexpr explicit bfloat16(std::uint16_t stored) : bits(stored) {}
  template <class T>
  explicit bfloat16(T) = delete;  // to_bfloat16 rounds a number; a conversion to bits would truncate it
};
static_assert(sizeof(bfloat16) == 2);

// A float16 number (IEEE 754 binary16) as stored: 11 significant bits from 2⁻¹⁴ to 65504, below that multiples of 2⁻²⁴.
// Arithmetic happens in float32.
struct float16 {
  std::uint16_t bits = 0;

  constexpr float16() = default;
  constexpr explicit float16(std::uint16_t stored) : bits(stored) {}
  template <class T>
  explicit float16(T) = delete;  // to_float16 rounds a number; a conversion to bits would truncate it
};
static_assert(sizeof(float16) == 2);

constexpr float to_float(bfloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
constexpr float to_float(float16 x) {
  // Exponent and fraction in the places of float32; the product corrects the exponent, of subnormal numbers too.
  const std::uint32_t magnitude = (x.bits & 0x7fffU) << 13, sign = (x.bits & 0x8000U) << 16;
  const auto bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112F);
  return std::bit_cast<float>(sign | (magnitude < 0x0f800000U ? bits : bits | 0x7f800000U));
}
constexpr float to_float(float x) { return x; }
constexpr double to_float(double x) { return x; }

// Rounds to nearest, ties to even; a NaN stays a NaN.
constexpr bfloat16 to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return bfloat16(static_cast<std::uint16_t>((bits >> 16) | 0x40U));
  return bfloat16(static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16));
}

// Rounds to nearest, ties to even; numbers of size 65520 and more become infinite. A NaN stays a NaN.
constexpr float16 to_float16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffffU, sign = bits >> 16 & 0x8000U;
  std::uint32_t rounded = 0;
  if (magnitude > 0x7f800000U) {
    rounded = 0x7e00U | (magnitude >> 13 & 0x3ffU);
  } else if (magnitude >= 0x477ff000U) {
    rounded = 0x7c00U;
  } else if (magnitude < 0x38800000U) {  // the last bit of a sum with ½ is 2⁻²⁴, the unit of subnormal numbers
    rounded = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  } else {
    rounded = (magnitude - 0x38000000U + 0xfffU + (magnitude >> 13 & 1U)) >> 13;
  }
  return float16(static_cast<std::uint16_t>(sign | rounded));
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
struct DTypeOf<float16> {
  using State = float;
  static constexpr std::string_view name = "float16";
};
template <>
struct DTypeOf<double> {
  using State = double;
  static constexpr std::string_view name = "float64";
};

// The type of an operator's states, gates and accumulators: float32, or float64 in the reference.
template <class T>
using State = typename DTypeOf<T>::State;

// Rounds a number of the state's type to T.
template <class T>
constexpr T from_state(State<T> x) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return to_bfloat16(x);
  } else if constexpr (std::is_same_v<T, float16>) {
    return to_float16(x);
  } else {
    return x;
  }
}

}  // namespace efla
