// Draws the next tokens of several texts on the device of their logits.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>

#include "efla/generate/session.h"

namespace efla::generate {

// Draws an id for each row of logits [B, V] float32, by operations of LibTorch on their device: the id that sample
// draws for the seed, the draws and the seen ids of the row's session, unless the rounding of a sum of probabilities
// decides. A row without a session (null) gets an arbitrary id. Returns [B, 2] float64: the id, and the row's largest
// logit after the penalty, which is finite unless sample would throw.
torch::Tensor sample_rows(const torch::Tensor& logits, std::span<const Session* const> sessions,
                          const SamplingOptions& options);

}  // namespace efla::generate
