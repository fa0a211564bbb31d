// The contract of rotary position embeddings (Su et al., "RoFormer: enhanced transformer with rotary position
// embedding", 2021, arXiv 2104.09864) of a part of each head. docs/ops/rope.md describes the operator.
#pragma once

#include <cmath>
#include <cstdint>

#include "efla/base/device.h"
#include "efla/base/view.h"

namespace efla {

// Rotates the first R elements of every head, in the pairs (x_i, x_{i + R/2}) for i < R/2:
//
//   y_i = x_i cos φ − x_{i + R/2} sin φ,    y_{i + R/2} = x_{i + R/2} cos φ + x_i sin φ,    φ = position ·
//   theta^(−2i/R)
//
// and copies the other elements. φ is a float64 product and its sine and cosine are rounded to float32, so that the
// error of a rotation is that of float32 for positions up to 10⁶ and far beyond (docs/numerics.md). y may be x.
struct RopeForward {
  View<const float, 3> x;                 // [N, H, K]
  View<const std::int64_t, 1> positions;  // [N], not negative
  std::int64_t rotary = 0;                // R, an even number from 0 to K
  double theta = 10000.0;                 // above 1
  View<float, 3> y;                       // [N, H, K]

  // Returns theta^(−2i/R), the angle of pair i per position.
  double frequency(std::int64_t i) const {
    return std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary));
  }
};

// Throws Error as validate of rule/validate.h does.
void validate(const RopeForward& problem, const Device& device = {});

}  // namespace efla
