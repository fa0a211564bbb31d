#include "efla/autograd/swiglu.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "efla/autograd/context.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/swiglu.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class T>
void run_forward(const Tensor& gate, const Tensor& up, const Tensor& y) {
  swiglu_forward(SwigluForward<T>{view_of<const T, 2>(gate), view_of<const T, 2>(up), view_of<T, 2>(y)},
                 {.context = context_of(gate)});
}

template <class T>
void run_backward(const Tensor& gate, const Tensor& up, const Tensor& dy, const Tensor& dgate, const Tensor& dup) {
  swiglu_backward(SwigluBackward<T>{view_of<const T, 2>(gate), view_of<const T, 2>(up), view_of<const T, 2>(dy),
                                    view_of<T, 2>(dgate), view_of<T, 2>(dup)},
                  {.context = context_of(gate)});
}

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& given_gate, const Tensor& given_up) {
    const Tensor gate = rows_of(given_gate), up = rows_of(given_up), y = at::empty(gate.sizes(), gate.options());
    if (gate.scalar_type() == at::kFloat) {
      run_forward<float>(gate, up, y);
    } else {
      run_forward<bfloat16>(gate, up, y);
    }
    ctx->save_for_backward({gate, up});
    return y.view(given_gate.sizes());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order("swiglu");
    const auto saved = ctx->get_saved_variables();
    const Tensor &gate = saved[0], &up = saved[1], dy = rows_of(grads[0]);
    const Tensor dgate = at::empty(gate.sizes(), gate.options()), dup = at::empty(up.sizes(), up.options());
    if (gate.scalar_type() == at::kFloat) {
      run_backward<float>(gate, up, dy, dgate, dup);
    } else {
      run_backward<bfloat16>(gate, up, dy, dgate, dup);
    }
    return {dgate.view(grads[0].sizes()), dup.view(grads[0].sizes())};
  }
};

}  // namespace

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  const bool has_kernel = gate.defined() && gate.is_cuda() && has_gpu_kernels() && gate.dim() >= 1 &&
                          (gate.scalar_type() == at::kFloat || gate.scalar_type() == at::kBFloat16);
  if (!has_kernel) return at::silu(gate) * up;
  RECORD_USER_SCOPE("efla::swiglu");
  check_shape("swiglu", "up", up, gate.sizes());
  check_tensor("swiglu", "up", up, gate.scalar_type(), gate.dim(), "as gate", gate.device());
  return SwigluFunction::apply(gate, up);
}

}  // namespace efla::autograd
