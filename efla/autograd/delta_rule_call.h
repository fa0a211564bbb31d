// Calls of the operator with tensors, without the dispatcher.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "efla/autograd/delta_rule.h"
#include "efla/rule/problem.h"

namespace efla::autograd {

// The operations' names in errors.
inline constexpr const char* kDeltaRule = "delta_rule";
inline constexpr const char* kDeltaRuleStep = "delta_rule_step";
inline constexpr const char* kDeltaRuleSteps = "delta_rule_steps";

// The arguments of a call besides its tensors. The rule's decay follows from g, and two_keys from erase_key.
struct DeltaRuleSettings {
  DeltaRule rule;
  std::string implementation;
  bool save_states = false;  // for a backward
  SavedStates saved = {};    // how states are saved, if save_states is true
  bool final_state = true;   // compute the final state
};

struct DeltaRuleGradients {
  at::Tensor q, k, v, beta, g, initial_state, erase_key;  // the last three are undefined if the input is
};

struct ForwardTensors {
  at::Tensor o, final_state, chunk_states;  // states that nobody asks for are undefined or have no elements
};

inline bool is_packed(const DeltaRuleInput& input) { return input.cu_seqlens.defined(); }

// Returns n, the steps per token: the rows of k and v per row of q. 1 if these do not fit each other, which is refused
// later.
std::int64_t steps_per_token(const DeltaRuleInput& input);

// Returns the sizes; the tokens are T·n.
DeltaShape shape_of(const DeltaRuleInput& input);

// Returns an uninitialised tensor for o. Sizes may be symbolic.
at::Tensor empty_output(const DeltaRuleInput& input);

// Returns the options of states: float64 for float64 inputs, otherwise float32.
at::TensorOptions state_options(const DeltaRuleInput& input);

// Returns an uninitialised tensor for final states [N, HV, K, V]. Sizes may be symbolic.
at::Tensor empty_state(const DeltaRuleInput& input);

// Returns an uninitialised tensor for the saved states [B, NC, HV, K, V].
at::Tensor empty_chunk_states(const DeltaRuleInput& input, const SavedStates& saved);

// Throws Error unless every tensor has the rank, the dtype and the device that view_of requires. The operator checks
// everything else.
void check(const DeltaRuleInput& input);

// Returns how the implementation that will run saves states. Throws Error if no implementation computes the forward or
// the backward. For meta tensors and for symbolic sizes, with which a compiler traces, returns the interval of the CPU.
SavedStates saved_states(const DeltaRuleInput& input, const DeltaRule& rule, const std::string& implementation);

// Run the operator. The caller allocates the outputs; optional outputs may be undefined.
void run_forward(const DeltaRuleInput& input, const DeltaRuleSettings& settings, const ForwardTensors& out);
void run_backward(const DeltaRuleInput& input, const DeltaRuleSettings& settings, const at::Tensor& chunk_states,
                  const at::Tensor& dout, const at::Tensor& dfinal_state, const DeltaRuleGradients& gradients);

}  // namespace efla::autograd
