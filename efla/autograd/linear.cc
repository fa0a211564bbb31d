#include "efla/autograd/linear.h"

#include <ATen/record_function.h>

#include "efla/autograd/tensor_view.h"
#include "efla/cpu/linear.h"
#include "efla/ops/delta.h"

namespace efla::autograd {
namespace {

using at::Tensor;

// With more rows a general product's copy of the weight pays.
constexpr std::int64_t kMostRows = 8;

bool is_decoding(const Tensor& x, const Tensor& weight) {
  const bool plain = x.device().is_cpu() && weight.device().is_cpu() && x.scalar_type() == at::kFloat &&
                     weight.scalar_type() == at::kFloat && weight.dim() == 2 && weight.stride(1) == 1 && x.dim() >= 1 &&
                     x.size(-1) == weight.size(1);
  const bool differentiable = at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  return plain && !differentiable && x.numel() > 0 && x.numel() <= kMostRows * x.size(-1);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight) {
  if (!is_decoding(x, weight)) return at::matmul(x, weight.t());
  RECORD_USER_SCOPE("efla::linear");
  const Tensor rows = with_contiguous_rows(x.reshape({-1, x.size(-1)}));
  const Tensor y = at::empty({rows.size(0), weight.size(0)}, x.options());
  cpu::linear({view_of<const float, 2>(rows), view_of<const float, 2>(weight), view_of<float, 2>(y)}, default_pool());
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return y.view(sizes);
}

}  // namespace efla::autograd
