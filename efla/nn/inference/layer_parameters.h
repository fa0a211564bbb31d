// The parameters of a model's layer as inference uses them: the weights of projections of the same input in one list,
// and values that depend only on parameters computed once.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "efla/nn/models/language_model.h"
#include "efla/rule/problem.h"

namespace efla::nn {

// The configuration and the rule that all mixers of a model share.
struct MixerShape {
  explicit MixerShape(const LanguageModelConfig& config);

  // Returns the property of the mixers that inference does not support: softmax attention, no short convolution,
  // another activation than silu, or qk_norm sum. Returns "" if there is none.
  std::string refusal() const;

  MixerConfig config;  // with value_heads set
  const MixerPreset& preset;
  Gate gate;
  DeltaRule rule;
  std::int64_t values, channels;  // HV·V, and 2·H·K + HV·V
};

// Tensors are detached and lie on the model's device. A tensor is undefined if the layer does not have it. With a mixer
// that MixerShape refuses only the tensors of the norms and the MLP are defined; in a layer of softmax attention also
// `in` and o_proj.
struct LayerParameters {
  LayerParameters(const LanguageModel& model, const MixerShape& mixer, std::int64_t index);

  bool has_mixer() const { return taps.defined(); }

  torch::Tensor attn_norm, mlp_norm, gate, up, down;
  torch::Tensor o_norm, o_proj, f_out, g_out;
  std::vector<torch::Tensor> in;                // [·, D]: q, k, v and, where they exist, b, a, f_proj.0 and the gate g
  std::int64_t b = -1, a = -1, f = -1, g = -1;  // their first columns in the outputs of `in`; −1: none
  torch::Tensor taps;                           // [2·H·K + HV·V, W]
  torch::Tensor beta_factor;                    // [HV]: beta_scale · softplus(α)
  torch::Tensor rate, dt_bias;                  // of the decay, by autograd::decay_rate: [HV]; [HV] or [HV·K]
  torch::Tensor gate_bias;                      // of the sigmoid gate [HV·V]
};

}  // namespace efla::nn
