// The short convolution on tensors, differentiable (docs/ops/short_conv.md). short_conv.cc registers short_conv as the
// op efla::short_conv.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>

namespace efla::autograd {

// Returns silu(Σ_j weight[d, j] · x[b, t − (W−1) + j, d]): depthwise, causal, zeros before the first token. x [B, T, D]
// float32 or bfloat16, weight [D, W] or [D, 1, W] with W ≤ 8. Returns [B, T, D]. Throws Error that names the tensor.
at::Tensor short_conv(const at::Tensor& x, const at::Tensor& weight);

// Convolves the first D columns of x [B, T, P], with weight [D, W]. Returns the result [B, T, D] and a copy of the
// other columns [B, T, P − D]. The gradient of x is one tensor, so that the gradients of a mixer's fused projection are
// not copied together. cu_seqlens [N + 1] int64 with B = 1: 0, the ends of packed sequences; tokens before the first
// token of a sequence count as zero.
std::pair<at::Tensor, at::Tensor> short_conv_split(const at::Tensor& x, const at::Tensor& weight,
                                                   const at::Tensor& cu_seqlens = {});

}  // namespace efla::autograd
