#include "efla/nn/layers/mixer_output.h"

#include <torch/types.h>

#include <utility>

#include "efla/autograd/layers/linear.h"
#include "efla/autograd/layers/rms_norm.h"

namespace efla::nn {

using torch::Tensor;

MixerOutput::MixerOutput(SharedPlan plan, torch::nn::Module& mixer, const Initialiser& init) : plan_(std::move(plan)) {
  const auto& config = plan_->config;
  const std::int64_t width = config.hidden, values = plan_->values();
  if (is_full_rank(config.output_gate)) {
    gate_ = add_projection(mixer, init, "g_proj", values, width);
  } else if (config.output_gate == OutputGate::sigmoid) {
    add_projection(mixer, init, "g_proj.0", config.value_dim, width);
    gate_ = add_projection(mixer, init, "g_proj.1", values, config.value_dim);
    gate_bias_ = gate_->register_parameter("bias", torch::zeros({values}));
  }
  if (config.output_norm) norm_ = add_norm(mixer, "o_norm", config.value_dim);
  projection_ = add_projection(mixer, init, "o_proj", width, values);
}

Tensor MixerOutput::gate(const Tensor& x, const Tensor& low_rank) const {
  const auto& config = plan_->config;
  return autograd::linear(is_full_rank(config.output_gate) ? x : low_rank, gate_->value, gate_bias_)
      .unflatten(2, {config.value_heads, config.value_dim});
}

Tensor MixerOutput::operator()(const Tensor& x, const Tensor& low_rank, Tensor o) const {
  const auto& config = plan_->config;
  o = o.reshape({x.size(0), x.size(1), config.value_heads, config.value_dim});  // o of one token has no axis T
  if (config.output_gate == OutputGate::none) {
    if (norm_) o = autograd::rms_norm(o, norm_->value, config.norm_eps);
  } else if (norm_) {
    o = autograd::gated_rms_norm(o, gate(x, low_rank), norm_->value, activation_of(config.output_gate),
                                 config.norm_eps);
  } else {
    const bool silu = config.output_gate == OutputGate::silu;
    o = o * (silu ? torch::silu(gate(x, low_rank)) : torch::sigmoid(gate(x, low_rank)));
  }
  return autograd::linear(o.flatten(2), projection_->value);
}

}  // namespace efla::nn
