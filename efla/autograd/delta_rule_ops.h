// The dispatcher's ops under the differentiable functions: one call of the operator each, with kernels for tensors with
// data and for meta tensors, which have shapes alone. Compilers trace a forward or a backward as one of these.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>

#include "efla/autograd/delta_rule.h"

namespace efla::autograd {

// What a call knows besides its tensors. The rule's decay follows from g.
struct DeltaRuleSettings {
  DeltaRule rule;
  std::string implementation;
  bool save_states = false;  // for a backward
  SavedStates saved = {};    // how, if so
};

struct DeltaRuleGradients {
  at::Tensor q, k, v, beta, g, initial_state;  // the last two undefined where the input is
};

struct ForwardTensors {
  at::Tensor o, final_state, chunk_states;  // the last without elements unless states are saved
};

// efla::delta_rule_fwd and efla::delta_rule_bwd, through the dispatcher.
ForwardTensors call_delta_rule_fwd(const DeltaRuleInput& input, const DeltaRuleSettings& settings);
DeltaRuleGradients call_delta_rule_bwd(const DeltaRuleInput& input, const at::Tensor& chunk_states,
                                       const at::Tensor& dout, const at::Tensor& dfinal_state,
                                       const DeltaRuleSettings& settings);

// The operator without the dispatcher; outputs are allocated by the caller, undefined ones left out.
void run_forward(const DeltaRuleInput& input, const DeltaRuleSettings& settings, const ForwardTensors& out);
void run_backward(const DeltaRuleInput& input, const DeltaRuleSettings& settings, const at::Tensor& chunk_states,
                  const at::Tensor& dout, const at::Tensor& dfinal_state, const DeltaRuleGradients& gradients);

// Throws Error unless every tensor has the rank, the dtype and the device that a view of it takes for granted. The
// operator checks everything else.
void check(const DeltaRuleInput& input);

// Returns how the implementation that will run saves states. Throws Error where none computes the forward or the
// backward. Tensors without memory, which a compiler traces with, count as tensors on the CPU.
SavedStates saved_states(const DeltaRuleInput& input, const DeltaRule& rule, const std::string& implementation);

// Returns room for the saved states [B, NC, HV, K, V].
at::Tensor empty_chunk_states(const DeltaRuleInput& input, const SavedStates& saved);

}  // namespace efla::autograd
