#include "efla/autograd/delta_rule_ops.h"

#include <torch/library.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "efla/autograd/tensor_view.h"
#include "efla/ops/delta.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;

constexpr const char* kOperation = "delta_rule";

bool is_packed(const DeltaRuleInput& in) { return in.cu_seqlens.defined(); }

at::TensorOptions state_options(const DeltaRuleInput& in) {
  return in.q.options().dtype(in.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Outputs are made from symbolic sizes: when torch.compile traces for lengths that vary, there are no others.
c10::SymInt sequences(const DeltaRuleInput& in) {
  return is_packed(in) ? in.cu_seqlens.sym_size(0) - 1 : in.q.sym_size(0);
}

Tensor empty_state(const DeltaRuleInput& in) {
  return at::empty_symint({sequences(in), in.v.sym_size(2), in.q.sym_size(3), in.v.sym_size(3)}, state_options(in));
}

// g with an axis of channels, as the contract has it.
Tensor with_channels(const Tensor& g, std::int64_t axes) {
  return g.defined() && g.dim() == axes - 1 ? g.unsqueeze(-1) : g;
}

// Calls f with a value of the element type of q.
template <class F>
void with_element_type(const char* name, const Tensor& q, F&& f) {
  switch (q.scalar_type()) {
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(bfloat16{});
    case at::kDouble:
      return f(double{});
    default:
      throw Error(name, "q", std::string("dtype ") + c10::toString(q.scalar_type()), "Float, BFloat16 or Double");
  }
}

// What a forward and a backward problem have in common.
template <class T, class Problem>
void fill(Problem& problem, const DeltaRuleInput& in, const DeltaRule& rule) {
  problem.shape = shape_of(in);
  problem.rule = rule;
  problem.q = view_of<const T, 4>(in.q);
  problem.k = view_of<const T, 4>(in.k);
  problem.v = view_of<const T, 4>(in.v);
  problem.beta = view_of<const T, 3>(in.beta);
  problem.g = view_of<const State<T>, 4>(with_channels(in.g, 4));
  if (is_packed(in)) problem.cu_seqlens = view_of<const std::int64_t, 1>(in.cu_seqlens);
}

// No elements: what an op returns for a tensor that is not there.
Tensor nothing(const DeltaRuleInput& in) { return at::empty({0}, state_options(in)); }

ForwardTensors empty_outputs(const DeltaRuleInput& in, bool save_states) {
  return {at::empty_symint(in.v.sym_sizes(), in.v.options()), empty_state(in),
          save_states ? empty_chunk_states(in) : nothing(in)};
}

DeltaRuleGradients empty_gradients(const DeltaRuleInput& in) {
  const auto like = [](const Tensor& t) { return t.defined() ? at::empty_like(t) : Tensor(); };
  return {like(in.q), like(in.k), like(in.v), like(in.beta), like(in.g), like(in.initial_state)};
}

// The ops' arguments as tensors that may be undefined.
DeltaRuleInput input_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& g,
                        const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens) {
  return {q, k, v, beta, initial_state.value_or(Tensor()), g.value_or(Tensor()), cu_seqlens.value_or(Tensor())};
}

using ForwardOp = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                     const OptionalTensor&, const OptionalTensor&,
                                                     const OptionalTensor&, c10::optional<double>, const std::string&,
                                                     double, double, bool, const std::string&, bool);
using BackwardOp = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const Tensor&, const Tensor&, const OptionalTensor&, c10::optional<double>,
    const std::string&, double, double, bool, const std::string&);

RuleArguments arguments_of(c10::optional<double> scale, const std::string& step, double erase_scale, double write_scale,
                           bool qk_l2norm, const std::string& implementation) {
  DeltaRule rule;
  rule.step = parse_step_size(step);
  rule.step.erase_scale = erase_scale;
  rule.step.write_scale = write_scale;
  rule.qk_l2norm = qk_l2norm;
  rule.scale = scale.value_or(NAN);
  return {rule, implementation};
}

template <bool kMeta>
std::tuple<Tensor, Tensor, Tensor> forward_kernel(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                                                  const OptionalTensor& g, const OptionalTensor& initial_state,
                                                  const OptionalTensor& cu_seqlens, c10::optional<double> scale,
                                                  const std::string& step, double erase_scale, double write_scale,
                                                  bool qk_l2norm, const std::string& implementation, bool save_states) {
  const DeltaRuleInput in = input_of(q, k, v, beta, g, initial_state, cu_seqlens);
  const RuleArguments arguments = arguments_of(scale, step, erase_scale, write_scale, qk_l2norm, implementation);
  if (!kMeta) check(in);
  const ForwardTensors out = empty_outputs(in, save_states);
  if (!kMeta) {
    run_forward(in, arguments.rule(in.g), implementation,
                {out.o, out.final_state, save_states ? out.chunk_states : Tensor()});
  }
  return {out.o, out.final_state, out.chunk_states};
}

template <bool kMeta>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_kernel(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& g,
    const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens, const Tensor& chunk_states,
    const Tensor& dout, const OptionalTensor& dfinal_state, c10::optional<double> scale, const std::string& step,
    double erase_scale, double write_scale, bool qk_l2norm, const std::string& implementation) {
  const DeltaRuleInput in = input_of(q, k, v, beta, g, initial_state, cu_seqlens);
  const RuleArguments arguments = arguments_of(scale, step, erase_scale, write_scale, qk_l2norm, implementation);
  DeltaRuleGradients gradients = empty_gradients(in);
  if (!kMeta) {
    check(in);
    run_backward(in, arguments.rule(in.g), implementation, chunk_states, dout, dfinal_state.value_or(Tensor()),
                 gradients);
  }
  for (Tensor* gradient : {&gradients.g, &gradients.initial_state}) {
    if (!gradient->defined()) *gradient = nothing(in);
  }
  return {gradients.q, gradients.k, gradients.v, gradients.beta, gradients.g, gradients.initial_state};
}

template <bool kMeta>
Tensor step_kernel(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& g,
                   Tensor state, c10::optional<double> scale, const std::string& step, double erase_scale,
                   double write_scale, bool qk_l2norm, const std::string& implementation) {
  const auto arguments = arguments_of(scale, step, erase_scale, write_scale, qk_l2norm, implementation);
  if (kMeta) return at::empty(v.sizes(), v.options());
  return delta_rule_step(q, k, v, beta, g.value_or(Tensor()), state, arguments.rule(Tensor()), implementation);
}

}  // namespace

RuleArguments::RuleArguments(const DeltaRule& rule, const std::string& implementation)
    : step(name_of(rule.step)),
      erase_scale(rule.step.erase_scale),
      write_scale(rule.step.write_scale),
      qk_l2norm(rule.qk_l2norm),
      implementation(implementation) {
  if (!std::isnan(rule.scale)) scale = rule.scale;
}

DeltaRule RuleArguments::rule(const Tensor& g) const {
  DeltaRule rule;
  rule.step = parse_step_size(step);
  rule.step.erase_scale = erase_scale;
  rule.step.write_scale = write_scale;
  rule.qk_l2norm = qk_l2norm;
  rule.scale = scale.value_or(NAN);
  if (g.defined()) rule.decay = g.dim() == 3 ? Decay::scalar : Decay::channel;
  return rule;
}

void check(const DeltaRuleInput& in) {
  if (!in.q.defined()) throw Error(kOperation, "q", "an undefined tensor", "a tensor [B, T, H, K]");
  const auto dtype = in.q.scalar_type();
  check_tensor(kOperation, "q", in.q, dtype, 4, "[B, T, H, K]");
  check_tensor(kOperation, "k", in.k, dtype, 4, "[B, T, H, K]");
  check_tensor(kOperation, "v", in.v, dtype, 4, "[B, T, HV, V]");
  check_tensor(kOperation, "beta", in.beta, dtype, 3, "[B, T, HV]");
  const auto state = c10::typeMetaToScalarType(state_options(in).dtype());
  if (in.g.defined()) {
    const bool scalar = in.g.dim() == 3;
    check_tensor(kOperation, "g", in.g, state, scalar ? 3 : 4, "[B, T, HV] or [B, T, HV, K]");
  }
  if (in.initial_state.defined())
    check_tensor(kOperation, "initial_state", in.initial_state, state, 4, "[N, HV, K, V]");
  if (is_packed(in)) {
    check_tensor(kOperation, "cu_seqlens", in.cu_seqlens, at::kLong, 1, "[N + 1]");
    if (in.cu_seqlens.size(0) == 0) throw Error(kOperation, "cu_seqlens", "shape [0]", "shape [N + 1]");
  }
}

DeltaShape shape_of(const DeltaRuleInput& in) {
  return {in.q.size(0),
          in.q.size(1),
          in.q.size(2),
          in.v.size(2),
          in.q.size(3),
          in.v.size(3),
          is_packed(in) ? std::max<std::int64_t>(in.cu_seqlens.size(0) - 1, 1) : 0};
}

Tensor empty_chunk_states(const DeltaRuleInput& in) {
  const c10::SymInt tokens = in.q.sym_size(1);  // as DeltaShape::chunks
  const c10::SymInt chunks = is_packed(in) ? tokens / kChunk + sequences(in) : (tokens + (kChunk - 1)) / kChunk;
  return at::empty_symint({in.q.sym_size(0), chunks, in.v.sym_size(2), in.q.sym_size(3), in.v.sym_size(3)},
                          state_options(in));
}

void run_forward(const DeltaRuleInput& in, const DeltaRule& rule, const std::string& implementation,
                 const ForwardTensors& out) {
  with_element_type(kOperation, in.q, [&]<class T>(T) {
    DeltaForward<T> problem;
    fill<T>(problem, in, rule);
    problem.initial_state = view_of<const State<T>, 4>(in.initial_state);
    problem.o = view_of<T, 4>(out.o);
    problem.final_state = view_of<State<T>, 4>(out.final_state);
    problem.chunk_states = view_of<State<T>, 5>(out.chunk_states);
    delta_forward(problem, {.implementation = implementation});
  });
}

void run_backward(const DeltaRuleInput& in, const DeltaRule& rule, const std::string& implementation,
                  const Tensor& chunk_states, const Tensor& dout, const Tensor& dfinal_state,
                  const DeltaRuleGradients& gradients) {
  with_element_type(kOperation, in.q, [&]<class T>(T) {
    DeltaBackward<T> problem;
    fill<T>(problem, in, rule);
    problem.chunk_states = view_of<const State<T>, 5>(chunk_states);
    problem.dout = view_of<const T, 4>(dout);
    problem.dfinal_state = view_of<const State<T>, 4>(dfinal_state);
    problem.dq = view_of<T, 4>(gradients.q);
    problem.dk = view_of<T, 4>(gradients.k);
    problem.dv = view_of<T, 4>(gradients.v);
    problem.dbeta = view_of<T, 3>(gradients.beta);
    problem.dg = view_of<State<T>, 4>(with_channels(gradients.g, 4));
    problem.dinitial_state = view_of<State<T>, 4>(gradients.initial_state);
    delta_backward(problem, {.implementation = implementation});
  });
}

ForwardTensors call_delta_rule_fwd(const DeltaRuleInput& in, const RuleArguments& rule, bool save_states) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("efla::delta_rule_fwd", "").typed<ForwardOp>();
  auto [o, final_state, chunk_states] = op.call(
      in.q, in.k, in.v, in.beta, optional_of(in.g), optional_of(in.initial_state), optional_of(in.cu_seqlens),
      rule.scale, rule.step, rule.erase_scale, rule.write_scale, rule.qk_l2norm, rule.implementation, save_states);
  return {std::move(o), std::move(final_state), std::move(chunk_states)};
}

DeltaRuleGradients call_delta_rule_bwd(const DeltaRuleInput& in, const Tensor& chunk_states, const Tensor& dout,
                                       const Tensor& dfinal_state, const RuleArguments& rule) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("efla::delta_rule_bwd", "").typed<BackwardOp>();
  auto [dq, dk, dv, dbeta, dg, dinitial_state] =
      op.call(in.q, in.k, in.v, in.beta, optional_of(in.g), optional_of(in.initial_state), optional_of(in.cu_seqlens),
              chunk_states, dout, optional_of(dfinal_state), rule.scale, rule.step, rule.erase_scale, rule.write_scale,
              rule.qk_l2norm, rule.implementation);
  return {dq, dk, dv, dbeta, in.g.defined() ? dg : Tensor(), in.initial_state.defined() ? dinitial_state : Tensor()};
}

Tensor delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& g,
                       Tensor& state, const DeltaRule& given_rule, const std::string& implementation) {
  RECORD_USER_SCOPE("efla::delta_rule_step");
  constexpr const char* name = "delta_rule_step";
  if (!q.defined()) throw Error(name, "q", "an undefined tensor", "a tensor [B, H, K]");
  const auto dtype = q.scalar_type();
  const auto state_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
  check_tensor(name, "q", q, dtype, 3, "[B, H, K]");
  check_tensor(name, "k", k, dtype, 3, "[B, H, K]");
  check_tensor(name, "v", v, dtype, 3, "[B, HV, V]");
  check_tensor(name, "beta", beta, dtype, 2, "[B, HV]");
  DeltaRule rule = given_rule;
  rule.decay = Decay::none;
  if (g.defined()) {
    check_tensor(name, "g", g, state_dtype, g.dim() == 2 ? 2 : 3, "[B, HV] or [B, HV, K]");
    rule.decay = g.dim() == 2 ? Decay::scalar : Decay::channel;
  }
  const bool narrow = state.defined() && state.scalar_type() == at::kBFloat16;
  check_tensor(name, "state", state, narrow ? at::kBFloat16 : state_dtype, 4, "[B, HV, K, V]");
  const at::NoGradGuard no_grad;
  Tensor o = at::empty(v.sizes(), v.options());
  with_element_type(name, q, [&]<class T>(T) {
    const auto run = [&]<class S>(S) {
      DeltaStep<T, S> problem;
      problem.shape = {q.size(0), 1, q.size(1), v.size(1), q.size(2), v.size(2)};
      problem.rule = rule;
      problem.q = view_of<const T, 3>(q);
      problem.k = view_of<const T, 3>(k);
      problem.v = view_of<const T, 3>(v);
      problem.beta = view_of<const T, 2>(beta);
      problem.g = view_of<const State<T>, 3>(with_channels(g, 3));
      problem.state = view_of<S, 4>(state);
      problem.o = view_of<T, 3>(o);
      delta_step(problem, {.implementation = implementation});
    };
    if constexpr (std::is_same_v<T, double>) {
      if (narrow) throw Error(name, "state", "dtype BFloat16", "Double, as q");
      run(State<T>{});
    } else if (narrow) {
      run(bfloat16{});
    } else {
      run(State<T>{});
    }
  });
  return o;
}

#define EFLA_INPUTS "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g"
#define EFLA_RULE                                                                                             \
  "float? scale=None, str step='exact', float erase_scale=1.0, float write_scale=1.0, bool qk_l2norm=False, " \
  "str implementation='auto'"

TORCH_LIBRARY_FRAGMENT(efla, library) {
  library.def("delta_rule_fwd(" EFLA_INPUTS "=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, " EFLA_RULE
              ", bool save_states=False) -> (Tensor o, Tensor final_state, Tensor chunk_states)");
  library.def("delta_rule_bwd(" EFLA_INPUTS
              ", Tensor? initial_state, Tensor? cu_seqlens, Tensor chunk_states, Tensor dout, "
              "Tensor? dfinal_state, " EFLA_RULE
              ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dg, Tensor dinitial_state)");
  library.def("delta_rule(" EFLA_INPUTS "=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, " EFLA_RULE
              ") -> (Tensor o, Tensor final_state)",
              [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& g,
                 const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens, c10::optional<double> scale,
                 const std::string& step, double erase_scale, double write_scale, bool qk_l2norm,
                 const std::string& implementation) {
                const DeltaRuleInput in = input_of(q, k, v, beta, g, initial_state, cu_seqlens);
                const auto arguments = arguments_of(scale, step, erase_scale, write_scale, qk_l2norm, implementation);
                auto out = delta_rule(in, arguments.rule(in.g), implementation);
                return std::make_tuple(std::move(out.o), std::move(out.final_state));
              });
  library.def("delta_rule_step(" EFLA_INPUTS ", Tensor(a!) state, " EFLA_RULE ") -> Tensor");
}

TORCH_LIBRARY_IMPL(efla, CPU, library) {
  library.impl("delta_rule_fwd", forward_kernel<false>);
  library.impl("delta_rule_bwd", backward_kernel<false>);
  library.impl("delta_rule_step", step_kernel<false>);
}

TORCH_LIBRARY_IMPL(efla, Meta, library) {
  library.impl("delta_rule_fwd", forward_kernel<true>);
  library.impl("delta_rule_bwd", backward_kernel<true>);
  library.impl("delta_rule_step", step_kernel<true>);
}

// PyTorch 1.13 has no way past AutogradMeta by itself.
TORCH_LIBRARY_IMPL(efla, Autograd, library) { library.impl("delta_rule_step", torch::CppFunction::makeFallthrough()); }

#undef EFLA_INPUTS
#undef EFLA_RULE

}  // namespace efla::autograd
