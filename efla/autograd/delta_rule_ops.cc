#include "efla/autograd/delta_rule_ops.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <cmath>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "efla/autograd/delta_rule_problem.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/delta.h"
#include "efla/rule/validate.h"
#include "efla/torch/context.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;

// Returns a tensor without elements, which an op returns in place of an undefined tensor. It is made without the
// dispatcher and the allocator, which take longer, except on the device meta, where a compiler traces.
template <bool kMeta>
Tensor nothing(const DeltaRuleInput& in) {
  if (kMeta) return at::empty({0}, state_options(in));
  const at::Device device = in.q.device();
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device)), c10::DispatchKeySet(key),
      state_options(in).dtype());
}

DeltaRuleGradients empty_gradients(const DeltaRuleInput& in) {
  const auto like = [](const Tensor& t) {
    return t.defined() ? at::empty_like(t, at::MemoryFormat::Contiguous) : Tensor();
  };
  return {like(in.q), like(in.k), like(in.v), like(in.beta), like(in.g), like(in.initial_state), like(in.erase_key)};
}

// Returns the arguments of an op as tensors that may be undefined.
DeltaRuleInput input_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& g,
                        const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                        const OptionalTensor& erase_key = {}) {
  return {q,
          k,
          v,
          beta,
          initial_state.value_or(Tensor()),
          g.value_or(Tensor()),
          cu_seqlens.value_or(Tensor()),
          erase_key.value_or(Tensor())};
}

// Return the rule of an op's arguments. The internal ops take a step size as its integrator and order. Only the ops
// that a user calls take its name.
DeltaRule rule_of(c10::optional<double> scale, std::int64_t integrator, std::int64_t order, double erase_scale,
                  double write_scale, bool qk_l2norm) {
  if (integrator < 0 || integrator > static_cast<std::int64_t>(Integrator::trapezoid)) {
    throw Error(kDeltaRule, "integrator", std::to_string(integrator), "one of enum Integrator");
  }
  DeltaRule rule;
  rule.step = {static_cast<Integrator>(integrator), static_cast<int>(order), erase_scale, write_scale};
  rule.qk_l2norm = qk_l2norm;
  rule.scale = scale.value_or(NAN);
  return rule;
}

DeltaRule rule_of(c10::optional<double> scale, const std::string& step, double erase_scale, double write_scale,
                  bool qk_l2norm) {
  if (scale && std::isnan(*scale)) throw Error(kDeltaRule, "scale", "nan", "a finite number");  // NaN: the default
  DeltaRule rule;
  rule.step = parse_step_size(step);
  rule.step.erase_scale = erase_scale;
  rule.step.write_scale = write_scale;
  rule.qk_l2norm = qk_l2norm;
  rule.scale = scale.value_or(NAN);
  return rule;
}

c10::optional<double> scale_of(const DeltaRule& rule) {
  return std::isnan(rule.scale) ? c10::nullopt : c10::optional<double>(rule.scale);
}

// Throws Error unless the tensor is on the device meta, like the others of its call, or undefined.
void check_on_meta(const char* op, const char* name, const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_meta()) return;
  throw Error(op, name, "a tensor on " + tensor.device().str(), "one on meta, as other tensors are");
}

bool knows_sizes(const Tensor& tensor) { return c10::asIntArrayRefSlowOpt(tensor.sym_sizes()).has_value(); }

// Throws Error unless the tensors of a call are on the device meta and, if all sizes are known, fit each other.
// torch.compile traces with sizes that are not known. `has_tokens` says whether the tensors have the axis T.
void check_meta(const char* op, const DeltaRuleInput& in, bool has_tokens) {
  const std::pair<const char*, const Tensor*> tensors[] = {{"q", &in.q},
                                                           {"k", &in.k},
                                                           {"v", &in.v},
                                                           {"beta", &in.beta},
                                                           {"g", &in.g},
                                                           {"initial_state", &in.initial_state},
                                                           {"cu_seqlens", &in.cu_seqlens},
                                                           {"erase_key", &in.erase_key}};
  for (const auto& [name, tensor] : tensors) check_on_meta(op, name, *tensor);
  for (const auto& [name, tensor] : tensors) {
    if (tensor->defined() && !knows_sizes(*tensor)) return;
  }
  const std::int64_t rank = has_tokens ? 4 : 3;
  for (const auto& [name, tensor, axes] : {std::tuple("q", &in.q, has_tokens ? "[B, T, H, K]" : "[B, H, K]"),
                                           std::tuple("v", &in.v, has_tokens ? "[B, T, HV, V]" : "[B, HV, V]")}) {
    if (tensor->dim() != rank) {
      throw Error(op, name, "shape " + shape_text(*tensor), std::string("shape ") + axes);
    }
  }
  if (is_packed(in) && in.cu_seqlens.dim() != 1) {
    throw Error(op, "cu_seqlens", "shape " + shape_text(in.cu_seqlens), "shape [N + 1]");
  }
  const std::int64_t heads = in.q.size(-2), keys = in.q.size(-1), value_heads = in.v.size(-2), values = in.v.size(-1);
  const std::int64_t n = has_tokens && in.k.dim() == rank ? steps_per_token(in) : 1;
  const auto check_one = [&](const char* name, const Tensor& tensor, std::int64_t steps,
                             std::initializer_list<std::int64_t> last) {
    std::vector<std::int64_t> shape = in.q.sizes().slice(0, rank - 2).vec();
    if (has_tokens) shape[1] *= steps;
    shape.insert(shape.end(), last);
    check_shape(op, name, tensor, shape);
  };
  check_one("k", in.k, n, {heads, keys});
  if (in.erase_key.defined()) check_one("erase_key", in.erase_key, n, {heads, keys});
  check_one("v", in.v, n, {value_heads, values});
  check_one("beta", in.beta, n, {value_heads});
  if (in.g.defined() && in.g.dim() == rank) check_one("g", in.g, 1, {value_heads, keys});
  if (in.g.defined() && in.g.dim() != rank) check_one("g", in.g, 1, {value_heads});
  const std::int64_t batch = in.q.size(0), packed = is_packed(in) ? in.cu_seqlens.numel() - 1 : 0;
  if (in.initial_state.defined()) {
    check_shape(op, "initial_state", in.initial_state, {is_packed(in) ? packed : batch, value_heads, keys, values});
  }
  validate(op, {batch, has_tokens ? in.q.size(1) * n : 1, heads, value_heads, keys, values, packed});
}

template <bool kMeta>
std::tuple<Tensor, Tensor, Tensor> forward_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                                              const OptionalTensor& g, const OptionalTensor& initial_state,
                                              const OptionalTensor& cu_seqlens, c10::optional<double> scale,
                                              std::int64_t integrator, std::int64_t order, double erase_scale,
                                              double write_scale, bool qk_l2norm, const std::string& implementation,
                                              std::int64_t state_interval, bool output_final_state,
                                              const OptionalTensor& erase_key) {
  const DeltaRuleInput in = input_of(q, k, v, beta, g, initial_state, cu_seqlens, erase_key);
  const DeltaRuleSettings settings{rule_of(scale, integrator, order, erase_scale, write_scale, qk_l2norm),
                                   implementation,
                                   state_interval != 0,
                                   {state_interval},
                                   output_final_state};
  if (state_interval < 0) throw Error(kDeltaRule, "state_interval", std::to_string(state_interval), "at least 0");
  kMeta ? check_meta(kDeltaRule, in, true) : check(in);
  const Tensor o = empty_output(in);
  const Tensor final_state = output_final_state ? empty_state(in) : Tensor();
  const Tensor states = settings.save_states ? empty_chunk_states(in, settings.saved) : Tensor();
  if (!kMeta) run_forward(in, settings, {o, final_state, states});
  const auto given = [&](const Tensor& tensor) { return tensor.defined() ? tensor : nothing<kMeta>(in); };
  return {o, given(final_state), given(states)};
}

template <bool kMeta>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_op(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& g,
    const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens, const Tensor& chunk_states,
    const Tensor& dout, const OptionalTensor& dfinal_state, c10::optional<double> scale, std::int64_t integrator,
    std::int64_t order, double erase_scale, double write_scale, bool qk_l2norm, const std::string& implementation,
    std::int64_t state_interval, const OptionalTensor& erase_key) {
  const DeltaRuleInput in = input_of(q, k, v, beta, g, initial_state, cu_seqlens, erase_key);
  kMeta ? check_meta(kDeltaRule, in, true) : check(in);
  DeltaRuleGradients gradients = empty_gradients(in);
  if (!kMeta) {
    run_backward(in,
                 {rule_of(scale, integrator, order, erase_scale, write_scale, qk_l2norm),
                  implementation,
                  true,
                  {state_interval}},
                 chunk_states, dout, dfinal_state.value_or(Tensor()), gradients);
  }
  for (Tensor* gradient : {&gradients.g, &gradients.initial_state, &gradients.erase_key}) {
    if (!gradient->defined()) *gradient = nothing<kMeta>(in);
  }
  return {gradients.q,        gradients.k, gradients.v, gradients.beta, gradients.g, gradients.initial_state,
          gradients.erase_key};
}

template <bool kMeta>
Tensor step_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& g,
               Tensor state, c10::optional<double> scale, const std::string& step, double erase_scale,
               double write_scale, bool qk_l2norm, const std::string& implementation, const OptionalTensor& erase_key) {
  const DeltaRule rule = rule_of(scale, step, erase_scale, write_scale, qk_l2norm);
  if (kMeta) {
    check_meta(kDeltaRuleStep, input_of(q, k, v, beta, g, {}, {}, erase_key), false);
    check_on_meta(kDeltaRuleStep, "state", state);
    if (knows_sizes(q) && knows_sizes(v) && knows_sizes(state)) {
      check_shape(kDeltaRuleStep, "state", state, {q.size(0), v.size(1), q.size(2), v.size(2)});
    }
    return at::empty(v.sizes(), v.options());
  }
  return delta_rule_step(q, k, v, beta, g.value_or(Tensor()), state, rule, implementation,
                         erase_key.value_or(Tensor()));
}

template <bool kMeta>
Tensor steps_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& g,
                Tensor states, const OptionalTensor& slots, const OptionalTensor& kept, c10::optional<double> scale,
                const std::string& step, double erase_scale, double write_scale, bool qk_l2norm,
                const std::string& implementation, const OptionalTensor& erase_key) {
  const DeltaRule rule = rule_of(scale, step, erase_scale, write_scale, qk_l2norm);
  if (kMeta) {
    check_meta(kDeltaRuleSteps, input_of(q, k, v, beta, g, {}, {}, erase_key), true);
    check_on_meta(kDeltaRuleSteps, "states", states);
    check_on_meta(kDeltaRuleSteps, "slots", slots.value_or(Tensor()));
    check_on_meta(kDeltaRuleSteps, "kept", kept.value_or(Tensor()));
    if (knows_sizes(q) && knows_sizes(v) && knows_sizes(states)) {
      const std::int64_t count = slots ? states.size(0) : q.size(0);
      check_shape(kDeltaRuleSteps, "states", states, {count, v.size(2), q.size(3), v.size(3)});
    }
    return empty_output(input_of(q, k, v, beta, g, {}, {}));
  }
  return delta_rule_steps(q, k, v, beta, g.value_or(Tensor()), states, slots.value_or(Tensor()),
                          kept.value_or(Tensor()), rule, implementation, erase_key.value_or(Tensor()));
}

// The ops that a user calls: one is differentiable, the other also returns the states before every state_interval-th
// token of a sequence. A final state that is not asked for has no elements.
std::tuple<Tensor, Tensor> user_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                                   const OptionalTensor& g, const OptionalTensor& initial_state,
                                   const OptionalTensor& cu_seqlens, c10::optional<double> scale,
                                   const std::string& step, double erase_scale, double write_scale, bool qk_l2norm,
                                   const std::string& implementation, bool output_final_state,
                                   const OptionalTensor& erase_key) {
  auto out = delta_rule(input_of(q, k, v, beta, g, initial_state, cu_seqlens, erase_key),
                        rule_of(scale, step, erase_scale, write_scale, qk_l2norm), implementation, output_final_state);
  return {std::move(out.o), std::move(out.final_state)};
}

std::tuple<Tensor, Tensor, Tensor> user_op_with_states(const Tensor& q, const Tensor& k, const Tensor& v,
                                                       const Tensor& beta, const OptionalTensor& g,
                                                       const OptionalTensor& initial_state,
                                                       const OptionalTensor& cu_seqlens, c10::optional<double> scale,
                                                       const std::string& step, double erase_scale, double write_scale,
                                                       bool qk_l2norm, const std::string& implementation,
                                                       std::int64_t state_interval, const OptionalTensor& erase_key) {
  if (state_interval < 1) throw Error(kDeltaRule, "state_interval", std::to_string(state_interval), "at least 1");
  auto out = call_delta_rule_fwd(
      input_of(q, k, v, beta, g, initial_state, cu_seqlens, erase_key),
      {rule_of(scale, step, erase_scale, write_scale, qk_l2norm), implementation, true, {state_interval}});
  return {std::move(out.o), std::move(out.final_state), std::move(out.chunk_states)};
}

// Returns the name of the forward's implementation for tensors like these, and why earlier rows refused; an empty name
// and the error if no row computes them. On a CPU float16 counts as float32, because the Python functions convert it.
// Tensors without memory count as aligned.
std::tuple<std::string, std::string> choice_op(const Tensor& q, const Tensor& k, const Tensor& v,
                                               const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                                               const std::string& implementation, const OptionalTensor& erase_key) {
  const DeltaRuleInput given = input_of(q, k, v, {}, g, {}, cu_seqlens, erase_key);
  check_tensor(kDeltaRule, "q", q, q.scalar_type(), 4, "[B, T, H, K]", q.device());
  check_tensor(kDeltaRule, "k", k, q.scalar_type(), 4, "[B, T, H, K]", q.device());
  check_tensor(kDeltaRule, "v", v, q.scalar_type(), 4, "[B, T, HV, V]", q.device());
  if (erase_key) check_tensor(kDeltaRule, "erase_key", *erase_key, q.scalar_type(), 4, "[B, T, H, K]", q.device());
  const bool has_data = !q.unsafeGetTensorImpl()->is_python_dispatch(), one_step = steps_per_token(given) == 1;
  const auto ask = [&]<class T>(T) -> std::tuple<std::string, std::string> {
    DeltaForward<T> problem;
    problem.shape = shape_of(given);
    problem.rule.decay = decay_of(given.g, 3);
    problem.rule.two_keys = given.erase_key.defined();
    if (q.is_cpu() && has_data && !one_step) problem.q = view_of<const T, 4>(q);  // a GPU computes steps as tokens
    if (q.is_cuda() && has_data && one_step) {
      // A tensor that with_rows would copy is left out, because the copy is aligned.
      const auto rows = [](const Tensor& t) { return t.stride(3) == 1 ? view_of<const T, 4>(t) : View<const T, 4>(); };
      problem.q = rows(q);
      problem.k = rows(k);
      problem.v = rows(v);
      if (given.erase_key.defined()) problem.erase_key = rows(given.erase_key);
      if (!problem.k || !problem.v || (problem.rule.two_keys && !problem.erase_key)) problem.q = {};
      problem.o = View<T, 4>::contiguous(nullptr, {v.size(0), v.size(1), v.size(2), v.size(3)});
    }
    Choice choice;
    try {
      choice = choose_delta_forward(problem, {implementation, libtorch::context_of(q)});
    } catch (const Error& error) {
      return {"", error.what()};
    }
    std::string reasons;
    for (const Refusal& refusal : choice.refusals) {
      reasons += (reasons.empty() ? "" : "; ") + std::string(refusal.implementation) + ": " + refusal.reason;
    }
    return {std::string(choice.implementation), reasons};
  };
  if (q.scalar_type() == at::kHalf && !q.is_cuda()) return ask(float{});
  std::tuple<std::string, std::string> names;
  with_element_type(kDeltaRule, q, [&](auto zero) { names = ask(zero); });
  return names;
}

}  // namespace

ForwardTensors call_delta_rule_fwd(const DeltaRuleInput& in, const DeltaRuleSettings& settings) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("efla::delta_rule_fwd", "").typed<decltype(forward_op<false>)>();
  const DeltaRule& rule = settings.rule;
  auto [o, final_state, chunk_states] =
      op.call(in.q, in.k, in.v, in.beta, optional_of(in.g), optional_of(in.initial_state), optional_of(in.cu_seqlens),
              scale_of(rule), static_cast<std::int64_t>(rule.step.integrator), rule.step.order, rule.step.erase_scale,
              rule.step.write_scale, rule.qk_l2norm, settings.implementation,
              settings.save_states ? settings.saved.interval : 0, settings.final_state, optional_of(in.erase_key));
  return {std::move(o), std::move(final_state), std::move(chunk_states)};
}

DeltaRuleGradients call_delta_rule_bwd(const DeltaRuleInput& in, const Tensor& chunk_states, const Tensor& dout,
                                       const Tensor& dfinal_state, const DeltaRuleSettings& settings) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("efla::delta_rule_bwd", "").typed<decltype(backward_op<false>)>();
  const DeltaRule& rule = settings.rule;
  auto [dq, dk, dv, dbeta, dg, dinitial_state, derase_key] = op.call(
      in.q, in.k, in.v, in.beta, optional_of(in.g), optional_of(in.initial_state), optional_of(in.cu_seqlens),
      chunk_states, dout, optional_of(dfinal_state), scale_of(rule), static_cast<std::int64_t>(rule.step.integrator),
      rule.step.order, rule.step.erase_scale, rule.step.write_scale, rule.qk_l2norm, settings.implementation,
      settings.saved.interval, optional_of(in.erase_key));
  const auto if_given = [](const Tensor& input, Tensor& gradient) { return input.defined() ? gradient : Tensor(); };
  return {dq,
          dk,
          dv,
          dbeta,
          if_given(in.g, dg),
          if_given(in.initial_state, dinitial_state),
          if_given(in.erase_key, derase_key)};
}

#define EFLA_INPUTS "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g"
#define EFLA_RULE                                                                                             \
  "float? scale=None, str step='exact', float erase_scale=1.0, float write_scale=1.0, bool qk_l2norm=False, " \
  "str implementation='auto'"
#define EFLA_PARSED_RULE                                                                            \
  "float? scale, int integrator, int order, float erase_scale, float write_scale, bool qk_l2norm, " \
  "str implementation, int state_interval"

TORCH_LIBRARY_FRAGMENT(efla, library) {
  library.def("delta_rule_fwd(" EFLA_INPUTS ", Tensor? initial_state, Tensor? cu_seqlens, " EFLA_PARSED_RULE
              ", bool output_final_state, Tensor? erase_key=None) -> (Tensor o, Tensor final_state, Tensor "
              "chunk_states)");
  library.def("delta_rule_bwd(" EFLA_INPUTS
              ", Tensor? initial_state, Tensor? cu_seqlens, Tensor chunk_states, Tensor dout, "
              "Tensor? dfinal_state, " EFLA_PARSED_RULE
              ", Tensor? erase_key=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dg, "
              "Tensor dinitial_state, Tensor derase_key)");
  library.def("delta_rule(" EFLA_INPUTS "=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, " EFLA_RULE
              ", bool output_final_state=True, Tensor? erase_key=None) -> (Tensor o, Tensor final_state)",
              user_op);
  library.def("delta_rule_with_states(" EFLA_INPUTS
              "=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, " EFLA_RULE
              ", int state_interval=32, Tensor? erase_key=None) -> (Tensor o, Tensor final_state, Tensor states)",
              user_op_with_states);
  library.def("delta_rule_step(" EFLA_INPUTS ", Tensor(a!) state, " EFLA_RULE ", Tensor? erase_key=None) -> Tensor");
  library.def("delta_rule_steps(" EFLA_INPUTS ", Tensor(a!) states, Tensor? slots=None, Tensor? kept=None, " EFLA_RULE
              ", Tensor? erase_key=None) -> Tensor");
  library.def(
      "delta_rule_choice(Tensor q, Tensor k, Tensor v, Tensor? g=None, Tensor? cu_seqlens=None, "
      "str implementation=\"auto\", Tensor? erase_key=None) -> (str name, str reason)",
      choice_op);
  library.def("delta_rule_step_size(str step) -> (int integrator, int order)", [](const std::string& step) {
    const StepSize size = parse_step_size(step);
    return std::tuple(static_cast<std::int64_t>(size.integrator), static_cast<std::int64_t>(size.order));
  });
  library.def("has_gpu_kernels() -> bool", [] { return libtorch::has_gpu_kernels(); });
  library.def("delta_rule_implementations() -> str[]",
              [] { return selectable_names(delta_forward_implementations()); });
}

// The functions are the same for tensors on the CPU and on a GPU, because efla/ops chooses an implementation by the
// device.
TORCH_LIBRARY_IMPL(efla, CPU, library) {
  library.impl("delta_rule_fwd", forward_op<false>);
  library.impl("delta_rule_bwd", backward_op<false>);
  library.impl("delta_rule_step", step_op<false>);
  library.impl("delta_rule_steps", steps_op<false>);
}

TORCH_LIBRARY_IMPL(efla, CUDA, library) {
  library.impl("delta_rule_fwd", forward_op<false>);
  library.impl("delta_rule_bwd", backward_op<false>);
  library.impl("delta_rule_step", step_op<false>);
  library.impl("delta_rule_steps", steps_op<false>);
}

TORCH_LIBRARY_IMPL(efla, Meta, library) {
  library.impl("delta_rule_fwd", forward_op<true>);
  library.impl("delta_rule_bwd", backward_op<true>);
  library.impl("delta_rule_step", step_op<true>);
  library.impl("delta_rule_steps", steps_op<true>);
}

// PyTorch 1.13 does not fall through the key Autograd by itself.
TORCH_LIBRARY_IMPL(efla, Autograd, library) {
  // Without this kernel second derivatives by torch.func would be zeros.
  library.impl("delta_rule_bwd", torch::autograd::autogradNotImplementedFallback());
  library.impl("delta_rule_step", torch::CppFunction::makeFallthrough());
  library.impl("delta_rule_steps", torch::CppFunction::makeFallthrough());
}

#undef EFLA_INPUTS
#undef EFLA_RULE
#undef EFLA_PARSED_RULE

}  // namespace efla::autograd
