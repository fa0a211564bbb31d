// The short convolution on tensors, differentiable. Registered as the op efla::short_conv too.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>

namespace efla::autograd {

// Returns silu(Σ_j weight[d, j] · x[b, t − (W−1) + j, d]): depthwise, causal, zeros before the first token. x [B, T, D]
// float32 or bfloat16, weight [D, W] or [D, 1, W] with W ≤ 8. Returns [B, T, D]. Throws Error naming the tensor.
at::Tensor short_conv(const at::Tensor& x, const at::Tensor& weight);

// Convolves the first D columns of x [B, T, P] and returns them, [B, T, D], and the other columns unchanged,
// [B, T, P − D]. The gradient of x is one tensor: a mixer's fused projection is split without copies. cu_seqlens [N +
// 1] int64 with B = 1: 0, the ends of packed sequences; each begins with zeros before it.
std::pair<at::Tensor, at::Tensor> short_conv_split(const at::Tensor& x, const at::Tensor& weight,
                                                   const at::Tensor& cu_seqlens = {});

}  // namespace efla::autograd
