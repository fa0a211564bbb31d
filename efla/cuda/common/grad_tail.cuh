// The end of the gradients by chunks, for elements of 16 bits and of float32: sums over keys, the gradients of a gate
// per head, and the gradients that go through the gains. grads_portable.cu has the equations.
#pragma once

#include "efla/cuda/common/lane_sums.cuh"
#include "efla/rule/step_size.h"

namespace efla::gpu {

// Sums over the keys of a chunk's tokens, of kKinds kinds, in shared memory. Each of kParts parts of the keys has its
// own sums.
template <int kKinds, int kParts, int kTokens>
struct KeySums {
  float of[kKinds][kParts][kTokens];

  // Writes the sums over a warp's keys for rows `row` and row + 8 of its accumulators, which four lanes have in parts.
  __device__ __forceinline__ void put(int kind, int part, int row, const float (&sums)[2], int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = lane_sum<4>(sums[r]);
      if (lane % 4 == 0) of[kind][part][row + 8 * r] = sum;
    }
  }

  // Returns the sum over all keys.
  __device__ __forceinline__ float total(int kind, int token) const {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) sum += of[kind][part][token];
    return sum;
  }

  // Adds to `sum` what the tokens from t on read of the state before the chunk, and what the tokens before t write of
  // the state after the chunk: the kinds `read` and `written`.
  __device__ __forceinline__ float add_gate_terms(float sum, int t, int read, int written) const {
    for (int i = kTokens - 1; i >= t; --i) sum += total(read, i);
    for (int j = 0; j < t; ++j) sum += total(written, j);
    return sum;
  }
};

// The two steps of Σ_{i≥t>j} M_ij for every token t, with the lower triangular M in shared memory, kTokens + 1 floats
// per row. sum_before replaces every element of row `i` by the sum of the elements before it. Then sum_from returns the
// sum for token t. So terms that do not span t are never added. The caller waits between the steps.
template <int kTokens>
__device__ __forceinline__ void sum_before(float* matrix, int i) {
  float before = 0;
  for (int j = 0; j <= i; ++j) {
    float& place = matrix[i * (kTokens + 1) + j];
    const float element = place;
    place = before;
    before += element;
  }
}
template <int kTokens>
__device__ __forceinline__ float sum_from(const float* matrix, int t) {
  float sum = 0;
  for (int i = kTokens - 1; i >= t; --i) sum += matrix[i * (kTokens + 1) + t];
  return sum;
}

// Return the gradient of β, and twice the gradient of λ, of a token with the gradient dalpha of its gain.
__device__ __forceinline__ float beta_gradient(const Gain<float>& gain, float dalpha) {
  return dalpha * gain.beta_unit * gain.beta_slope * gain.beta_unit;
}
__device__ __forceinline__ float twice_lambda_gradient(const Gain<float>& gain, float dalpha) {
  return 2 * dalpha * gain.lambda_slope * gain.lambda_unit;
}

}  // namespace efla::gpu
