#include "efla/nn/layers/rwkv7_mixer.h"

#include <torch/types.h>

#include <cmath>
#include <utility>

#include "efla/autograd/delta_rule.h"
#include "efla/autograd/layers/linear.h"
#include "efla/base/check.h"

namespace efla::nn {
namespace {

using torch::Tensor;

constexpr double kSlowestDecay = -0.6065306597126334;  // −e^(−1/2): the decay is e^(this · σ(…)) ≥ 0.545

Tensor same(const Tensor& x) { return x; }

// Returns x with the row before each token, zeros before the first token of a sequence. x [B, T, D].
Tensor shifted(const Tensor& x, const Tensor& cu_seqlens) {
  const Tensor before = torch::constant_pad_nd(x, {0, 0, 1, -1});
  if (!cu_seqlens.defined()) return before;
  const auto starts = torch::zeros({x.size(1) + 1}, cu_seqlens.options()).index_fill(0, cu_seqlens, 1);
  return before.masked_fill(starts.narrow(0, 0, x.size(1)).to(torch::kBool).view({1, -1, 1}), 0.0);
}

// Returns 0, 1 … count − 1.
Tensor numbers(std::int64_t count) { return torch::arange(count, torch::kFloat); }

// Returns i/(count − 1) − 1/2.
Tensor ramp(std::int64_t count) { return numbers(count) / std::max<double>(static_cast<double>(count - 1), 1.0) - 0.5; }

// Returns z|z| with z from −1 to 1 over each head.
Tensor zigzag(std::int64_t count, std::int64_t head_dim) {
  const double half = std::max(static_cast<double>(head_dim - 1) / 2.0, 0.5);
  const Tensor z = (numbers(count).remainder(head_dim) - static_cast<double>(head_dim - 1) / 2.0) / half;
  return z * z.abs();
}

// Returns the rows [B, 2T, …] of two steps per token from the rows [B, T, …] of each.
Tensor steps_of(const Tensor& first, const Tensor& second) { return torch::stack({first, second}, 2).flatten(1, 2); }

}  // namespace

Tensor LowRank::operator()(const Tensor& x, Tensor (*activation)(const Tensor&)) const {
  return autograd::linear(activation(autograd::linear(x, in->value)), out->value, bias);
}

Rwkv7Mixer::Rwkv7Mixer(const MixerConfig& config, const Initialiser& init) {
  validate(config);
  plan_ = std::make_shared<const MixerPlan>(config);
  Require("mixer")(plan_->preset.rwkv7, "mixer", "'" + config.mixer + "'", "rwkv7");
  register_shift();
  register_projections(init);
}

// Registers the vectors with the initial values of RWKV-7.
void Rwkv7Mixer::register_shift() {
  const auto& config = plan_->config;
  const std::int64_t width = config.hidden;
  const double later = 1.0 - static_cast<double>(config.layer) / static_cast<double>(config.layers);  // 1 to almost 0
  constexpr std::array<double, kShifted.size()> kPowers{0.2, 0.9, 0.7, 0.7, 0.9, 0.2};
  for (std::size_t i = 0; i < kShifted.size(); ++i) {
    const Tensor mix = 1.0 - torch::pow(numbers(width) / static_cast<double>(width), kPowers[i] * later);
    shift_[i] = register_parameter(std::string("x_") + kShifted[i], mix.view({1, 1, -1}));
  }
  k_k_ = register_parameter("k_k", 0.71 - 0.1 * ramp(width));
  k_a_ = register_parameter("k_a", torch::full({width}, 1.02));
  r_k_ = register_parameter("r_k", torch::full({config.heads, config.key_dim}, -0.04));
}

void Rwkv7Mixer::register_projections(const Initialiser& init) {
  const auto& config = plan_->config;
  const std::int64_t width = config.hidden, values = plan_->values();
  const auto low_rank = [&](const std::string& name, std::int64_t rank, std::int64_t out, const Tensor& bias) {
    const auto module = register_module(name, std::make_shared<torch::nn::Module>());
    const Initialiser part = init.within(name);
    LowRank both{
        add_projection(*module, part, "lora.0", rank, width), add_projection(*module, part, "lora.2", out, rank), {}};
    if (bias.defined()) both.bias = both.out->register_parameter("bias", bias);
    return both;
  };
  r_ = add_projection(*this, init, "r_proj", width, width);
  k_ = add_projection(*this, init, "k_proj", width, width);
  v_ = add_projection(*this, init, "v_proj", values, width);
  o_ = add_projection(*this, init, "o_proj", width, values);
  const double depth =
      config.layers > 1 ? static_cast<double>(config.layer) / static_cast<double>(config.layers - 1) : 0;
  const Tensor rise = torch::pow(ramp(width) + 0.5, 1.0 + std::pow(depth, 0.3)), wave = zigzag(width, config.key_dim);
  w_lora_ = low_rank("w_lora", config.low_ranks.decay, width, -6.0 + 6.0 * rise + 0.5 + 2.5 * wave);
  if (config.layer > 0) v_lora_ = low_rank("v_lora", config.low_ranks.value, values, 0.73 - 0.4 * ramp(values));
  a_lora_ = low_rank("a_lora", config.low_ranks.a, width, -0.19 + 0.3 * wave + 0.4 * ramp(width));
  g_lora_ = low_rank("g_lora", config.low_ranks.gate, values, {});
  norm_ = add_norm(*this, "g_norm", values);
  const double gain = std::pow(static_cast<double>(config.layer + 1) / static_cast<double>(config.layers), 0.7);
  norm_->value.data().fill_(gain);
  norm_bias_ = norm_->register_parameter("bias", torch::zeros({values}));
}

Tensor Rwkv7Mixer::by_heads(const Tensor& x) const { return x.unflatten(2, {plan_->config.heads, -1}); }

Tensor Rwkv7Mixer::values_of(const Tensor& x, Tensor& first_values) const {
  const Tensor v = autograd::linear(x, v_->value);
  if (plan_->config.layer == 0) {
    first_values = v;
    return v;
  }
  Require("mixer")(first_values.defined(), "first_values", "none", "the values of the model's first layer");
  return torch::lerp(v, first_values.to(v.scalar_type()), torch::sigmoid(v_lora_(x, same)).to(v.scalar_type()));
}

Tensor Rwkv7Mixer::output(const Tensor& o, const Tensor& r, const Tensor& k, const Tensor& v,
                          const Tensor& gate) const {
  const auto& config = plan_->config;
  const double eps = static_cast<double>(config.key_dim) * config.norm_eps;
  const Tensor normed = torch::layer_norm(o, {config.value_dim}, {}, {}, eps).flatten(2) * norm_->value +
                        norm_bias_;  // one group per head
  const Tensor bonus = ((r * k * r_k_.to(r.scalar_type())).sum(-1, true) * v).flatten(2);
  return autograd::linear(((normed + bonus) * gate).to(o.scalar_type()), o_->value);
}

Tensor Rwkv7Mixer::mix(const Tensor& x, const Tensor& before, const Tensor& cu_seqlens, Tensor* states,
                       Tensor& first_values) const {
  const Tensor delta = before - x;
  const auto at = [&](std::size_t i) { return x + delta * shift_[i].to(x.scalar_type()); };
  const Tensor r = by_heads(autograd::linear(at(0), r_->value));
  const Tensor g = by_heads(kSlowestDecay * torch::sigmoid(w_lora_(at(1), torch::tanh).to(torch::kFloat)));
  Tensor k = autograd::linear(at(2), k_->value);
  const auto type = k.scalar_type();  // under autocast that of the projections
  const Tensor v = by_heads(values_of(at(3), first_values));
  const Tensor a = torch::sigmoid(a_lora_(at(4), same)).to(type);
  const Tensor gate = g_lora_(at(5), torch::sigmoid);
  const Tensor raw = by_heads(k.to(torch::kFloat) * k_k_);
  const Tensor removal = raw / raw.norm(2, -1, true).clamp_min(1e-12);
  k = by_heads(k + k * (a - 1.0) * k_a_.to(type));
  // The first step erases with κ, which reads the state before its decay; the second one writes.
  const Tensor erase_key = (removal * torch::exp(-g)).to(type);
  autograd::DeltaRuleInput in{r, steps_of((removal * by_heads(a)).to(type), k), steps_of(torch::zeros_like(v), v),
                              torch::ones({x.size(0), 2 * x.size(1), plan_->config.heads}, k.options())};
  in.g = g;
  in.erase_key = steps_of(erase_key, torch::zeros_like(erase_key));
  if (cu_seqlens.defined()) in.cu_seqlens = 2 * cu_seqlens;
  if (states != nullptr) in.initial_state = *states;
  const auto out = autograd::delta_rule(in, plan_->rule, "auto", /*output_final_state=*/states != nullptr);
  if (states != nullptr) *states = out.final_state;
  return output(out.o, r, k, v, gate);
}

Tensor Rwkv7Mixer::forward(const Tensor& x, const Tensor& cu_seqlens, Tensor& first_values) const {
  return mix(x, shifted(x, cu_seqlens), cu_seqlens, nullptr, first_values);
}

MixerState Rwkv7Mixer::initial_state(std::int64_t batch) const {
  const auto& config = plan_->config;
  const auto options = r_->value.options();
  return {torch::zeros({batch, config.heads, config.key_dim, config.value_dim}, options),
          torch::zeros({batch, 1, config.hidden}, options)};
}

Tensor Rwkv7Mixer::forward(const Tensor& x, MixerState& state, Tensor& first_values) const {
  const torch::NoGradGuard no_grad;
  const Tensor window = torch::cat({state.conv.to(x.scalar_type()), x}, 1);
  Tensor memory = state.memory;
  const Tensor y = mix(x, window.narrow(1, 0, x.size(1)), {}, &memory, first_values);
  if (x.size(1) == 1) {  // in place, as a CUDA graph asks
    state.memory.copy_(memory);
    state.conv.copy_(x);
  } else {
    state.memory = memory;
    state.conv = x.narrow(1, x.size(1) - 1, 1).to(state.conv.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
  return y;
}

Tensor Rwkv7Mixer::forward(const Tensor& x, const PackedWindows& windows, MixerState& states,
                           Tensor& first_values) const {
  const torch::NoGradGuard no_grad;
  const Tensor window =
      torch::cat({states.conv.flatten(0, 1).to(x.scalar_type()), x[0]}).index_select(0, windows.sources);
  const Tensor before = window.index_select(0, windows.outputs - 1).unsqueeze(0);
  states.conv = window.index_select(0, windows.last).view(states.conv.sizes()).to(torch::kFloat);
  return mix(x, before, windows.cu_seqlens, &states.memory, first_values);
}

}  // namespace efla::nn
