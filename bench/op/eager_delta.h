// The operator as a user of LibTorch would write it: batched tensor operations, gradients by autograd. As a peer of the
// kernels it is meant to be fast for its kind.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <tuple>

namespace efla::bench {

// How T of EFLA's equation 31 is computed: by one triangular solve for W and U together, or row by row.
enum class UtTransform { triangular_solve, row_loop };

struct EagerForm {
  std::int64_t chunk = 64;
  UtTransform transform = UtTransform::triangular_solve;
};

// Returns, for example, "chunk 32, triangular solve".
std::string name_of(const EagerForm& form);

// Returns α of EFLA's equation 20 in the dtype of k [..., K] and beta [...].
at::Tensor exact_alpha(const at::Tensor& k, const at::Tensor& beta);

// Computes the chunk algorithm with the exact step: equations 20 and 29 to 32 of EFLA (arXiv 2512.12602), scale
// K^(−1/2), no initial state. q, k [B, T, H, K], v [B, T, H, V], beta [B, T, H]. Returns o [B, T, H, V] in v's dtype
// and the final state [B, H, K, V] in float32. Computes in float32.
std::tuple<at::Tensor, at::Tensor> eager_chunk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                               const at::Tensor& beta, const EagerForm& form);

// Computes one token: q, k [B, H, K], v [B, H, V], beta [B, H], state [B, H, K, V] float32. Returns o [B, H, V] and the
// new state.
std::tuple<at::Tensor, at::Tensor> eager_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                              const at::Tensor& beta, const at::Tensor& state);

}  // namespace efla::bench
