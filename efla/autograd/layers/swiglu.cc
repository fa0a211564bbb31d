#include "efla/autograd/layers/swiglu.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "efla/autograd/layers/linear.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/layers/glu.h"
#include "efla/torch/autocast.h"
#include "efla/torch/context.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kSwigluMlp = "swiglu_mlp";

template <class T>
void swiglu_rows(const Tensor& gate, const Tensor& up, const Tensor& y) {
  glu_forward(GluForward<T>{view_of<const T, 2>(gate), view_of<const T, 2>(up), view_of<T, 2>(y)},
              {.context = libtorch::context_of(gate)});
}

template <class T>
void swiglu_rows(const Tensor& gate, const Tensor& up, const Tensor& dy, const Tensor& dgate, const Tensor& dup,
                 const Tensor& y) {
  glu_backward(GluBackward<T>{view_of<const T, 2>(gate), view_of<const T, 2>(up), view_of<const T, 2>(dy),
                              view_of<T, 2>(dgate), view_of<T, 2>(dup), view_of<T, 2>(y)},
               {.context = libtorch::context_of(gate)});
}

struct SwigluMlpFunction : torch::autograd::Function<SwigluMlpFunction> {
  // Everything is computed in `type`.
  static Tensor forward(AutogradContext* ctx, const Tensor& given_x, const Tensor& gate_weight, const Tensor& up_weight,
                        const Tensor& down_weight, at::ScalarType type) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensor x = rows_of(given_x).to(type), to_gate = gate_weight.to(type), to_up = up_weight.to(type);
    const Tensor down = down_weight.to(type), gate = at::mm(x, to_gate.t()), up = at::mm(x, to_up.t());
    const Tensor h = at::empty(gate.sizes(), gate.options());
    with_dtype(type, [&]<class T>(T) { swiglu_rows<T>(gate, up, h); });
    ctx->save_for_backward({x, to_gate, to_up, down, gate, up});
    ctx->saved_data["weight_type"] = down_weight.scalar_type();
    auto shape = given_x.sizes().vec();
    shape.back() = down.size(0);
    return at::mm(h, down.t()).view(shape);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kSwigluMlp);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &to_gate = saved[1], &to_up = saved[2], &down = saved[3], &gate = saved[4];
    const Tensor &up = saved[5], dy = rows_of(grads[0]), dh = at::mm(dy, down), h = at::empty(dh.sizes(), dh.options());
    const Tensor dgate = at::empty(gate.sizes(), gate.options()), dup = at::empty(up.sizes(), up.options());
    with_dtype(x.scalar_type(), [&]<class T>(T) { swiglu_rows<T>(gate, up, dh, dgate, dup, h); });
    Tensor dx = at::mm(dgate, to_gate);
    dx.addmm_(dup, to_up);
    auto shape = grads[0].sizes().vec();
    shape.back() = x.size(1);
    const auto weight_type = ctx->saved_data["weight_type"].toScalarType();
    const auto of_weight = [&](const Tensor& d, const Tensor& in) { return at::mm(d.t(), in).to(weight_type); };
    return {dx.view(shape), of_weight(dgate, x), of_weight(dup, x), of_weight(dy, h), {}};
  }
};

}  // namespace

Tensor swiglu_mlp(const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down) {
  const bool has_kernel = x.defined() && x.is_cuda() && libtorch::has_gpu_kernels() && x.dim() >= 1 && x.numel() > 0 &&
                          (libtorch::product_type(x) == at::kFloat || libtorch::product_type(x) == at::kBFloat16);
  if (!has_kernel) return autograd::linear(at::silu(autograd::linear(x, gate)) * autograd::linear(x, up), down);
  RECORD_USER_SCOPE("efla::swiglu_mlp");
  check_tensor(kSwigluMlp, "gate", gate, gate.scalar_type(), 2, "[I, D]", x.device());
  check_shape(kSwigluMlp, "gate", gate, {gate.size(0), x.size(-1)});
  check_tensor(kSwigluMlp, "up", up, gate.scalar_type(), 2, "as gate", x.device());
  check_shape(kSwigluMlp, "up", up, gate.sizes());
  check_tensor(kSwigluMlp, "down", down, gate.scalar_type(), 2, "[N, I]", x.device());
  check_shape(kSwigluMlp, "down", down, {down.size(0), gate.size(0)});
  return SwigluMlpFunction::apply(x, gate, up, down, libtorch::product_type(x));
}

}  // namespace efla::autograd
