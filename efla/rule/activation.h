// Functions of one number in gates. They are constexpr so that CUDA kernels call them too.
#pragma once

#include <cmath>

namespace efla {

// Returns σ(x) = 1/(1 + e^−x). A GPU rounds float32's quotient less exactly than a division, and takes fewer
// instructions.
template <class Real>
constexpr Real sigmoid(Real x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Real) == sizeof(float)) {
    return __fdividef(Real{1}, Real{1} + std::exp(-x));
  } else
#endif
    return Real{1} / (Real{1} + std::exp(-x));
}

// Returns log(1 + e^x); a large x unchanged, like LibTorch.
template <class Real>
constexpr Real softplus(Real x) {
  return x > Real{20} ? x : std::log1p(std::exp(x));
}

}  // namespace efla
