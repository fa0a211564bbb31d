#include "efla/io/sha256.h"

#include <algorithm>
#include <array>
#include <bit>

#include <fmt/format.h>

namespace efla::io {
namespace {

using Block = std::array<std::uint8_t, 64>;
using State = std::array<std::uint32_t, 8>;

using uint128 = unsigned __int128;

// Returns the first 32 bits of the fractional part of the square root (power 2) or cube root (power 3) of n: the
// largest r with r^power ≤ n · 2^(32 · power), without its integer part.
constexpr std::uint32_t root_fraction(std::uint32_t n, int power) {
  std::uint64_t root = 0;
  for (int bit = 36; bit >= 0; --bit) {
    const uint128 r = root | std::uint64_t{1} << bit;
    // r < 2^37 keeps r³ within 111 bits.
    if ((power == 2 ? r * r : r * r * r) <= uint128{n} << (32 * power)) root = static_cast<std::uint64_t>(r);
  }
  return static_cast<std::uint32_t>(root);
}

// The standard's constants: roots of the first Count primes.
template <std::size_t Count>
constexpr std::array<std::uint32_t, Count> prime_roots(int power) {
  std::array<std::uint32_t, Count> roots{};
  std::size_t found = 0;
  for (std::uint32_t n = 2; found < Count; ++n) {
    bool prime = true;
    for (std::uint32_t d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    if (prime) roots[found++] = root_fraction(n, power);
  }
  return roots;
}

constexpr auto kInitial = prime_roots<8>(2);
constexpr auto kRound = prime_roots<64>(3);

void compress(State& state, const std::uint8_t* block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i) {
    const auto* b = block + 4 * i;
    w[i] = std::uint32_t{b[0]} << 24 | std::uint32_t{b[1]} << 16 | std::uint32_t{b[2]} << 8 | std::uint32_t{b[3]};
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const auto s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
    const auto s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const auto sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const auto t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const auto sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const auto t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1;
    d = c, c = b, b = a, a = t1 + t2;
  }
  const State added{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += added[i];
}

}  // namespace

Sha256::Sha256() : state_(kInitial) {}

void Sha256::update(ByteView bytes) {
  const auto held = static_cast<std::size_t>(size_ % block_.size());
  size_ += bytes.size();
  if (held > 0) {
    const auto taken = std::min(block_.size() - held, bytes.size());
    std::copy_n(bytes.begin(), taken, block_.begin() + static_cast<std::ptrdiff_t>(held));
    if (held + taken < block_.size()) return;
    compress(state_, block_.data());
    bytes = bytes.subspan(taken);
  }
  for (; bytes.size() >= block_.size(); bytes = bytes.subspan(block_.size())) compress(state_, bytes.data());
  std::copy(bytes.begin(), bytes.end(), block_.begin());
}

std::string Sha256::digest() {
  // The last bytes, a one bit, zeros, and the length in bits: one block or two.
  std::array<std::uint8_t, 128> tail{};
  const auto rest = static_cast<std::size_t>(size_ % block_.size());
  std::copy_n(block_.begin(), rest, tail.begin());
  tail[rest] = 0x80;
  const std::size_t tail_size = rest < 56 ? 64 : 128;
  const std::uint64_t bits = size_ * 8;
  for (std::size_t i = 0; i < 8; ++i) tail[tail_size - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
  for (std::size_t i = 0; i < tail_size; i += 64) compress(state_, tail.data() + i);

  std::string digits;
  for (const auto word : state_) digits += fmt::format("{:08x}", word);
  return digits;
}

std::string sha256(ByteView bytes) {
  Sha256 sum;
  sum.update(bytes);
  return sum.digest();
}

}  // namespace efla::io
