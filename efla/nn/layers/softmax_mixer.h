// Causal softmax attention in the place of a mixer's delta rule: the mixer softmax of the classifier and of the model
// of the synthetic tasks, which have no rotary positions. Language models use Attention (attention.h).
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include "efla/nn/layers/mixer_input.h"
#include "efla/nn/layers/mixer_output.h"
#include "efla/nn/layers/mixer_plan.h"
#include "efla/nn/layers/parameters.h"

namespace efla::nn {

// Computes y = o_proj(norm(softmax(q kᵀ/√K) v) · gate), with q, k and v as in Mixer. Parameters have Mixer's names.
class SoftmaxMixer : public torch::nn::Module {
 public:
  // Throws Error for a configuration that validate refuses, and for another mixer than softmax.
  SoftmaxMixer(const MixerConfig& config, const Initialiser& init);

  // Maps x [B, T, D] to [B, T, D], without the residual. Throws Error for cu_seqlens of several packed sequences.
  // Several threads may call this function at once.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cu_seqlens = {}) const;
  // Returns whether this function waits for a GPU to read cu_seqlens on the CPU.
  bool waits_for_gpu() const { return convolution_.reads_cu_seqlens(); }

 private:
  torch::Tensor attend(const torch::Tensor& qkv) const;  // [B, T, 3·D] → [B, T, H, D/H]

  SharedPlan plan_;
  QkvConvolution convolution_;
  MixerOutput output_;
  JointProjection projection_;
};

}  // namespace efla::nn
