#include "efla/io/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace efla::io {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded as the bytes lie");

constexpr std::size_t kWord = sizeof(std::uint64_t);

std::uint64_t load_word(const std::uint8_t* from) {
  std::uint64_t word = 0;
  std::memcpy(&word, from, kWord);
  return word;
}

using Table = std::array<std::uint32_t, 256>;

// Returns the tables of a word: tables[i][byte] is the remainder of a byte that i zero bytes follow.
constexpr std::array<Table, kWord> make_tables() {
  constexpr std::uint32_t kReversedPolynomial = 0x82F63B78U;
  std::array<Table, kWord> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t x = byte;
    for (int bit = 0; bit < 8; ++bit) x = (x >> 1) ^ ((x & 1U) != 0 ? kReversedPolynomial : 0U);
    tables[0][byte] = x;
  }
  for (std::size_t i = 1; i < kWord; ++i) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t x = tables[i - 1][byte];
      tables[i][byte] = (x >> 8) ^ tables[0][x & 0xFFU];
    }
  }
  return tables;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(ByteView bytes, std::uint32_t before) {
  std::uint64_t x = static_cast<std::uint32_t>(~before);
  const std::uint8_t* at = bytes.data();
  std::size_t size = bytes.size();
  for (; size >= kWord; at += kWord, size -= kWord) x = _mm_crc32_u64(x, load_word(at));
  auto rest = static_cast<std::uint32_t>(x);
  for (; size > 0; ++at, --size) rest = _mm_crc32_u8(rest, *at);
  return ~rest;
}
#endif

}  // namespace

std::uint32_t crc32c_portable(ByteView bytes, std::uint32_t before) {
  static constexpr auto kTables = make_tables();
  std::uint32_t x = ~before;
  const std::uint8_t* at = bytes.data();
  std::size_t size = bytes.size();
  for (; size >= kWord; at += kWord, size -= kWord) {
    const std::uint64_t word = load_word(at) ^ x;
    x = 0;
    for (std::size_t i = 0; i < kWord; ++i) x ^= kTables[kWord - 1 - i][(word >> (8 * i)) & 0xFFU];
  }
  for (; size > 0; ++at, --size) x = kTables[0][(x ^ *at) & 0xFFU] ^ (x >> 8);
  return ~x;
}

std::uint32_t crc32c(ByteView bytes, std::uint32_t before) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return crc32c_sse42(bytes, before);
#endif
  return crc32c_portable(bytes, before);
}

}  // namespace efla::io
