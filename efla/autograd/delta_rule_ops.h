// The dispatcher's ops below the differentiable functions. Each is one call of the operator, with kernels for tensors
// with data and for meta tensors, which have only shapes. Compilers trace a forward or a backward as one such op.
#pragma once

#include <ATen/ATen.h>

#include "efla/autograd/delta_rule_call.h"

namespace efla::autograd {

// Call efla::delta_rule_fwd and efla::delta_rule_bwd through the dispatcher.
ForwardTensors call_delta_rule_fwd(const DeltaRuleInput& input, const DeltaRuleSettings& settings);
DeltaRuleGradients call_delta_rule_bwd(const DeltaRuleInput& input, const at::Tensor& chunk_states,
                                       const at::Tensor& dout, const at::Tensor& dfinal_state,
                                       const DeltaRuleSettings& settings);

}  // namespace efla::autograd
