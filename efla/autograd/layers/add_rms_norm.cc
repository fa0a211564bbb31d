#include "efla/autograd/layers/add_rms_norm.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "efla/autograd/layers/rms_norm.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/layers/add_rms_norm.h"
#include "efla/torch/autocast.h"
#include "efla/torch/context.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class T>
void run_forward(const Tensor& x, const Tensor& branch, const Tensor& weight, double eps, const Tensor& sum,
                 const Tensor& y) {
  add_rms_norm_forward(
      AddRmsNormForward<T>{view_of<const float, 2>(x), view_of<const T, 2>(branch), view_of<const float, 1>(weight),
                           static_cast<float>(eps), view_of<float, 2>(sum), view_of<T, 2>(y)},
      {.context = libtorch::context_of(x)});
}

template <class T>
void run_backward(const Tensor& sum, const Tensor& weight, double eps, const Tensor& dy, const Tensor& dsum,
                  const Tensor& dx, const Tensor& dbranch, const Tensor& dweight) {
  add_rms_norm_backward(
      AddRmsNormBackward<T>{view_of<const float, 2>(sum), view_of<const float, 1>(weight), static_cast<float>(eps),
                            view_of<const T, 2>(dy), view_of<const float, 2>(dsum), view_of<float, 2>(dx),
                            view_of<T, 2>(dbranch), view_of<float, 1>(dweight)},
      {.context = libtorch::context_of(sum)});
}

struct AddRmsNormFunction : torch::autograd::Function<AddRmsNormFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& given_x, const c10::optional<Tensor>& given_branch,
                               const Tensor& weight, double eps, at::ScalarType type) {
    const Tensor x = rows_of(given_x), branch = rows_of(given_branch.value_or(Tensor()));
    const Tensor sum = branch.defined() ? at::empty(x.sizes(), x.options()) : Tensor();
    const Tensor y = at::empty(x.sizes(), x.options().dtype(type));
    with_dtype(type, [&]<class T>(T) { run_forward<T>(x, branch, weight, eps, sum, y); });
    ctx->save_for_backward({branch.defined() ? sum : x, weight});
    ctx->set_materialize_grads(false);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["branch"] = branch.defined();
    ctx->saved_data["type"] = static_cast<std::int64_t>(type);
    const auto shaped = [&](const Tensor& rows) { return rows.view(given_x.sizes()); };
    if (!branch.defined()) return {shaped(y)};
    return {shaped(y), shaped(sum)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order("add_rms_norm");
    const auto saved = ctx->get_saved_variables();
    const Tensor &sum = saved[0], &weight = saved[1];
    const bool has_branch = ctx->saved_data["branch"].toBool();
    const auto type = static_cast<at::ScalarType>(ctx->saved_data["type"].toInt());
    const Tensor given_dsum = has_branch ? grads[1] : Tensor();
    const at::IntArrayRef shape = grads[0].defined() ? grads[0].sizes() : given_dsum.sizes();
    const Tensor dy = grads[0].defined() ? rows_of(grads[0]) : at::zeros(sum.sizes(), sum.options().dtype(type));
    const Tensor dsum = rows_of(given_dsum), dx = at::empty(sum.sizes(), sum.options());
    const Tensor dbranch = has_branch ? at::empty(sum.sizes(), dy.options()) : Tensor();
    const Tensor dweight = at::empty(weight.sizes(), weight.options());
    const double eps = ctx->saved_data["eps"].toDouble();
    with_dtype(type, [&]<class T>(T) { run_backward<T>(sum, weight, eps, dy, dsum, dx, dbranch, dweight); });
    return {dx.view(shape), has_branch ? dbranch.view(shape) : Tensor(), dweight, {}, {}};
  }
};

}  // namespace

std::pair<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& branch, const Tensor& weight, double eps) {
  const bool fused = x.defined() && x.is_cuda() && libtorch::has_gpu_kernels() && x.scalar_type() == at::kFloat &&
                     weight.defined() && weight.scalar_type() == at::kFloat &&
                     (libtorch::product_type(x) == at::kFloat || libtorch::product_type(x) == at::kBFloat16);
  if (!fused) {
    const Tensor sum = branch.defined() ? x + branch : x;
    return {sum, rms_norm(sum, weight, eps)};
  }
  RECORD_USER_SCOPE("efla::add_rms_norm");
  if (branch.defined()) check_shape("add_rms_norm", "branch", branch, x.sizes());
  const at::ScalarType type = libtorch::product_type(x);
  const auto out = AddRmsNormFunction::apply(
      x, branch.defined() ? c10::optional<Tensor>(branch.to(type)) : c10::nullopt, weight, eps, type);
  return {branch.defined() ? out[1] : x, out[0]};
}

}  // namespace efla::autograd
