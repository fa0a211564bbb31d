// The dispatcher's ops below the differentiable functions. Each is one call of the operator, with kernels for tensors
// with data and for meta tensors, which have only shapes. Compilers trace a forward or a backward as one such op.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>

#include "efla/autograd/delta_rule.h"

namespace efla::autograd {

// The arguments of a call besides its tensors. The rule's decay follows from g.
struct DeltaRuleSettings {
  DeltaRule rule;
  std::string implementation;
  bool save_states = false;  // for a backward
  SavedStates saved = {};    // how states are saved, if save_states is true
};

struct DeltaRuleGradients {
  at::Tensor q, k, v, beta, g, initial_state;  // the last two are undefined if the input is
};

struct ForwardTensors {
  at::Tensor o, final_state, chunk_states;  // without saved states chunk_states is undefined or has no elements
};

// Call efla::delta_rule_fwd and efla::delta_rule_bwd through the dispatcher.
ForwardTensors call_delta_rule_fwd(const DeltaRuleInput& input, const DeltaRuleSettings& settings);
DeltaRuleGradients call_delta_rule_bwd(const DeltaRuleInput& input, const at::Tensor& chunk_states,
                                       const at::Tensor& dout, const at::Tensor& dfinal_state,
                                       const DeltaRuleSettings& settings);

// Run the operator without the dispatcher. The caller allocates the outputs; optional outputs may be undefined.
void run_forward(const DeltaRuleInput& input, const DeltaRuleSettings& settings, const ForwardTensors& out);
void run_backward(const DeltaRuleInput& input, const DeltaRuleSettings& settings, const at::Tensor& chunk_states,
                  const at::Tensor& dout, const at::Tensor& dfinal_state, const DeltaRuleGradients& gradients);

// Throws Error unless every tensor has the rank, the dtype and the device that view_of requires. The operator checks
// everything else.
void check(const DeltaRuleInput& input);

// Returns how the implementation that will run saves states. Throws Error if no implementation computes the forward or
// the backward. For meta tensors and for symbolic sizes, with which a compiler traces, returns the interval of the CPU.
SavedStates saved_states(const DeltaRuleInput& input, const DeltaRule& rule, const std::string& implementation);

// Returns an uninitialised tensor for the saved states [B, NC, HV, K, V].
at::Tensor empty_chunk_states(const DeltaRuleInput& input, const SavedStates& saved);

}  // namespace efla::autograd
