#include "efla/nn/inference/layer_parameters.h"

#include <torch/types.h>

#include "efla/autograd/layers/decay_gate.h"

namespace efla::nn {

using torch::Tensor;

MixerShape::MixerShape(const LanguageModelConfig& model)
    : config(model.mixer_config()),
      preset(mixer_preset(model.mixer)),
      gate(config.lower_bound ? Gate::safe_channel : preset.gate),
      rule(rule_of(preset)) {
  if (config.value_heads == 0) config.value_heads = config.heads;
  rule.decay = gate == Gate::none ? Decay::none : gate == Gate::scalar ? Decay::scalar : Decay::channel;
  values = config.value_heads * config.value_dim;
  channels = 2 * config.heads * config.key_dim + values;
}

std::string MixerShape::refusal() const {
  if (preset.softmax) return "layers of softmax attention";
  if (config.conv == 0) return "a mixer without short convolution";
  if (config.qk_activation != "silu") return "the activation " + config.qk_activation;
  return config.qk_sum_norm ? "qk_norm sum" : "";
}

LayerParameters::LayerParameters(const LanguageModel& model, const MixerShape& mixer, std::int64_t index) {
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
  if (!attends && !mixer.refusal().empty()) return;

  in = {find("attn.q_proj.weight"), find("attn.k_proj.weight"), find("attn.v_proj.weight")};
  o_proj = find("attn.o_proj.weight");
  if (attends) return;
  o_norm = find("attn.o_norm.weight");
  taps =
      torch::cat({find("attn.q_conv1d.weight"), find("attn.k_conv1d.weight"), find("attn.v_conv1d.weight")}).squeeze(1);
  std::int64_t columns = mixer.channels;
  const auto append = [&](const std::string& name, std::int64_t& first) {
    const auto weight = find(name);
    if (!weight.defined()) return;
    first = columns;
    in.push_back(weight);
    columns += weight.size(0);
  };
  const bool low_rank = mixer.config.output_gate == OutputGate::sigmoid;
  append("attn.b_proj.weight", b);
  append("attn.a_proj.weight", a);
  append("attn.f_proj.0.weight", f);
  append(low_rank ? "attn.g_proj.0.weight" : "attn.g_proj.weight", g);
  f_out = find("attn.f_proj.1.weight");
  g_out = find("attn.g_proj.1.weight");
  gate_bias = find("attn.g_proj.1.bias");

  beta_factor = torch::full({mixer.config.value_heads}, mixer.config.beta_scale, attn_norm.options());
  if (const auto alpha = find("attn.alpha"); alpha.defined()) beta_factor = beta_factor * torch::softplus(alpha);
  if (mixer.gate == Gate::none) return;
  const auto parts = autograd::decay_rate(find("attn.dt_bias"), find("attn.A_log"), decay_activation_of(mixer.gate));
  rate = parts.rate;
  dt_bias = parts.bias;
}

}  // namespace efla::nn
