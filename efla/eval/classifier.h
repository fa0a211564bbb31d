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

// Images that are computed at a time: on the CPU few enough for their activations to stay in a core's cache, on a GPU
// enough to fill it. Sums over a batch add the sums of groups of this size, so another size gives other bits.
inline std::int64_t micro_batch(const torch::Device& device) { return device.is_cpu() ? 8 : 512; }

struct Batch {
  torch::Tensor pixels;  // [B, rows · cols] float32 in [0, 1]
  torch::Tensor labels;  // [B] int64
};

// Returns the images at these indices, disturbed by the perturbation, on the device.
Batch make_batch(const data::ImageSet& images, std::span<const std::uint32_t> indices,
                 const Perturbation& perturbation = {}, std::uint64_t seed = 0, torch::Device device = torch::kCPU);

// Returns the number of images whose label's logit is above all others, a scalar int64 on the logits' device; a tie or
// a NaN counts as wrong.
torch::Tensor count_correct(const torch::Tensor& logits, const torch::Tensor& labels);

}  // namespace efla::eval
