#include "efla/autograd/layers/linear.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "efla/autograd/layers/rms_norm.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/layers/linear.h"
#include "efla/rule/linear.h"
#include "efla/torch/context.h"
#include "efla/torch/one_thread.h"

namespace efla::autograd {
namespace {

using at::Tensor;

// For more rows of x LibTorch's product is faster, although it copies the weight.
constexpr std::int64_t kFewRows = 8;

// Rows of x per task of a general product.
constexpr std::int64_t kBlock = 256;

// Returns whether the operator's kernels for the CPU take the product.
bool is_plain(const Tensor& x, const Tensor& weight) {
  return x.device().is_cpu() && weight.device().is_cpu() && x.scalar_type() == at::kFloat &&
         weight.scalar_type() == at::kFloat && weight.dim() == 2 && weight.stride(1) == 1 && x.dim() >= 1 &&
         x.numel() > 0 && x.size(-1) == weight.size(1);
}

// Computes y [M, N] = x [M, D] weightᵀ, without gradients.
void product(const Tensor& x, const Tensor& weight, Tensor& y) {
  if (x.size(0) <= kFewRows) {
    linear_forward({view_of<const float, 2>(x), view_of<const float, 2>(weight), view_of<float, 2>(y)},
                   {.context = libtorch::context_of(x)});
    return;
  }
  if (at::get_num_threads() > 1) {
    at::mm_out(y, x, weight.t());
    return;
  }
  libtorch::context_of(x).threads().run((x.size(0) + kBlock - 1) / kBlock, [&](std::int64_t block, int) {
    libtorch::compute_on_this_thread_only();
    const at::NoGradGuard no_grad;  // because the setting belongs to the thread
    const std::int64_t begin = block * kBlock, end = std::min(x.size(0), begin + kBlock);
    Tensor rows = y.slice(0, begin, end);
    at::mm_out(rows, x.slice(0, begin, end), weight.t());
  });
}

LinearForward linear_problem(const Tensor& x, const Tensor& weight, const LinearFusion& with, const Tensor& y) {
  LinearForward p;
  p.x = view_of<const float, 2>(x);
  if (weight.scalar_type() == at::kBFloat16) {
    p.narrow_weight = view_of<const bfloat16, 2>(weight);
  } else {
    p.weight = view_of<const float, 2>(weight);
  }
  p.y = view_of<float, 2>(y);
  p.norm_weight = view_of<const float, 1>(with.norm_weight);
  p.norm_eps = static_cast<float>(with.norm_eps);
  p.swiglu = with.swiglu;
  p.residual = view_of<const float, 2>(with.residual);
  return p;
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const auto like_x = [&](const Tensor& rows) {  // [N, D] → [..., D]
    auto sizes = x.sizes().vec();
    sizes.back() = rows.size(1);
    return rows.view(sizes);
  };
  const bool differentiable = at::GradMode::is_enabled() &&
                              (x.requires_grad() || weight.requires_grad() || (bias.defined() && bias.requires_grad()));
  if (differentiable || !is_plain(x, weight)) {
    if (!bias.defined()) return at::matmul(x, weight.t());
    return like_x(at::addmm(bias, x.reshape({-1, x.size(-1)}), weight.t()));  // the product adds the bias
  }
  RECORD_USER_SCOPE("efla::linear");
  const at::NoGradGuard no_grad;
  const Tensor rows = with_contiguous_rows(x.reshape({-1, x.size(-1)}));
  Tensor y = at::empty({rows.size(0), weight.size(0)}, x.options());
  product(rows, weight, y);
  if (bias.defined()) y.add_(bias);
  return like_x(y);
}

Tensor fused_linear(const Tensor& x, const Tensor& weight, const LinearFusion& with) {
  const at::NoGradGuard no_grad;
  const bool narrow = weight.scalar_type() == at::kBFloat16;
  const Tensor rows = with_contiguous_rows(x);
  const std::int64_t outputs = with.swiglu ? weight.size(0) / 2 : weight.size(0);
  const Tensor y = at::empty({x.size(0), outputs}, x.options());
  const LinearForward p = linear_problem(rows, weight, with, y);
  const RunOptions options{.context = libtorch::context_of(x)};
  if (takes_linear_forward(p, options)) {
    linear_forward(p, options);
    return y;
  }
  Tensor z = with.norm_weight.defined() ? rms_norm(rows, with.norm_weight, with.norm_eps) : rows;
  z = narrow ? at::mm(z.to(at::kBFloat16), weight.t()).to(at::kFloat) : at::mm(z, weight.t());
  if (with.swiglu) z = at::silu(z.narrow(1, 0, outputs)) * z.narrow(1, outputs, outputs);
  return with.residual.defined() ? z + with.residual : z;
}

}  // namespace efla::autograd
