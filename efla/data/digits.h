// A data set of digits that look handwritten and that the program draws itself, so that nothing must be downloaded.
#pragma once

#include <cstdint>

#include "efla/data/images.h"

namespace efla::data {

inline constexpr std::int64_t kMostDigits = 100'000'000;  // images of a split

// Draws grey digits of 28 × 28 pixels in MNIST's layout: one of several stroke shapes per digit, with its control
// points moved, an affine map (rotation, shear, scale, shift), and a random pen width and ink. Images 10 n to 10 n + 9
// hold each class once, in random order. Image i depends only on (split, seed, i); the splits share no random numbers.
// Throws Error if count is below 0 or above kMostDigits.
ImageSet builtin_digits(Split split, std::int64_t count, std::uint64_t seed = 0);

}  // namespace efla::data
