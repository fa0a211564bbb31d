// What a gate goes through (rule/gate_activation.h).
#pragma once

#include "efla/rule/gate_activation.h"

namespace efla::gpu {

// act(z) and its derivative.
__device__ __forceinline__ void activate(GateActivation activation, float z, float& value, float& slope) {
  const float sigma = 1 / (1 + expf(-z));
  const bool silu = activation == GateActivation::silu;
  value = silu ? z * sigma : sigma;
  slope = silu ? sigma * (1 + z * (1 - sigma)) : sigma * (1 - sigma);
}

}  // namespace efla::gpu
