// What the decode steps of all models on a GPU have in common: the mixer of a layer, and the likeliest tokens.
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "efla/nn/layers/mixer_plan.h"

namespace efla::nn {

// The output of a step. The next step may overwrite the tensors.
struct StepOutput {
  torch::Tensor logits;  // [B, vocab_size] float32
  torch::Tensor
      likeliest;  // [B, 2] float64: the drawable id with the largest logit (the lowest of equal ones), and the logit
};

// Returns the output of a step with these logits. Only ids in [0, drawable) may be drawn.
StepOutput step_output(const torch::Tensor& logits, std::int64_t drawable);

// The parameters of a mixer. A tensor is undefined if the mixer does not have it.
struct StepMixer {
  torch::Tensor in = {}, f_out = {}, g_out = {};  // weights, in float32 or bfloat16; in: of MixerPlan::projections
  torch::Tensor o_norm = {}, taps = {}, beta_factor = {}, rate = {}, dt_bias = {},
                gate_bias = {};  // as in LayerParameters
};

// The norm of a layer's input; the weight is undefined without one.
struct InputNorm {
  torch::Tensor weight;
  double eps;
};

// The states of texts, which a step updates. slots [B] as in MixerStep; undefined: entry b has state b.
struct StepStates {
  torch::Tensor memory, conv;  // as in MixerState, of P states
  torch::Tensor slots = {};
};

// The outputs of a mixer's projections of the input, [B, ·]: `all` of MixerPlan::projections; decay and gate of the
// second weights, undefined if the mixer has only one.
struct Projected {
  torch::Tensor all = {}, decay = {}, gate = {};
};

// Returns whether the kernel mixer_step takes a mixer: none with two keys. Its weights lie on the device.
bool takes_step(const MixerPlan& plan, const StepMixer& mixer, const StepStates& states);

// Returns the projections of x [B, D] float32.
Projected project(const MixerPlan& plan, const StepMixer& mixer, const torch::Tensor& x, const InputNorm& norm);
// Computes the mixer between the projections by the kernel mixer_step: [B, HV·V].
torch::Tensor step_mixer(const MixerPlan& plan, const StepMixer& mixer, const Projected& projected,
                         const StepStates& states);

}  // namespace efla::nn
