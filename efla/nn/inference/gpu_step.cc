#include "efla/nn/inference/gpu_step.h"

#include <tuple>

#include "efla/autograd/layers/linear.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/mixer_step.h"
#include "efla/torch/context.h"

namespace efla::nn {

using autograd::view_of;
using torch::Tensor;

namespace {

// A problem and the tensor of its output.
struct Step {
  MixerStep problem = {};
  Tensor o = {};
};

Step step_of(const MixerPlan& plan, const StepMixer& mixer, const Projected& projected, const StepStates& states) {
  const auto& config = plan.config;
  const std::int64_t batch = projected.all.size(0);
  const auto columns = [&](const Columns& own) {
    return view_of<const float, 2>(projected.all.narrow(1, own.first, own.count));
  };
  Step step;
  MixerStep& p = step.problem;
  p.shape = {batch, 1, config.heads, config.value_heads, config.key_dim, config.value_dim};
  p.rule = plan.rule;
  p.qkv = columns({0, plan.channels()});
  p.taps = view_of<const float, 2>(mixer.taps);
  p.beta_activation = plan.b ? plan.preset.beta : BetaActivation::one;
  if (plan.b) p.beta = columns(plan.b);
  p.beta_factor = view_of<const float, 1>(mixer.beta_factor);
  if (plan.gate != Gate::none) {
    p.decay = plan.a ? columns(plan.a) : view_of<const float, 2>(projected.decay);
    p.decay_activation = decay_activation_of(plan.gate);
    p.rate = view_of<const float, 1>(mixer.rate);
    p.decay_bias = view_of<const float, 1>(mixer.dt_bias);
    p.bound = static_cast<float>(config.lower_bound.value_or(kGateLowerBound));
  }
  p.norm_weight = view_of<const float, 1>(mixer.o_norm);
  p.norm_eps = static_cast<float>(config.norm_eps);
  if (config.output_gate != OutputGate::none) {
    const bool low_rank = config.output_gate == OutputGate::sigmoid;
    p.gate = low_rank ? view_of<const float, 2>(projected.gate) : columns(plan.g);
    p.gate_bias = view_of<const float, 1>(mixer.gate_bias);
    p.gate_activation = low_rank ? GateActivation::sigmoid : GateActivation::silu;
  }
  p.slots = view_of<const std::int64_t, 1>(states.slots);
  p.history = view_of<float, 3>(states.conv);
  p.states = view_of<float, 4>(states.memory);
  step.o = torch::empty({batch, plan.values()}, projected.all.options());
  p.o = view_of<float, 2>(step.o);
  return step;
}

}  // namespace

StepOutput step_output(const Tensor& logits, std::int64_t drawable) {
  const auto [largest, id] = torch::max(logits.narrow(1, 0, drawable), 1);
  return {logits, torch::stack({id.to(torch::kDouble), largest.to(torch::kDouble)}, 1)};
}

bool takes_step(const MixerPlan& plan, const StepMixer& mixer, const StepStates& states) {
  if (plan.rule.two_keys || plan.steps() > 1) return false;
  const auto outputs_of = [&](const Tensor& weight) {
    return weight.defined() ? torch::zeros({1, weight.size(0)}, mixer.taps.options()) : Tensor();
  };
  const Projected projected{outputs_of(mixer.in), outputs_of(mixer.f_out), outputs_of(mixer.g_out)};
  const Step step = step_of(plan, mixer, projected, {states.memory, states.conv});
  return takes_mixer_step(step.problem, {.context = libtorch::context_of(projected.all)});
}

Projected project(const MixerPlan& plan, const StepMixer& mixer, const Tensor& x, const InputNorm& norm) {
  Projected projected{autograd::fused_linear(x, mixer.in, {.norm_weight = norm.weight, .norm_eps = norm.eps})};
  const auto second = [&](const Columns& columns, const Tensor& weight) {
    return weight.defined() ? autograd::fused_linear(projected.all.narrow(1, columns.first, columns.count), weight)
                            : Tensor();
  };
  projected.decay = second(plan.f, mixer.f_out);
  projected.gate = second(plan.g, mixer.g_out);
  return projected;
}

Tensor step_mixer(const MixerPlan& plan, const StepMixer& mixer, const Projected& projected, const StepStates& states) {
  const Step step = step_of(plan, mixer, projected, states);
  mixer_step(step.problem, {.context = libtorch::context_of(step.o)});
  return step.o;
}

}  // namespace efla::nn
