#include "efla/data/permutation.h"

#include <bit>

#include "efla/base/random.h"

namespace efla::data {
namespace {

// Returns a value each bit of which depends on all of x (the finalizer of Steele, Lea and Flood's SplitMix, 2014).
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return x ^ x >> 31;
}

}  // namespace

Permutation::Permutation(std::int64_t count, std::uint64_t seed, std::uint64_t stream)
    : count_(static_cast<std::uint64_t>(count)) {
  // Two halves of equal width give fewer than 4 · count values, so on average at most 4 applications are needed.
  half_bits_ = (std::bit_width(count_ - 1) + 1) / 2;
  Random random(seed, stream);
  for (auto& key : keys_) {
    key = std::uint64_t{random.bits()} << 32;
    key |= random.bits();
  }
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  auto x = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = x >> half_bits_, right = x & mask;
    for (const auto key : keys_) {
      const auto next = left ^ (mix(right + key) & mask);
      left = right;
      right = next;
    }
    x = left << half_bits_ | right;
  } while (x >= count_);
  return static_cast<std::int64_t>(x);
}

}  // namespace efla::data
