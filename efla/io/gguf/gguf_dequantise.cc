#include "efla/io/gguf/gguf_dequantise.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace efla::io {
namespace {

using Block = const std::uint8_t*;

void from_float32(Block block, float* to) { std::memcpy(to, block, sizeof(float)); }
void from_float16(Block block, float* to) { *to = half_at(block); }
void from_bfloat16(Block block, float* to) {
  *to = std::bit_cast<float>(static_cast<std::uint32_t>(block[0] | block[1] << 8) << 16);
}

// Of Q4_1: a scale, a minimum, 32 numbers of four bits.
void from_q4_1(Block block, float* to) {
  const float scale = half_at(block), minimum = half_at(block + 2);
  for (int i = 0; i < 32; ++i) {
    to[i] = scale * static_cast<float>(block[4 + i % 16] >> i / 16 * 4 & 15) + minimum;
  }
}

// Returns number i of 32, whose fifth bits lie before the four others.
int five_bits(Block fifth, int i) { return (fifth[4 + i % 16] >> i / 16 * 4 & 15) | (fifth[i / 8] >> i % 8 & 1) << 4; }

void from_q5_0(Block block, float* to) {
  const float scale = half_at(block);
  for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(five_bits(block + 2, i) - 16);
}

void from_q5_1(Block block, float* to) {
  const float scale = half_at(block), minimum = half_at(block + 2);
  for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(five_bits(block + 4, i)) + minimum;
}

// Returns number i of 256 with two bits each: 128 numbers lie in 32 bytes, each byte of which has one of every 32.
int two_bits(Block block, int i) { return block[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3; }

// Of Q2_K: 16 bytes of a scale and a minimum, the numbers, and the scales of both.
void from_q2_k(Block block, float* to) {
  const float scale = half_at(block + 80), minimum = half_at(block + 82);
  for (int i = 0; i < 256; ++i) {
    const int both = block[i / 16];
    const float d = scale * static_cast<float>(both & 15), m = minimum * static_cast<float>(both >> 4);
    to[i] = d * static_cast<float>(two_bits(block + 16, i)) - m;
  }
}

// Of Q3_K: the third bits, the two others, 16 scales of six bits, and their scale. A third bit of 0 subtracts 4.
void from_q3_k(Block block, float* to) {
  const Block scales = block + 96;
  const float scale = half_at(block + 108);
  for (int i = 0; i < 256; ++i) {
    const int j = i / 16;
    const int bits = (scales[j % 8] >> j / 8 * 4 & 15) | (scales[8 + j % 4] >> j / 4 * 2 & 3) << 4;
    const int third = block[i % 32] >> i / 32 & 1;
    to[i] = scale * static_cast<float>(bits - 32) * static_cast<float>(two_bits(block + 32, i) - (third == 1 ? 0 : 4));
  }
}

// Of IQ4_XS: a scale, 8 scales of six bits, and levels of IQ4_NL.
void from_iq4_xs(Block block, float* to) {
  const int high = block[2] | block[3] << 8;
  const float scale = half_at(block);
  for (int i = 0; i < 256; ++i) {
    const int j = i / 32;
    const int bits = (block[4 + j / 2] >> j % 2 * 4 & 15) | (high >> 2 * j & 3) << 4;
    const int level = block[8 + 16 * j + i % 16] >> i % 32 / 16 * 4 & 15;
    to[i] = scale * static_cast<float>(bits - 32) * static_cast<float>(kIq4Levels[static_cast<std::size_t>(level)]);
  }
}

// Of MXFP4: an exponent, and 32 numbers of four bits. Levels are twice as large as in the format E2M1.
void from_mxfp4(Block block, float* to) {
  constexpr float kLevels[]{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const std::uint32_t exponent = block[0];
  const float half = std::bit_cast<float>(exponent < 2 ? std::uint32_t{0x00200000} << exponent : (exponent - 1) << 23);
  for (int i = 0; i < 32; ++i) to[i] = half * kLevels[block[1 + i % 16] >> i / 16 * 4 & 15];
}

template <QuantType kType>
void from_blocks(Block block, float* to) {
  dequantise_block<kType>(block, to);
}

// How the numbers of a block of a type are read.
struct BlockReader {
  std::string_view name;
  void (*read)(Block block, float* to);
  std::optional<QuantType> quant = {};
};

constexpr BlockReader kBlockReaders[]{{"F32", from_float32},
                                      {"F16", from_float16},
                                      {"BF16", from_bfloat16},
                                      {"Q8_0", from_blocks<QuantType::q8_0>, QuantType::q8_0},
                                      {"Q4_0", from_blocks<QuantType::q4_0>, QuantType::q4_0},
                                      {"Q4_1", from_q4_1},
                                      {"Q5_0", from_q5_0},
                                      {"Q5_1", from_q5_1},
                                      {"Q2_K", from_q2_k},
                                      {"Q3_K", from_q3_k},
                                      {"Q4_K", from_blocks<QuantType::q4_k>, QuantType::q4_k},
                                      {"Q5_K", from_blocks<QuantType::q5_k>, QuantType::q5_k},
                                      {"Q6_K", from_blocks<QuantType::q6_k>, QuantType::q6_k},
                                      {"IQ4_NL", from_blocks<QuantType::iq4_nl>, QuantType::iq4_nl},
                                      {"IQ4_XS", from_iq4_xs},
                                      {"MXFP4", from_mxfp4}};

const BlockReader* find_reader(const GgufType& type) {
  const auto* found = std::ranges::find(kBlockReaders, type.name, &BlockReader::name);
  return found == std::end(kBlockReaders) ? nullptr : found;
}

}  // namespace

std::optional<QuantType> quant_type(const GgufType& type) {
  const BlockReader* reader = find_reader(type);
  return reader == nullptr ? std::nullopt : reader->quant;
}

bool can_dequantise(const GgufType& type) { return find_reader(type) != nullptr; }

std::string dequantised_types() {
  std::string names;
  for (const auto& reader : kBlockReaders) names.append(names.empty() ? "" : ", ").append(reader.name);
  return names;
}

void dequantise(const GgufType& type, ByteView blocks, float* to) {
  const auto read = find_reader(type)->read;
  for (std::size_t at = 0; at < blocks.size(); at += static_cast<std::size_t>(type.bytes), to += type.elements) {
    read(blocks.data() + at, to);
  }
}

}  // namespace efla::io
