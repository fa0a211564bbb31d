#include "efla/nn/layers/mixer.h"

#include <torch/types.h>

#include "efla/autograd/delta_rule.h"

namespace efla::nn {

using torch::Tensor;

// The parts register their parameters in the order in which checkpoints and optimisers have them.
Mixer::Mixer(const MixerConfig& config, const Initialiser& init)
    : plan_(begin_mixer(config, /*softmax=*/false, *this, init)),
      gates_(plan_, *this, init),
      keys_(plan_, *this),
      convolution_(plan_, *this, init),
      output_(plan_, *this, init),
      projection_(*plan_, *this) {}

Mixer::Inputs Mixer::inputs_of(const Tensor& qkv, const SmallOutputs& small) const {
  Inputs inputs{qkv, gates_.beta(small, qkv), gates_.decay(small)};
  if (plan_->rule.two_keys) {
    auto heads = heads_of(qkv);
    inputs.erase_key = keys_(heads, small, inputs.g);
    inputs.qkv = torch::cat({heads[0].flatten(2), heads[1].flatten(2), heads[2].flatten(2)}, 2);
  }
  return inputs;
}

Tensor Mixer::recur(const Inputs& inputs, const Tensor& cu_seqlens) const {
  const auto& config = plan_->config;
  if (inputs.erase_key.defined() || plan_->steps() > 1) {
    const auto [q, k, v] = heads_of(inputs.qkv);
    return autograd::delta_rule({q, k, v, inputs.beta, {}, inputs.g, step_ends(cu_seqlens), inputs.erase_key},
                                plan_->rule, "auto", /*output_final_state=*/false)
        .o;
  }
  return autograd::delta_rule_packed(inputs.qkv, inputs.beta, inputs.g, config.heads, config.key_dim, plan_->rule,
                                     cu_seqlens);
}

Tensor Mixer::step_ends(const Tensor& cu_seqlens) const {
  return cu_seqlens.defined() && plan_->steps() > 1 ? cu_seqlens * plan_->steps() : cu_seqlens;
}

Tensor Mixer::recur_step(const Inputs& inputs, Tensor& memory) const {
  const auto only = [](const Tensor& t) { return t.defined() ? t.select(1, 0) : t; };
  const auto [q, k, v] = heads_of(inputs.qkv);
  if (plan_->steps() > 1) {
    const auto out = autograd::delta_rule({q, k, v, inputs.beta, memory, inputs.g}, plan_->rule);
    memory.copy_(out.final_state);  // in place, as a CUDA graph asks
    return out.o.select(1, 0);
  }
  return autograd::delta_rule_step(only(q), only(k), only(v), only(inputs.beta), only(inputs.g), memory, plan_->rule,
                                   "auto", only(inputs.erase_key));
}

Tensor Mixer::forward(const Tensor& x, const Tensor& cu_seqlens) const {
  const auto [qkv, columns] = convolution_(projection_(x), cu_seqlens);
  const SmallOutputs small = split_small_outputs(*plan_, columns);
  return output_(x, small.g, recur(inputs_of(qkv, small), cu_seqlens));
}

MixerState Mixer::initial_state(std::int64_t batch) const {
  const auto& config = plan_->config;
  const auto options = projection_.options();
  MixerState state;
  state.memory = torch::zeros({batch, config.value_heads, config.key_dim, config.value_dim}, options);
  if (config.conv > 0) state.conv = torch::zeros({batch, config.conv - 1, plan_->channels()}, options);
  return state;
}

Tensor Mixer::forward(const Tensor& x, MixerState& state) const {
  const torch::NoGradGuard no_grad;
  const std::int64_t tokens = x.size(1), kept = plan_->config.conv - 1;
  const Tensor columns = x.is_cuda() && tokens > 1 ? projection_(x) : projection_.one_by_one(x);
  const auto inputs = columns.narrow(2, 0, plan_->channels());
  const SmallOutputs small = split_small_outputs(*plan_, columns.slice(2, plan_->channels()));
  Tensor qkv;
  if (plan_->config.conv > 0) {
    // [B, W − 1 + T, 2·H·K + HV·V]
    const auto window = torch::cat({state.conv.to(inputs.scalar_type()), inputs}, 1);
    qkv = convolution_(window, {}).first.narrow(1, kept, tokens);
    const auto last = window.narrow(1, tokens, kept);
    if (tokens == 1) {
      state.conv.copy_(last);
    } else {
      state.conv = last.to(state.conv.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  } else {
    qkv = convolution_(inputs, {}).first;
  }
  const Inputs in = inputs_of(qkv, small);
  if (tokens == 1) return output_(x, small.g, recur_step(in, state.memory));
  const auto [q, k, v] = heads_of(in.qkv);
  auto out = autograd::delta_rule({q, k, v, in.beta, state.memory, in.g, {}, in.erase_key}, plan_->rule);
  state.memory = out.final_state;
  return output_(x, small.g, out.o);
}

Tensor Mixer::forward(const Tensor& x, const PackedWindows& windows, MixerState& states) const {
  const torch::NoGradGuard no_grad;
  const auto columns = projection_(x);
  const auto inputs = columns.narrow(2, 0, plan_->channels());
  const SmallOutputs small = split_small_outputs(*plan_, columns.slice(2, plan_->channels()));
  Tensor qkv;
  if (plan_->config.conv > 0) {
    const auto history = states.conv.flatten(0, 1).to(inputs.scalar_type());
    const auto window = torch::cat({history, inputs[0]}).index_select(0, windows.sources);
    qkv = convolution_(window.unsqueeze(0), windows.ends).first.index_select(1, windows.outputs);
    states.conv = window.index_select(0, windows.last).view(states.conv.sizes()).to(torch::kFloat);
  } else {
    qkv = convolution_(inputs, {}).first;
  }
  const Inputs in = inputs_of(qkv, small);
  const auto [q, k, v] = heads_of(in.qkv);
  auto out = autograd::delta_rule({q, k, v, in.beta, states.memory, in.g, step_ends(windows.cu_seqlens), in.erase_key},
                                  plan_->rule);
  states.memory = out.final_state;
  return output_(x, small.g, out.o);
}

}  // namespace efla::nn
