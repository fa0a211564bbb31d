// A data set of handwritten-looking digits that the program draws itself, so that everything runs without a download.
#pragma once

#include <cstdint>

#include "efla/data/images.h"

namespace efla::data {

// 28 × 28 grey digits in MNIST's layout: one of several stroke shapes for each digit, with its control points moved, an
// affine map (rotation, shear, scale, shift), and a random pen width and ink. Every ten images in a row hold each class
// once, in random order. Image i of a split depends on (split, seed, i) alone; the splits share no random numbers.
// Throws Error where count is below 0 or above 10⁸.
ImageSet builtin_digits(Split split, std::int64_t count, std::uint64_t seed = 0);

}  // namespace efla::data
