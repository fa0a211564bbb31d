// The part of a mixer after its recurrence: the norm of each head's output, the output gate, and the projection.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>

#include "efla/nn/layers/mixer_plan.h"
#include "efla/nn/layers/parameters.h"

namespace efla::nn {

class MixerOutput {
 public:
  // Registers g_proj and o_norm, as far as the plan has them, and o_proj in the mixer.
  MixerOutput(SharedPlan plan, torch::nn::Module& mixer, const Initialiser& init);

  // Maps o [B, T, HV, V] to [B, T, D]. x [B, T, D] is the mixer's input, and low_rank [B, T, V] the output of g_proj.0
  // with the gate sigmoid.
  torch::Tensor operator()(const torch::Tensor& x, const torch::Tensor& low_rank, torch::Tensor o) const;

 private:
  // Returns the output gate before its activation, [B, T, HV, V].
  torch::Tensor gate(const torch::Tensor& x, const torch::Tensor& low_rank) const;

  SharedPlan plan_;
  std::shared_ptr<Weight> gate_, norm_, projection_;
  torch::Tensor gate_bias_;  // [HV·V] of the gate sigmoid
};

}  // namespace efla::nn
