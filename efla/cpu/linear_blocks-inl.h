// Rows of quantised blocks (efla/base/quant_block.h) as rows of float32 or bfloat16, which the tiles of
// linear_tiles-inl.h multiply. Included once per target.
#if defined(EFLA_CPU_LINEAR_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_LINEAR_BLOCKS_INL_H_
#undef EFLA_CPU_LINEAR_BLOCKS_INL_H_
#else
#define EFLA_CPU_LINEAR_BLOCKS_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "efla/base/quant_block.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX3
#include <immintrin.h>
#endif

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Writes a block in the type of `to`.
template <QuantType kType>
HWY_INLINE void write_block(const std::uint8_t* block, float* to) {
  dequantise_block<kType>(block, to);
}

#if HWY_TARGET == HWY_AVX3
// Rounds two vectors to bfloat16, the first 16 numbers from `low`. The compilers' own function is not available in a
// function for AVX-512 alone. Numbers below the smallest normal one become 0.
HWY_INLINE __m512i rounded(__m512 low, __m512 high) {
  __m512i both;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(low), "v"(high));
  return both;
}

// Returns the float16 at an address in every lane.
HWY_INLINE __m512 halves_at(const std::uint8_t* from) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, from, sizeof(bits));
  return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
}

HWY_INLINE __m512i bytes_as_words(const std::uint8_t* from) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Returns 16 signed bytes as floats.
HWY_INLINE __m512 signed_bytes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }

HWY_INLINE __m512 ramp() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// Keeps an array in memory, from which a load fills every lane. GCC would permute a register instead, which takes more
// of the units that bound these loops.
HWY_INLINE void keep_in_memory(float (&array)[16]) { asm("" : "+m"(array)); }

// Returns 32 numbers of a table.
HWY_INLINE __m512i choose(__m512i table, __m512i index) { return _mm512_permutexvar_epi16(index, table); }

// Returns the bits of a block of 16 bytes: the low ones of all bytes, then the high ones. More bits stand above each
// four.
HWY_INLINE __m512i four_bits(const std::uint8_t* block) {
  const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 2)));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(low, 4), 1);
}

// Writes two blocks of 32 numbers, of which four bits choose from 16 levels times the scale of the block. One table has
// the numbers of both.
HWY_INLINE void write_levels(const std::uint8_t* first, const std::uint8_t* second, __m512 levels, bfloat16* to) {
  const __m512i table = rounded(_mm512_mul_ps(levels, halves_at(first)), _mm512_mul_ps(levels, halves_at(second)));
  const __m512i sixteen = _mm512_set1_epi16(16);
  _mm512_storeu_si512(to, choose(table, _mm512_andnot_si512(sixteen, four_bits(first))));
  _mm512_storeu_si512(to + 32, choose(table, _mm512_or_si512(sixteen, four_bits(second))));
}

// Writes one such block. The table has its numbers twice.
HWY_INLINE void write_levels(const std::uint8_t* block, __m512 levels, bfloat16* to) {
  const __m512 scaled = _mm512_mul_ps(levels, halves_at(block));
  _mm512_storeu_si512(to, choose(rounded(scaled, scaled), four_bits(block)));
}

template <QuantType kType>
HWY_INLINE __m512 levels_of() {
  if constexpr (kType == QuantType::q4_0) return _mm512_sub_ps(ramp(), _mm512_set1_ps(8));
  return signed_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Levels.data())));
}

// Writes the 8 scales and the 8 minima of a block of Q4_K or Q5_K (six_bits), times their factors.
HWY_INLINE void write_six_bits(const std::uint8_t* block, float (&to)[16]) {
  std::uint32_t word[3];
  std::memcpy(word, block + 4, sizeof(word));
  constexpr std::uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kTop = 0x30303030;
  const std::uint32_t scales = (word[2] & kFour) | (word[0] >> 2 & kTop);
  const std::uint32_t minima = (word[2] >> 4 & kFour) | (word[1] >> 2 & kTop);
  const __m128i bytes = _mm_setr_epi32(static_cast<int>(word[0] & kSix), static_cast<int>(scales),
                                       static_cast<int>(word[1] & kSix), static_cast<int>(minima));
  const __m512 factors = _mm512_mask_blend_ps(0xff00, halves_at(block), halves_at(block + 2));
  _mm512_store_ps(to, _mm512_mul_ps(signed_bytes(bytes), factors));
  keep_in_memory(to);
}

// Returns 16 numbers of part j of a block of Q4_K or Q5_K, for the integers from `first` on.
HWY_INLINE __m512 numbers_of_part(int first, int j, const float* scales) {
  const __m512 integers = _mm512_add_ps(ramp(), _mm512_set1_ps(static_cast<float>(first)));
  return _mm512_fmsub_ps(integers, _mm512_set1_ps(scales[j]), _mm512_set1_ps(scales[8 + j]));
}

// Writes parts 2·kPair and 2·kPair + 1 of a block of Q4_K, which share bytes, from one table.
template <int kPair>
HWY_INLINE void write_two_parts(const std::uint8_t* block, const float* scales, bfloat16* to) {
  const __m512i bits = bytes_as_words(block + 16 + 32 * kPair), sixteen = _mm512_set1_epi16(16);
  const __m512i table = rounded(numbers_of_part(0, 2 * kPair, scales), numbers_of_part(0, 2 * kPair + 1, scales));
  _mm512_storeu_si512(to + 64 * kPair, choose(table, _mm512_andnot_si512(sixteen, bits)));
  _mm512_storeu_si512(to + 64 * kPair + 32, choose(table, _mm512_or_si512(sixteen, _mm512_srli_epi16(bits, 4))));
}

// Writes these parts of a block of Q5_K, each from its own table of 32 numbers. fifth: the fifth bits of all parts.
template <int kPair>
HWY_INLINE void write_two_parts(const std::uint8_t* block, __m512i fifth, const float* scales, bfloat16* to) {
  const __m512i bits = bytes_as_words(block + 48 + 32 * kPair), fifteen = _mm512_set1_epi16(15);
  const auto write = [&](int j, __m512i four, __m512i at_four) HWY_ATTR {
    const __m512i index = _mm512_ternarylogic_epi32(fifteen, four, at_four, 0xca);  // four bits, above them the fifth
    const __m512i table = rounded(numbers_of_part(0, j, scales), numbers_of_part(16, j, scales));
    _mm512_storeu_si512(to + 32 * j, choose(table, index));
  };
  if constexpr (kPair < 2) {
    write(2 * kPair, bits, _mm512_slli_epi16(fifth, 4 - 2 * kPair));
    write(2 * kPair + 1, _mm512_srli_epi16(bits, 4), _mm512_slli_epi16(fifth, 3 - 2 * kPair));
  } else {
    write(2 * kPair, bits, _mm512_srli_epi16(fifth, 2 * kPair - 4));
    write(2 * kPair + 1, _mm512_srli_epi16(bits, 4), _mm512_srli_epi16(fifth, 2 * kPair - 3));
  }
}

template <bool kFifth>
HWY_INLINE void write_parts(const std::uint8_t* block, bfloat16* to) {
  alignas(64) float scales[16];
  write_six_bits(block, scales);
  if constexpr (kFifth) {
    const __m512i fifth = bytes_as_words(block + 16);
    write_two_parts<0>(block, fifth, scales, to);
    write_two_parts<1>(block, fifth, scales, to);
    write_two_parts<2>(block, fifth, scales, to);
    write_two_parts<3>(block, fifth, scales, to);
  } else {
    write_two_parts<0>(block, scales, to);
    write_two_parts<1>(block, scales, to);
    write_two_parts<2>(block, scales, to);
    write_two_parts<3>(block, scales, to);
  }
}

// Writes 32 signed bytes, each half times its scale.
HWY_INLINE void write_bytes(__m256i bytes, __m512 low_scale, __m512 high_scale, bfloat16* to) {
  const __m512 low = _mm512_mul_ps(signed_bytes(_mm256_castsi256_si128(bytes)), low_scale);
  const __m512 high = _mm512_mul_ps(signed_bytes(_mm256_extracti128_si256(bytes, 1)), high_scale);
  _mm512_storeu_si512(to, rounded(low, high));
}

// Writes part kPart of half `half` of a block of Q6_K.
template <int kPart>
HWY_INLINE void write_six(const std::uint8_t* block, int half, const float* scales, bfloat16* to) {
  const auto load = [](const std::uint8_t* from)
                        HWY_ATTR { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); };
  __m256i low = load(block + half * 64 + kPart % 2 * 32), high = load(block + 128 + half * 32);
  if constexpr (kPart / 2 == 1) low = _mm256_srli_epi16(low, 4);
  high = kPart < 2 ? _mm256_slli_epi16(high, 4 - 2 * (kPart % 2)) : _mm256_srli_epi16(high, 2 * (kPart % 2));
  const __m256i four = _mm256_and_si256(low, _mm256_set1_epi8(15));
  const __m256i bits = _mm256_or_si256(four, _mm256_and_si256(high, _mm256_set1_epi8(48)));
  const int j = 4 * half + kPart;
  write_bytes(_mm256_sub_epi8(bits, _mm256_set1_epi8(32)), _mm512_set1_ps(scales[2 * j]),
              _mm512_set1_ps(scales[2 * j + 1]), to + 32 * j);
}

// Writes a block. Needs uses_bfloat16() of common/target.h.
template <QuantType kType>
HWY_INLINE void write_block(const std::uint8_t* block, bfloat16* to) {
  if constexpr (kType == QuantType::q8_0) {
    const __m512 scale = halves_at(block);
    write_bytes(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 2)), scale, scale, to);
  } else if constexpr (kType == QuantType::q4_0 || kType == QuantType::iq4_nl) {
    write_levels(block, levels_of<kType>(), to);
  } else if constexpr (kType == QuantType::q6_k) {
    alignas(64) float scales[16];
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 192));
    _mm512_store_ps(scales, _mm512_mul_ps(signed_bytes(bytes), halves_at(block + 208)));
    keep_in_memory(scales);
    for (int half = 0; half < 2; ++half) {
      write_six<0>(block, half, scales, to);
      write_six<1>(block, half, scales, to);
      write_six<2>(block, half, scales, to);
      write_six<3>(block, half, scales, to);
    }
  } else {
    write_parts<kType == QuantType::q5_k>(block, to);
  }
}
#endif

// Writes rows [begin, end) of a matrix of this type, one behind the other, and prefetches the blocks behind them.
template <QuantType kType, class X>
void write_rows_of(const QuantMatrix& matrix, std::int64_t begin, std::int64_t end, X* to) {
  constexpr std::int64_t kBytes = layout_of(kType).bytes, kElements = layout_of(kType).elements;
  constexpr std::int64_t kPrefetchBytes = 8192, kLine = 64;
  const auto* block = reinterpret_cast<const std::uint8_t*>(matrix.row(begin));
  const auto* const last = reinterpret_cast<const std::uint8_t*>(matrix.row(end));
  const auto prefetch = [&](std::int64_t bytes) HWY_ATTR {
    for (std::int64_t i = 0; i < bytes; i += kLine) hwy::Prefetch(block + kPrefetchBytes + i);
  };
#if HWY_TARGET == HWY_AVX3
  if constexpr (std::is_same_v<X, bfloat16> && (kType == QuantType::q4_0 || kType == QuantType::iq4_nl)) {
    for (; block + kBytes < last; block += 2 * kBytes, to += 2 * kElements) {
      prefetch(2 * kBytes);
      write_levels(block, block + kBytes, levels_of<kType>(), to);
    }
  }
#endif
  for (; block < last; block += kBytes, to += kElements) {
    prefetch(kBytes);
    write_block<kType>(block, to);
  }
}

// Writes rows [begin, end) of a matrix in the type of `to`.
template <class X>
void write_rows(const QuantMatrix& matrix, std::int64_t begin, std::int64_t end, X* to) {
  switch (matrix.type) {
    case QuantType::q8_0:
      return write_rows_of<QuantType::q8_0>(matrix, begin, end, to);
    case QuantType::q4_0:
      return write_rows_of<QuantType::q4_0>(matrix, begin, end, to);
    case QuantType::iq4_nl:
      return write_rows_of<QuantType::iq4_nl>(matrix, begin, end, to);
    case QuantType::q4_k:
      return write_rows_of<QuantType::q4_k>(matrix, begin, end, to);
    case QuantType::q5_k:
      return write_rows_of<QuantType::q5_k>(matrix, begin, end, to);
    case QuantType::q6_k:
      return write_rows_of<QuantType::q6_k>(matrix, begin, end, to);
  }
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // EFLA_CPU_LINEAR_BLOCKS_INL_H_
