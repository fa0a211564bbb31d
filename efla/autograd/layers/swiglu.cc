#include "efla/autograd/layers/swiglu.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "efla/autograd/autocast.h"
#include "efla/autograd/context.h"
#include "efla/autograd/layers/linear.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/layers/glu.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kSwigluMlp = "swiglu_mlp";

// Splits projected [N, 2·I] into gate and up.
template <class T>
void swiglu_rows(const Tensor& projected, const Tensor& y) {
  const auto parts = projected.chunk(2, 1);
  glu_forward(GluForward<T>{view_of<const T, 2>(parts[0]), view_of<const T, 2>(parts[1]), view_of<T, 2>(y)},
              {.context = context_of(y)});
}

template <class T>
void swiglu_rows(const Tensor& projected, const Tensor& dy, const Tensor& dprojected, const Tensor& y) {
  const auto parts = projected.chunk(2, 1), gradients = dprojected.chunk(2, 1);
  glu_backward(GluBackward<T>{view_of<const T, 2>(parts[0]), view_of<const T, 2>(parts[1]), view_of<const T, 2>(dy),
                              view_of<T, 2>(gradients[0]), view_of<T, 2>(gradients[1]), view_of<T, 2>(y)},
               {.context = context_of(y)});
}

struct SwigluMlpFunction : torch::autograd::Function<SwigluMlpFunction> {
  // Everything is computed in `type`. The products of the gate's and the up projection's weights are one.
  static Tensor forward(AutogradContext* ctx, const Tensor& given_x, const Tensor& gate, const Tensor& up,
                        const Tensor& given_down, at::ScalarType type) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensor x = rows_of(given_x).to(type), down = given_down.to(type);
    const std::int64_t inner = gate.size(0);
    const Tensor weight = at::empty({2 * inner, gate.size(1)}, x.options());
    weight.narrow(0, 0, inner).copy_(gate);
    weight.narrow(0, inner, inner).copy_(up);
    const Tensor projected = at::mm(x, weight.t()), h = at::empty({x.size(0), inner}, x.options());
    if (type == at::kFloat) {
      swiglu_rows<float>(projected, h);
    } else {
      swiglu_rows<bfloat16>(projected, h);
    }
    ctx->save_for_backward({x, weight, projected, down});
    ctx->saved_data["weight_type"] = given_down.scalar_type();
    auto shape = given_x.sizes().vec();
    shape.back() = down.size(0);
    return at::mm(h, down.t()).view(shape);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kSwigluMlp);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &projected = saved[2], &down = saved[3], dy = rows_of(grads[0]);
    const Tensor dh = at::mm(dy, down), h = at::empty(dh.sizes(), dh.options());
    const Tensor dprojected = at::empty(projected.sizes(), projected.options());
    if (x.scalar_type() == at::kFloat) {
      swiglu_rows<float>(projected, dh, dprojected, h);
    } else {
      swiglu_rows<bfloat16>(projected, dh, dprojected, h);
    }
    auto shape = grads[0].sizes().vec();
    shape.back() = x.size(1);
    const auto weight_type = ctx->saved_data["weight_type"].toScalarType();
    const auto dweight = at::mm(dprojected.t(), x).to(weight_type).chunk(2);
    const Tensor ddown = at::mm(dy.t(), h).to(weight_type);
    return {at::mm(dprojected, weight).view(shape), dweight[0], dweight[1], ddown, {}};
  }
};

}  // namespace

Tensor swiglu_mlp(const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down) {
  const bool has_kernel = x.defined() && x.is_cuda() && has_gpu_kernels() && x.dim() >= 1 && x.numel() > 0 &&
                          (product_type(x) == at::kFloat || product_type(x) == at::kBFloat16);
  if (!has_kernel) return autograd::linear(at::silu(autograd::linear(x, gate)) * autograd::linear(x, up), down);
  RECORD_USER_SCOPE("efla::swiglu_mlp");
  check_tensor(kSwigluMlp, "gate", gate, gate.scalar_type(), 2, "[I, D]", x.device());
  check_shape(kSwigluMlp, "gate", gate, {gate.size(0), x.size(-1)});
  check_tensor(kSwigluMlp, "up", up, gate.scalar_type(), 2, "as gate", x.device());
  check_shape(kSwigluMlp, "up", up, gate.sizes());
  check_tensor(kSwigluMlp, "down", down, gate.scalar_type(), 2, "[N, I]", x.device());
  check_shape(kSwigluMlp, "down", down, {down.size(0), gate.size(0)});
  return SwigluMlpFunction::apply(x, gate, up, down, product_type(x));
}

}  // namespace efla::autograd
