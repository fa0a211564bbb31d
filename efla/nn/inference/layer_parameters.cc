#include "efla/nn/inference/layer_parameters.h"

#include <torch/types.h>

#include <string>

#include "efla/autograd/layers/decay_gate.h"

namespace efla::nn {

using torch::Tensor;

LayerParameters::LayerParameters(const LanguageModel& model, const MixerPlan& plan, std::int64_t index) {
  const auto named = model.named_parameters();
  const std::string prefix = "model.layers." + std::to_string(index) + ".";
  const auto find = [&](const std::string& name) {
    const auto* value = named.find(prefix + name);
    return value == nullptr ? Tensor() : value->detach();
  };
  attn_norm = find("attn_norm.weight");
  mlp_norm = find("mlp_norm.weight");
  gate = find("mlp.gate_proj.weight");
  up = find("mlp.up_proj.weight");
  down = find("mlp.down_proj.weight");
  const bool attends = model.config().is_attention(index);
  if (!attends && !plan.refusal().empty()) return;

  o_proj = find("attn.o_proj.weight");
  if (attends) {
    in = {find("attn.q_proj.weight"), find("attn.k_proj.weight"), find("attn.v_proj.weight")};
    return;
  }
  for (const auto& projection : plan.projections) in.push_back(find("attn." + projection.name + ".weight"));
  o_norm = find("attn.o_norm.weight");
  taps =
      torch::cat({find("attn.q_conv1d.weight"), find("attn.k_conv1d.weight"), find("attn.v_conv1d.weight")}).squeeze(1);
  f_out = find("attn.f_proj.1.weight");
  g_out = find("attn.g_proj.1.weight");
  gate_bias = find("attn.g_proj.1.bias");

  beta_factor = torch::full({plan.config.value_heads}, plan.config.beta_scale, attn_norm.options());
  if (const auto alpha = find("attn.alpha"); alpha.defined()) beta_factor = beta_factor * torch::softplus(alpha);
  if (const auto decay = find("attn.decay"); decay.defined()) correction = find("attn.D") * torch::sigmoid(decay);
  if (plan.gate == Gate::none) return;
  const auto parts = autograd::decay_rate(find("attn.dt_bias"), find("attn.A_log"), decay_activation_of(plan.gate));
  rate = parts.rate;
  dt_bias = parts.bias;
}

}  // namespace efla::nn
