// What a mixer with two keys makes of q, k and v: the erase key, and the query or the value that belongs to it.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <array>

#include "efla/nn/layers/mixer_gates.h"
#include "efla/nn/layers/mixer_plan.h"

namespace efla::nn {

class MixerKeys {
 public:
  // Registers D and decay [H] of the erase key closed_loop in the mixer.
  MixerKeys(SharedPlan plan, torch::nn::Module& mixer);

  // Returns the erase key [B, T, H, K] of a plan with two keys, and replaces heads = {q, k, v}, [B, T, H, K] and
  // [B, T, HV, V], as EraseKey says. g [B, T, HV]: the logarithm of the decay. Gradients flow through all of it.
  torch::Tensor operator()(std::array<torch::Tensor, 3>& heads, const SmallOutputs& small,
                           const torch::Tensor& g) const;

 private:
  SharedPlan plan_;
  torch::Tensor correction_, decay_;  // D and decay, [H]
};

}  // namespace efla::nn
