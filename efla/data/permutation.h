// A random permutation without a table of its elements.
#pragma once

#include <array>
#include <cstdint>

namespace efla::data {

// A permutation of [0, count) that depends only on (count, seed, stream): a Feistel network on the next power of 4,
// applied until the result is in range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, section 3).
class Permutation {
 public:
  Permutation(std::int64_t count, std::uint64_t seed, std::uint64_t stream);

  // Returns the image of an index in [0, count).
  std::int64_t operator()(std::int64_t index) const;

 private:
  static constexpr int kRounds = 8;

  std::uint64_t count_;
  int half_bits_ = 1;
  std::array<std::uint64_t, kRounds> keys_{};
};

}  // namespace efla::data
