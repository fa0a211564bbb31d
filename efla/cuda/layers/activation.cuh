// The activations of gates in float32 (rule/gate_activation.h).
#pragma once

#include "efla/cuda/common/ptx.cuh"
#include "efla/rule/gate_activation.h"

namespace efla::gpu {

// Returns σ(z), as exactly as results of type T need it. If e^(−z) overflows, the quotient is 0, which is correct.
template <class T>
__device__ __forceinline__ float sigmoid(float z) {
  if constexpr (sizeof(T) == sizeof(float)) return 1 / (1 + expf(-z));
  constexpr float kLog2E = 1.44269504F;
  return reciprocal_fast(1 + exp2_fast(-kLog2E * z));
}

// Computes act(z) and act′(z), as exactly as results of type T need them.
template <class T>
__device__ __forceinline__ void activate(GateActivation activation, float z, float& value, float& slope) {
  const float sigma = sigmoid<T>(z);
  const bool silu = activation == GateActivation::silu;
  value = silu ? z * sigma : sigma;
  slope = silu ? sigma * (1 + z * (1 - sigma)) : sigma * (1 - sigma);
}

}  // namespace efla::gpu
