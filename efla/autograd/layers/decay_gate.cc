#include "efla/autograd/layers/decay_gate.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

#include "efla/autograd/tensor_view.h"
#include "efla/ops/layers/decay_gate.h"
#include "efla/torch/context.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kDecayGate = "decay_gate";

template <class T>
void run_gate(const Tensor& z, const Tensor& bias, const Tensor& a_log, DecayActivation activation, double bound,
              const Tensor& g) {
  decay_gate_forward(
      DecayGateForward<T>{view_of<const T, 2>(z), view_of<const float, 1>(bias), view_of<const float, 1>(a_log),
                          activation, static_cast<float>(bound), view_of<float, 2>(g)},
      {.context = libtorch::context_of(z)});
}

template <class T>
void run_gate(const Tensor& z, const Tensor& bias, const Tensor& a_log, DecayActivation activation, double bound,
              const Tensor& dg, const Tensor& dz, const Tensor& dbias, const Tensor& da_log) {
  decay_gate_backward(
      DecayGateBackward<T>{view_of<const T, 2>(z), view_of<const float, 1>(bias), view_of<const float, 1>(a_log),
                           activation, static_cast<float>(bound), view_of<const float, 2>(dg), view_of<T, 2>(dz),
                           view_of<float, 1>(dbias), view_of<float, 1>(da_log)},
      {.context = libtorch::context_of(z)});
}

struct DecayGateFunction : torch::autograd::Function<DecayGateFunction> {
  // bias and a_log are float32.
  static Tensor forward(AutogradContext* ctx, const Tensor& given_z, const Tensor& bias, const Tensor& a_log,
                        std::int64_t activation, double bound) {
    const Tensor z = rows_of(given_z), g = at::empty(z.sizes(), z.options().dtype(at::kFloat));
    with_dtype(z.scalar_type(),
               [&]<class T>(T) { run_gate<T>(z, bias, a_log, static_cast<DecayActivation>(activation), bound, g); });
    ctx->save_for_backward({z, bias, a_log});
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["bound"] = bound;
    return g.view(given_z.sizes());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kDecayGate);
    const auto saved = ctx->get_saved_variables();
    const Tensor &z = saved[0], &bias = saved[1], &a_log = saved[2], dg = rows_of(grads[0]);
    const auto activation = static_cast<DecayActivation>(ctx->saved_data["activation"].toInt());
    const double bound = ctx->saved_data["bound"].toDouble();
    const Tensor dz = at::empty(z.sizes(), z.options());
    const Tensor dbias = at::empty(bias.sizes(), bias.options()), da_log = at::empty(a_log.sizes(), a_log.options());
    with_dtype(z.scalar_type(),
               [&]<class T>(T) { run_gate<T>(z, bias, a_log, activation, bound, dg, dz, dbias, da_log); });
    return {dz.view(grads[0].sizes()), dbias, da_log, {}, {}};
  }
};

// Computes the same with LibTorch's operators, for devices and types that have no kernel here.
Tensor composite_gate(const Tensor& z, const Tensor& bias, const Tensor& a_log, DecayActivation activation,
                      double bound) {
  const std::int64_t heads = a_log.size(0);
  const DecayRate parts = decay_rate(bias, a_log, activation);
  const Tensor rate = parts.rate.unsqueeze(-1);  // [HV, 1]
  const Tensor x = (z + parts.bias).unflatten(-1, {heads, z.size(-1) / heads});
  const Tensor g = activation == DecayActivation::sigmoid ? bound * at::sigmoid(rate * x) : -rate * at::softplus(x);
  return g.flatten(-2);
}

}  // namespace

DecayRate decay_rate(const Tensor& bias, const Tensor& a_log, DecayActivation activation) {
  const Tensor rate = at::exp(a_log.clamp_max(kLargestLogRate<float>));
  if (activation == DecayActivation::sigmoid) return {rate, bias};
  const std::int64_t heads = a_log.size(0);
  const Tensor rest = at::relu(a_log - kLargestLogRate<float>);
  return {rate, (bias.unflatten(0, {heads, bias.size(0) / heads}) + rest.unsqueeze(-1)).flatten()};
}

Tensor decay_gate(const Tensor& z, const Tensor& bias, const Tensor& a_log, DecayActivation activation, double bound) {
  if (!z.defined() || z.dim() < 1) {
    throw Error(kDecayGate, "z", z.defined() ? "shape " + shape_text(z) : "an undefined tensor", "a tensor [..., D]");
  }
  check_tensor(kDecayGate, "a_log", a_log, a_log.scalar_type(), 1, "[HV]", z.device());
  check_tensor(kDecayGate, "bias", bias, bias.scalar_type(), 1, "[D]", z.device());
  check_shape(kDecayGate, "bias", bias, {z.size(-1)});
  if (a_log.size(0) < 1 || z.size(-1) % a_log.size(0) != 0) {
    throw Error(kDecayGate, "a_log", "shape " + shape_text(a_log),
                "[HV] with HV heads that divide the " + std::to_string(z.size(-1)) + " columns of z");
  }
  const bool has_kernel = z.is_cuda() && libtorch::has_gpu_kernels() && z.numel() > 0 &&
                          (z.scalar_type() == at::kFloat || z.scalar_type() == at::kBFloat16);
  if (!has_kernel) return composite_gate(z, bias, a_log, activation, bound);
  RECORD_USER_SCOPE("efla::decay_gate");
  return DecayGateFunction::apply(z, bias.to(at::kFloat), a_log.to(at::kFloat), static_cast<std::int64_t>(activation),
                                  bound);
}

}  // namespace efla::autograd
