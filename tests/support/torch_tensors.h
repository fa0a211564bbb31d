// Tensors for tests.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <limits>

#include "efla/base/random.h"

namespace efla::test {

// Returns float64 standard normal values.
inline torch::Tensor random_tensor(at::IntArrayRef sizes, std::uint64_t seed) {
  Random random(seed);
  torch::Tensor tensor = torch::empty(sizes, torch::kDouble);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.data_ptr<double>()[i] = random.normal();
  return tensor;
}

// Returns the largest difference of two elements; infinity if the shapes differ or anything is non-finite.
inline double max_difference(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  const auto difference = (a.detach().to(torch::kDouble) - b.detach().to(torch::kDouble)).abs();
  if (!difference.isfinite().all().item<bool>()) return std::numeric_limits<double>::infinity();
  return difference.numel() == 0 ? 0.0 : difference.max().item<double>();
}

}  // namespace efla::test
