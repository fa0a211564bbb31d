// The order in which Python's random.Random(seed).shuffle leaves a list.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "efla/base/python_random.h"

namespace efla::test {

// Returns the places, in [0, size), of the elements of a shuffled list. size is below 2³².
inline std::vector<std::size_t> python_shuffled(std::size_t size, std::uint32_t seed) {
  std::vector<std::size_t> order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  PythonRandom random(seed);
  for (std::size_t last = size - 1; last > 0; --last) {
    // _randbelow(last + 1): as many bits as the bound has, drawn again until the number is below the bound.
    const int bits = std::bit_width(last + 1);
    std::size_t chosen = last + 1;
    while (chosen > last) chosen = random.bits() >> (32 - bits);
    std::swap(order[last], order[chosen]);
  }
  return order;
}

}  // namespace efla::test
