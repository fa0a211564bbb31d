#include "efla/autograd/layers/rms_norm.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <string>

#include "efla/autograd/tensor_view.h"
#include "efla/ops/layers/rms_norm.h"
#include "efla/torch/context.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kRmsNorm = "rms_norm";

Tensor float_of(const Tensor& weight) { return weight.defined() ? weight.to(at::kFloat).contiguous() : weight; }

// The gate of a norm, undefined without one.
struct Gated {
  Tensor gate;
  GateActivation activation = GateActivation::silu;
};

template <class T>
void run_forward(const Tensor& x, const Tensor& weight, double eps, const Gated& gated, const Tensor& y) {
  rms_norm_forward(RmsNormForward<T>{view_of<const T, 2>(x), view_of<const float, 1>(weight), static_cast<float>(eps),
                                     view_of<T, 2>(y), view_of<const T, 2>(gated.gate), gated.activation},
                   {.context = libtorch::context_of(x)});
}

template <class T>
void run_backward(const Tensor& x, const Tensor& weight, double eps, const Gated& gated, const Tensor& dy,
                  const Tensor& dx, const Tensor& dweight, const Tensor& dgate) {
  rms_norm_backward(RmsNormBackward<T>{view_of<const T, 2>(x), view_of<const float, 1>(weight), static_cast<float>(eps),
                                       view_of<const T, 2>(dy), view_of<T, 2>(dx), view_of<float, 1>(dweight),
                                       view_of<const T, 2>(gated.gate), gated.activation, view_of<T, 2>(dgate)},
                    {.context = libtorch::context_of(x)});
}

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_any, const c10::optional<Tensor>& given_weight,
                        const c10::optional<Tensor>& given_gate, std::int64_t activation, double eps) {
    const Tensor weight = given_weight.value_or(Tensor());
    const Gated gated{given_gate ? rows_of(*given_gate) : Tensor(), static_cast<GateActivation>(activation)};
    const Tensor x = rows_of(x_any), y = at::empty(x.sizes(), x.options());
    with_dtype(x.scalar_type(), [&]<class T>(T) { run_forward<T>(x, float_of(weight), eps, gated, y); });
    ctx->save_for_backward({x, weight, gated.gate});
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["eps"] = eps;
    return y.view(x_any.sizes());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kRmsNorm);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const Gated gated{saved[2], static_cast<GateActivation>(ctx->saved_data["activation"].toInt())};
    const Tensor dy = rows_of(grads[0]), dx = at::empty(x.sizes(), x.options());
    const Tensor dgate = gated.gate.defined() ? at::empty(x.sizes(), x.options()) : Tensor();
    const double eps = ctx->saved_data["eps"].toDouble();
    const Tensor dweight = weight.defined() ? at::empty({x.size(1)}, x.options().dtype(at::kFloat)) : Tensor();
    with_dtype(x.scalar_type(),
               [&]<class T>(T) { run_backward<T>(x, float_of(weight), eps, gated, dy, dx, dweight, dgate); });
    return {dx.view(grads[0].sizes()),
            weight.defined() ? dweight.to(weight.scalar_type()) : Tensor(),
            dgate.defined() ? dgate.view(grads[0].sizes()) : Tensor(),
            {},
            {}};
  }
};

// Computes the same with LibTorch's operators, on devices that have no kernel here.
Tensor composite(const Tensor& x, const Tensor& weight, const Gated& gated, double eps) {
  const Tensor wide = x.to(at::kFloat);
  Tensor y = wide * at::rsqrt(wide.square().mean(-1, true) + eps);
  if (weight.defined()) y = y * weight.to(at::kFloat);
  if (gated.gate.defined()) {
    const Tensor z = gated.gate.to(at::kFloat);
    y = y * (gated.activation == GateActivation::silu ? at::silu(z) : at::sigmoid(z));
  }
  return y.to(x.scalar_type());
}

Tensor run(const Tensor& x, const Tensor& weight, const Gated& gated, double eps) {
  if (!x.defined()) throw Error(kRmsNorm, "x", "an undefined tensor", "a tensor [..., D]");
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16) {
    throw Error(kRmsNorm, "x", std::string("dtype ") + c10::toString(x.scalar_type()), "Float or BFloat16");
  }
  if (x.dim() < 1 || x.numel() == 0) throw Error(kRmsNorm, "x", "shape " + shape_text(x), "[..., D] with elements");
  if (weight.defined()) check_shape(kRmsNorm, "weight", weight, {x.size(-1)});
  if (weight.defined() && weight.device() != x.device()) {
    throw Error(kRmsNorm, "weight", "a tensor on " + weight.device().str(), "one on " + x.device().str() + ", as x");
  }
  if (gated.gate.defined()) {
    check_shape(kRmsNorm, "gate", gated.gate, x.sizes());
    if (gated.gate.device() != x.device()) {
      throw Error(kRmsNorm, "gate", "a tensor on " + gated.gate.device().str(),
                  "one on " + x.device().str() + ", as x");
    }
    if (gated.gate.scalar_type() != x.scalar_type()) {
      throw Error(kRmsNorm, "gate", std::string("dtype ") + c10::toString(gated.gate.scalar_type()),
                  std::string(c10::toString(x.scalar_type())) + ", as x");
    }
  }
  if (!x.device().is_cpu() && !(x.is_cuda() && libtorch::has_gpu_kernels())) {
    if (!(eps > 0) || !std::isfinite(eps)) throw Error(kRmsNorm, "eps", value_text(eps), "a positive number");
    return composite(x, weight, gated, eps);
  }
  if (weight.defined()) check_tensor(kRmsNorm, "weight", weight, weight.scalar_type(), 1, "[D]", x.device());
  return RmsNormFunction::apply(x, optional_of(weight), optional_of(gated.gate),
                                static_cast<std::int64_t>(gated.activation), eps);
}

GateActivation parse_gate_activation(const std::string& name) {
  if (name == "silu") return GateActivation::silu;
  if (name == "sigmoid") return GateActivation::sigmoid;
  throw Error(kRmsNorm, "activation", "'" + name + "'", "silu or sigmoid");
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  RECORD_USER_SCOPE("efla::rms_norm");
  return run(x, weight, {}, eps);
}

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, GateActivation activation,
                      double eps) {
  RECORD_USER_SCOPE("efla::gated_rms_norm");
  if (!gate.defined()) throw Error(kRmsNorm, "gate", "an undefined tensor", "a tensor of the shape of x");
  return run(x, weight, {gate, activation}, eps);
}

TORCH_LIBRARY_FRAGMENT(efla, library) {
  library.def("rms_norm(Tensor x, Tensor? weight=None, float eps=1e-6) -> Tensor",
              [](const Tensor& x, const c10::optional<Tensor>& weight, double eps) {
                return rms_norm(x, weight.value_or(Tensor()), eps);
              });
  library.def(
      "gated_rms_norm(Tensor x, Tensor gate, Tensor? weight=None, str activation='silu', float eps=1e-6) -> Tensor",
      [](const Tensor& x, const Tensor& gate, const c10::optional<Tensor>& weight, const std::string& activation,
         double eps) {
        return gated_rms_norm(x, gate, weight.value_or(Tensor()), parse_gate_activation(activation), eps);
      });
}

}  // namespace efla::autograd
