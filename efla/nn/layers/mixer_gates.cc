#include "efla/nn/layers/mixer_gates.h"

#include <torch/types.h>

#include <cmath>
#include <utility>
#include <vector>

#include "efla/autograd/layers/decay_gate.h"
#include "efla/autograd/layers/linear.h"

namespace efla::nn {
namespace {

using torch::Tensor;

// Draws A_log so that exp(A_log) is uniform in (least, 16).
Tensor initial_a_log(const Initialiser& init, std::int64_t heads, double least) {
  const auto unit = 0.5 + 0.5 * init.uniform("A_log", {heads}, 1.0);
  return torch::log(least + (16.0 - least) * unit).clamp_min(-20.0);
}

// Draws dt_bias so that softplus(dt_bias) is log-uniform in (0.001, 0.1).
Tensor initial_dt_bias(const Initialiser& init, std::int64_t count) {
  const auto unit = 0.5 + 0.5 * init.uniform("dt_bias", {count}, 1.0);
  const auto dt = torch::exp(std::log(1e-3) + unit * (std::log(1e-1) - std::log(1e-3))).clamp_min(1e-4);
  return dt + torch::log(-torch::expm1(-dt));
}

}  // namespace

SmallOutputs split_small_outputs(const MixerPlan& plan, const Tensor& columns) {
  std::vector<std::int64_t> widths;
  std::int64_t beyond = columns.size(2);
  for (const auto& projection : plan.joint().subspan(MixerPlan::kQkv)) {
    widths.push_back(projection.columns.count);
    beyond -= projection.columns.count;
  }
  if (widths.empty()) return {};
  widths.push_back(beyond);
  const auto parts = columns.split_with_sizes(widths, 2);  // their gradients are concatenated, not added
  auto part = parts.begin();
  const auto next = [&](bool exists) { return exists ? *part++ : Tensor(); };
  SmallOutputs small;
  small.f = next(static_cast<bool>(plan.f));
  small.g = next(plan.config.output_gate == OutputGate::sigmoid);
  small.b = next(static_cast<bool>(plan.b));
  small.w = next(static_cast<bool>(plan.w));
  small.a = next(static_cast<bool>(plan.a));
  return small;
}

MixerGates::MixerGates(SharedPlan plan, torch::nn::Module& mixer, const Initialiser& init) : plan_(std::move(plan)) {
  const std::int64_t width = plan_->config.hidden, heads = plan_->config.value_heads;
  if (plan_->b) add_projection(mixer, init, "b_proj", plan_->b.count, width);
  if (plan_->w) add_projection(mixer, init, "w_proj", plan_->w.count, width);
  if (plan_->preset.adaptive) {
    // softplus(α) = 1
    alpha_ = mixer.register_parameter("alpha", torch::full({heads}, std::log(std::expm1(1.0)), torch::kFloat));
  }
  if (plan_->gate != Gate::none) register_decay(mixer, init);
}

void MixerGates::register_decay(torch::nn::Module& mixer, const Initialiser& init) {
  const auto& config = plan_->config;
  const std::int64_t width = config.hidden, heads = config.value_heads, rank = config.value_dim;
  const bool scalar = plan_->gate == Gate::scalar;
  if (scalar) {
    add_projection(mixer, init, "a_proj", heads, width);
  } else {
    add_projection(mixer, init, "f_proj.0", rank, width);
    f_out_ = add_projection(mixer, init, "f_proj.1", plan_->decays(), rank);
  }
  a_log_ = mixer.register_parameter("A_log", plan_->gate == Gate::safe_channel
                                                 ? torch::zeros({heads})
                                                 : initial_a_log(init, heads, scalar ? 0.0 : 1.0));
  dt_bias_ = mixer.register_parameter("dt_bias", initial_dt_bias(init, plan_->decays()));
}

Tensor MixerGates::beta(const SmallOutputs& small, const Tensor& qkv) const {
  Tensor activated;
  const bool gated = plan_->preset.erase_key == EraseKey::gated;  // b is of the key then
  if (plan_->b && !gated) {
    const bool sigmoid = plan_->preset.beta == BetaActivation::sigmoid;
    activated = sigmoid ? torch::sigmoid(small.b) : torch::softplus(small.b);
  } else {
    activated = torch::ones({qkv.size(0), qkv.size(1), plan_->betas()}, qkv.options());
  }
  if (plan_->steps() > 1) activated = activated.reshape({qkv.size(0), -1, plan_->config.value_heads});
  if (alpha_.defined()) activated = activated * torch::softplus(alpha_);
  if (plan_->config.beta_scale != 1.0 && !gated) activated = activated * plan_->config.beta_scale;
  return activated.to(qkv.scalar_type());  // because softplus widens under autocast
}

Tensor MixerGates::decay(const SmallOutputs& small) const {
  const auto& config = plan_->config;
  if (plan_->gate == Gate::none) return {};
  if (plan_->gate == Gate::scalar) {
    const auto g = autograd::decay_gate(small.a, dt_bias_, a_log_, DecayActivation::softplus);
    return plan_->preset.erase_key == EraseKey::closed_loop ? g.clamp_min(kClosedLoopLeastDecay) : g;
  }
  const auto f = autograd::linear(small.f, f_out_->value);
  const double bound = config.lower_bound.value_or(kGateLowerBound);
  return autograd::decay_gate(f, dt_bias_, a_log_, decay_activation_of(plan_->gate), bound)
      .unflatten(-1, {config.value_heads, config.key_dim});
}

}  // namespace efla::nn
