// Draws the next tokens of several texts on the device of their logits.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>

#include "efla/engine/sampler.h"

namespace efla::engine {

// What decides a draw besides logits and options. seen: the ids of the text before it; null: the row has no text.
struct Draw {
  const SeenIds* seen = nullptr;
  std::uint64_t seed = 0, draws = 0;  // of Random
};

// Draws an id for each row of logits [B, V] float32, by operations of LibTorch on their device: the id that sample
// draws, unless the rounding of a sum of probabilities decides. A row without a text gets any id. Returns [B, 2]
// float64: the id, and the row's largest logit after the penalty, which is finite unless sample would throw.
torch::Tensor sample_rows(const torch::Tensor& logits, std::span<const Draw> rows, const SamplingOptions& options);

}  // namespace efla::engine
