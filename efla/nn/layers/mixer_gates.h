// What a mixer computes of its small projections: β and the decay.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>

#include "efla/nn/layers/mixer_plan.h"
#include "efla/nn/layers/parameters.h"

namespace efla::nn {

// The outputs of the small projections, [B, T, ·]; undefined if the mixer does not have them.
struct SmallOutputs {
  torch::Tensor f, g, b, w, a;  // as the columns of MixerPlan with the same names; g only if it is low-rank
};

// Splits the columns of JointProjection's result after q, k and v.
SmallOutputs split_small_outputs(const MixerPlan& plan, const torch::Tensor& columns);

class MixerGates {
 public:
  // Registers b_proj, alpha, and a_proj or f_proj with A_log and dt_bias in the mixer, as far as the plan has them.
  MixerGates(SharedPlan plan, torch::nn::Module& mixer, const Initialiser& init);

  // Returns β [B, T·n, HV] in the type of qkv [B, T, ·].
  torch::Tensor beta(const SmallOutputs& small, const torch::Tensor& qkv) const;
  // Returns the logarithm of the decay, [B, T, HV] or [B, T, HV, K]; undefined without a decay.
  torch::Tensor decay(const SmallOutputs& small) const;

 private:
  void register_decay(torch::nn::Module& mixer, const Initialiser& init);

  SharedPlan plan_;
  torch::Tensor alpha_;            // [HV] of an adaptive β
  torch::Tensor a_log_, dt_bias_;  // of a decay: [HV] and [HV], or [HV·K] with a channel gate
  std::shared_ptr<Weight> f_out_;
};

}  // namespace efla::nn
