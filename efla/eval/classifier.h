// What training and evaluation need of a classifier of images, and batches for it.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <span>

#include "efla/data/images.h"
#include "efla/eval/perturb.h"
#include "efla/nn/named_tensor.h"

namespace efla::eval {

struct Classifier {
  nn::NamedParameters parameters;  // float32 leaves, in a fixed order

  // pixels [B, rows · cols] float32 in [0, 1] → logits [B, classes]. Called by several threads at once.
  std::function<torch::Tensor(const torch::Tensor& pixels)> forward;
};

// Images that one thread computes at a time: few enough for their activations to stay in its cache. The sums over a
// batch are over groups of this many, so another value gives other bits.
inline constexpr std::int64_t kMicroBatch = 8;

struct Batch {
  torch::Tensor pixels;  // [B, rows · cols] float32 in [0, 1]
  torch::Tensor labels;  // [B] int64
};

// The images at the indices given, disturbed as perturbation says.
Batch make_batch(const data::ImageSet& images, std::span<const std::uint32_t> indices,
                 const Perturbation& perturbation = {}, std::uint64_t seed = 0);

// Images whose label's logit is above all others; a tie or a NaN counts as wrong.
std::int64_t count_correct(const torch::Tensor& logits, const torch::Tensor& labels);

}  // namespace efla::eval
