// The decay of a mixer, computed from its projection, as a LibTorch function with gradients (docs/ops/decay_gate.md).
#pragma once

#include <ATen/ATen.h>

#include "efla/rule/decay_activation.h"

namespace efla::autograd {

// Returns the decay g of z [..., HV·C] by rule/decay_gate.h, in the shape of z. bias is [HV·C], a_log [HV]; C is 1 with
// one decay per head. On a GPU one kernel computes g in float32 from z in float32 or bfloat16, and the backward
// computes g again, so that only z and the parameters are kept. Elsewhere LibTorch's operators compute g. Throws Error
// for a bad argument.
at::Tensor decay_gate(const at::Tensor& z, const at::Tensor& bias, const at::Tensor& a_log, DecayActivation activation,
                      double bound = 0.0);

// The rate and the bias [HV·C] of a decay as decay_activation.h divides a_log [HV] between them. rate is finite.
struct DecayRate {
  at::Tensor rate;  // [HV]
  at::Tensor bias;  // [HV·C]
};
DecayRate decay_rate(const at::Tensor& bias, const at::Tensor& a_log, DecayActivation activation);

}  // namespace efla::autograd
