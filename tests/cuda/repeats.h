// Poison for memory of the device, and comparisons of its bits there, for tests that repeat a call many times.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace efla::test {

// Memory of the device in whole words.
struct Words {
  std::uint32_t* data = nullptr;
  std::int64_t count = 0;
};

// What memory holds before a call. `nan` is NaN in every floating-point type.
enum class Poison { nan, zeros, ones, random };

// Fills words. Random words depend on the seed.
void fill(const Words& words, Poison poison, std::uint32_t seed = 0);

// Adds the number of words in which two memories of the same size differ to a number in the memory of the device.
void count_differing(const Words& x, const Words& y, unsigned long long* count);

}  // namespace efla::test
