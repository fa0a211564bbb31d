// Matrices of quantised blocks as GGUF stores them: some neighbouring numbers of a row as small integers with common
// scales. The types are those whose blocks the kernels of linear layers multiply as they are.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "efla/base/dtype.h"

namespace efla {

enum class QuantType : std::uint8_t { q8_0, q4_0, iq4_nl, q4_k, q5_k, q6_k };
inline constexpr QuantType kQuantTypes[]{QuantType::q8_0, QuantType::q4_0, QuantType::iq4_nl,
                                         QuantType::q4_k, QuantType::q5_k, QuantType::q6_k};

// The numbers and the bytes of a block.
struct QuantLayout {
  std::int64_t elements, bytes;
};

constexpr QuantLayout layout_of(QuantType type) {
  switch (type) {
    case QuantType::q8_0:
      return {32, 34};
    case QuantType::q4_0:
    case QuantType::iq4_nl:
      return {32, 18};
    case QuantType::q4_k:
      return {256, 144};
    case QuantType::q5_k:
      return {256, 176};
    case QuantType::q6_k:
      return {256, 210};
  }
  return {1, 0};
}

// A matrix [rows, columns]. Its rows lie one behind the other, without gaps and without alignment.
struct QuantMatrix {
  QuantType type = QuantType::q8_0;
  const std::byte* data = nullptr;
  std::int64_t rows = 0, columns = 0;  // columns: whole blocks

  constexpr explicit operator bool() const { return data != nullptr; }
  constexpr std::int64_t row_bytes() const { return columns / layout_of(type).elements * layout_of(type).bytes; }
  constexpr const std::byte* row(std::int64_t n) const { return data + n * row_bytes(); }
  // Returns element [n, d]. Computes its whole block.
  float at(std::int64_t n, std::int64_t d) const;
};

// Writes the numbers of a block in float32.
void dequantise(QuantType type, const std::byte* block, float* to);
// Writes row n of a matrix, float32 [columns].
void dequantise_row(const QuantMatrix& matrix, std::int64_t n, float* to);

// The numbers that the four bits of IQ4_NL stand for.
inline constexpr std::array<std::int8_t, 16> kIq4Levels{-127, -104, -83, -65, -49, -35, -22, -10,
                                                        1,    13,   25,  38,  53,  69,  89,  113};

// Returns the float16 at an address.
inline float half_at(const std::uint8_t* from) {
  return to_float(float16(static_cast<std::uint16_t>(from[0] | from[1] << 8)));
}

// The scale and the minimum of 32 numbers of Q4_K and Q5_K, six bits each.
struct SixBits {
  int scale, minimum;
};

// Returns scale and minimum of part j of a block from its 12 bytes: for j < 4 the low bits of bytes j and j + 4; for
// other parts four bits of byte j + 4 and two at the top of bytes j − 4 and j.
inline SixBits six_bits(const std::uint8_t* bytes, int j) {
  if (j < 4) return {bytes[j] & 63, bytes[j + 4] & 63};
  return {(bytes[j + 4] & 15) | (bytes[j - 4] >> 6) << 4, bytes[j + 4] >> 4 | (bytes[j] >> 6) << 4};
}

// Writes the numbers of a block. Inlined always, so that a kernel compiles it for its instruction set.
template <QuantType kType>
[[gnu::always_inline]] inline void dequantise_block(const std::uint8_t* block, float* to) {
  if constexpr (kType == QuantType::q8_0) {
    const float scale = half_at(block);
    for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(static_cast<std::int8_t>(block[2 + i]));
  } else if constexpr (kType == QuantType::q4_0 || kType == QuantType::iq4_nl) {
    const auto level = [](int bits) { return kType == QuantType::q4_0 ? bits - 8 : int{kIq4Levels[bits]}; };
    const float scale = half_at(block);
    for (int i = 0; i < 16; ++i) {
      to[i] = scale * static_cast<float>(level(block[2 + i] & 15));
      to[16 + i] = scale * static_cast<float>(level(block[2 + i] >> 4));
    }
  } else if constexpr (kType == QuantType::q4_k || kType == QuantType::q5_k) {
    constexpr bool kFifth = kType == QuantType::q5_k;  // whether 32 bytes have the fifth bits of all numbers
    const std::uint8_t *fifth = block + 16, *low = fifth + (kFifth ? 32 : 0);
    for (int j = 0; j < 8; ++j) {
      const auto [scale, minimum] = six_bits(block + 4, j);
      const float d = half_at(block) * static_cast<float>(scale), m = half_at(block + 2) * static_cast<float>(minimum);
      for (int i = 0; i < 32; ++i) {
        int bits = low[j / 2 * 32 + i] >> j % 2 * 4 & 15;
        if constexpr (kFifth) bits |= (fifth[i] >> j & 1) << 4;
        to[32 * j + i] = d * static_cast<float>(bits) - m;
      }
    }
  } else {
    const std::uint8_t *high = block + 128, *scales = block + 192;
    const float d = half_at(block + 208);
    for (int j = 0; j < 8; ++j) {  // of each half, part j % 4 has bits 2·(j % 4) of the half's 32 bytes of high bits
      const int half = j / 4, part = j % 4;
      for (int i = 0; i < 32; ++i) {
        const int four = block[half * 64 + part % 2 * 32 + i] >> part / 2 * 4 & 15;
        const int bits = four | (high[half * 32 + i] >> 2 * part & 3) << 4;
        const float scale = d * static_cast<float>(static_cast<std::int8_t>(scales[2 * j + i / 16]));
        to[32 * j + i] = scale * static_cast<float>(bits - 32);
      }
    }
  }
}

}  // namespace efla
