#include "efla/autograd/layers/swiglu.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "efla/autograd/context.h"
#include "efla/autograd/layers/linear.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/layers/glu.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kSwigluLinear = "swiglu_linear";

template <class T>
void swiglu_rows(const Tensor& gate, const Tensor& up, const Tensor& y) {
  glu_forward(GluForward<T>{view_of<const T, 2>(gate), view_of<const T, 2>(up), view_of<T, 2>(y)},
              {.context = context_of(gate)});
}

template <class T>
void swiglu_rows(const Tensor& gate, const Tensor& up, const Tensor& dy, const Tensor& dgate, const Tensor& dup,
                 const Tensor& y) {
  glu_backward(GluBackward<T>{view_of<const T, 2>(gate), view_of<const T, 2>(up), view_of<const T, 2>(dy),
                              view_of<T, 2>(dgate), view_of<T, 2>(dup), view_of<T, 2>(y)},
               {.context = context_of(gate)});
}

struct SwigluLinearFunction : torch::autograd::Function<SwigluLinearFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& given_gate, const Tensor& given_up, const Tensor& weight) {
    const Tensor gate = rows_of(given_gate), up = rows_of(given_up), h = at::empty(gate.sizes(), gate.options());
    if (gate.scalar_type() == at::kFloat) {
      swiglu_rows<float>(gate, up, h);
    } else {
      swiglu_rows<bfloat16>(gate, up, h);
    }
    ctx->save_for_backward({gate, up, weight});
    auto shape = given_gate.sizes().vec();
    shape.back() = weight.size(0);
    return at::mm(h, weight.t()).view(shape);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kSwigluLinear);
    const auto saved = ctx->get_saved_variables();
    const Tensor &gate = saved[0], &up = saved[1], &weight = saved[2], dy = rows_of(grads[0]);
    const Tensor dh = at::mm(dy, weight), h = at::empty(gate.sizes(), gate.options());
    const Tensor dgate = at::empty(gate.sizes(), gate.options()), dup = at::empty(up.sizes(), up.options());
    if (gate.scalar_type() == at::kFloat) {
      swiglu_rows<float>(gate, up, dh, dgate, dup, h);
    } else {
      swiglu_rows<bfloat16>(gate, up, dh, dgate, dup, h);
    }
    auto shape = grads[0].sizes().vec();
    shape.back() = gate.size(1);
    return {dgate.view(shape), dup.view(shape), at::mm(dy.t(), h)};
  }
};

}  // namespace

Tensor swiglu_linear(const Tensor& gate, const Tensor& up, const Tensor& weight) {
  const bool has_kernel = gate.defined() && gate.is_cuda() && has_gpu_kernels() && gate.dim() >= 1 &&
                          (gate.scalar_type() == at::kFloat || gate.scalar_type() == at::kBFloat16);
  if (!has_kernel) return autograd::linear(at::silu(gate) * up, weight);
  RECORD_USER_SCOPE("efla::swiglu_linear");
  check_shape(kSwigluLinear, "up", up, gate.sizes());
  check_tensor(kSwigluLinear, "up", up, gate.scalar_type(), gate.dim(), "as gate", gate.device());
  check_shape(kSwigluLinear, "weight", weight, {weight.size(0), gate.size(-1)});
  return SwigluLinearFunction::apply(gate, up, weight.to(gate.scalar_type()));
}

}  // namespace efla::autograd
