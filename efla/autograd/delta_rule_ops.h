// The dispatcher's ops under the differentiable functions: one call of the operator each, with kernels for the CPU and
// for meta tensors, which have shapes alone. Compilers trace a forward or a backward as one of these.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>

#include "efla/autograd/delta_rule.h"

namespace efla::autograd {

// A rule and an implementation as an op's arguments.
struct RuleArguments {
  c10::optional<double> scale;
  std::string step;
  double erase_scale = 1, write_scale = 1;
  bool qk_l2norm = false;
  std::string implementation;

  RuleArguments(const DeltaRule& rule, const std::string& implementation);
  DeltaRule rule(const at::Tensor& g) const;
};

struct DeltaRuleGradients {
  at::Tensor q, k, v, beta, g, initial_state;  // the last two undefined where the input is
};

struct ForwardTensors {
  at::Tensor o, final_state, chunk_states;  // the last without elements unless asked for
};

// efla::delta_rule_fwd and efla::delta_rule_bwd, through the dispatcher.
ForwardTensors call_delta_rule_fwd(const DeltaRuleInput& input, const RuleArguments& rule, bool save_states);
DeltaRuleGradients call_delta_rule_bwd(const DeltaRuleInput& input, const at::Tensor& chunk_states,
                                       const at::Tensor& dout, const at::Tensor& dfinal_state,
                                       const RuleArguments& rule);

// The operator on CPU tensors, without the dispatcher; outputs are allocated by the caller, undefined ones left out.
void run_forward(const DeltaRuleInput& input, const DeltaRule& rule, const std::string& implementation,
                 const ForwardTensors& out);
void run_backward(const DeltaRuleInput& input, const DeltaRule& rule, const std::string& implementation,
                  const at::Tensor& chunk_states, const at::Tensor& dout, const at::Tensor& dfinal_state,
                  const DeltaRuleGradients& gradients);

// Throws Error unless every tensor has the rank and the dtype that DeltaRuleInput says.
void check(const DeltaRuleInput& input);

DeltaShape shape_of(const DeltaRuleInput& input);
// [B, NC, HV, K, V] in the options of states.
at::Tensor empty_chunk_states(const DeltaRuleInput& input);

}  // namespace efla::autograd
