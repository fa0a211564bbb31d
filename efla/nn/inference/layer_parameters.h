// The parameters of a model's layer as inference uses them: the weights of projections of the same input in one list,
// and values that depend only on parameters computed once.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "efla/nn/layers/mixer_plan.h"
#include "efla/nn/models/language_model.h"

namespace efla::nn {

// Tensors are detached and lie on the model's device. A tensor is undefined if the layer does not have it. With a mixer
// that MixerPlan::refusal names only the tensors of the norms and the MLP are defined; in a layer of softmax attention
// also `in` and o_proj.
struct LayerParameters {
  // plan: of the mixers of the model.
  LayerParameters(const LanguageModel& model, const MixerPlan& plan, std::int64_t index);

  bool has_mixer() const { return taps.defined(); }

  torch::Tensor attn_norm, mlp_norm, gate, up, down;
  torch::Tensor o_norm, o_proj, f_out, g_out;
  std::vector<torch::Tensor> in;  // [·, D]: of MixerPlan::projections, or of q, k and v of an attention
  torch::Tensor taps;             // [2·H·K + HV·V, W]
  torch::Tensor beta_factor;      // [HV]: beta_scale · softplus(α)
  torch::Tensor rate, dt_bias;    // of the decay, by autograd::decay_rate: [HV]; [HV] or [HV·K]
  torch::Tensor gate_bias;        // of the sigmoid gate [HV·V]
  torch::Tensor correction;       // [H] D sigmoid(decay) of the erase key closed_loop
};

}  // namespace efla::nn
