#include "efla/autograd/delta_rule.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <utility>

#include "efla/autograd/tensor_view.h"
#include "efla/ops/delta.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kName = "delta_rule";

// What a forward knows besides its tensors, kept for the backward.
struct Settings : torch::CustomClassHolder {
  DeltaRule rule;
  std::string implementation;
  std::int64_t key_dim = 0;  // of a packed tensor

  Settings(const DeltaRule& r, std::string i, std::int64_t k) : rule(r), implementation(std::move(i)), key_dim(k) {}
};

void keep(AutogradContext* ctx, const c10::intrusive_ptr<Settings>& settings) {
  ctx->saved_data["settings"] = at::IValue::make_capsule(settings);
}

c10::intrusive_ptr<Settings> kept(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Settings>(ctx->saved_data["settings"].toCapsule());
}

// The inputs of one call.
struct Inputs {
  Tensor q, k, v, beta, initial_state;

  DeltaShape shape() const { return {q.size(0), q.size(1), q.size(2), v.size(2), q.size(3), v.size(3)}; }
  std::vector<std::int64_t> state_sizes() const { return {v.size(0), v.size(2), q.size(3), v.size(3)}; }
  // float32, or float64 for float64 inputs.
  at::TensorOptions state_options() const {
    return q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
};

// q, k and v of a packed tensor, or their gradients in a packed gradient.
Inputs unpack(const Tensor& qkv, const Tensor& beta, std::int64_t key_dim) {
  const std::int64_t heads = beta.size(2), keys = heads * key_dim, values = qkv.size(2) - 2 * keys;
  const auto part = [&](std::int64_t start, std::int64_t length) {
    return qkv.narrow(2, start, length).unflatten(2, {heads, length / heads});
  };
  return {part(0, keys), part(keys, keys), part(2 * keys, values), beta, {}};
}

// Calls f with a value of the element type of q.
template <class F>
void with_element_type(const Tensor& q, F&& f) {
  switch (q.scalar_type()) {
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(bfloat16{});
    case at::kDouble:
      return f(double{});
    default:
      throw Error(kName, "q", std::string("dtype ") + c10::toString(q.scalar_type()), "Float, BFloat16 or Double");
  }
}

void check(const Inputs& in) {
  if (!in.q.defined()) throw Error(kName, "q", "an undefined tensor", "a tensor [B, T, H, K]");
  const auto dtype = in.q.scalar_type();
  check_tensor(kName, "q", in.q, dtype, 4, "[B, T, H, K]");
  check_tensor(kName, "k", in.k, dtype, 4, "[B, T, H, K]");
  check_tensor(kName, "v", in.v, dtype, 4, "[B, T, H, V]");
  check_tensor(kName, "beta", in.beta, dtype, 3, "[B, T, H]");
  if (in.initial_state.defined()) {
    const auto state = c10::typeMetaToScalarType(in.state_options().dtype());
    check_tensor(kName, "initial_state", in.initial_state, state, 4, "[B, H, K, V]");
  }
}

struct Outputs {
  Tensor o, final_state, chunk_states;
};

Outputs run_forward(const Inputs& in, const Settings& settings, bool with_final_state, bool with_chunk_states) {
  const DeltaShape shape = in.shape();
  Outputs out;
  out.o = at::empty({shape.batch, shape.tokens, shape.value_heads, shape.value_dim}, in.v.options());
  if (with_final_state) out.final_state = at::empty(in.state_sizes(), in.state_options());
  if (with_chunk_states) {
    out.chunk_states =
        at::empty({shape.batch, shape.chunks(), shape.value_heads, shape.key_dim, shape.value_dim}, in.state_options());
  }
  with_element_type(in.q, [&]<class T>(T) {
    DeltaForward<T> problem;
    problem.shape = shape;
    problem.rule = settings.rule;
    problem.q = view_of<const T, 4>(in.q);
    problem.k = view_of<const T, 4>(in.k);
    problem.v = view_of<const T, 4>(in.v);
    problem.beta = view_of<const T, 3>(in.beta);
    problem.initial_state = view_of<const State<T>, 4>(in.initial_state);
    problem.o = view_of<T, 4>(out.o);
    problem.final_state = view_of<State<T>, 4>(out.final_state);
    problem.chunk_states = view_of<State<T>, 5>(out.chunk_states);
    delta_forward(problem, {.implementation = settings.implementation});
  });
  return out;
}

// Fills `gradients`, whose initial_state may be undefined.
void run_backward(const Inputs& in, const Settings& settings, const Tensor& chunk_states, const Tensor& dout,
                  const Tensor& dfinal_state, const Inputs& gradients) {
  with_element_type(in.q, [&]<class T>(T) {
    DeltaBackward<T> problem;
    problem.shape = in.shape();
    problem.rule = settings.rule;
    problem.q = view_of<const T, 4>(in.q);
    problem.k = view_of<const T, 4>(in.k);
    problem.v = view_of<const T, 4>(in.v);
    problem.beta = view_of<const T, 3>(in.beta);
    problem.chunk_states = view_of<const State<T>, 5>(chunk_states);
    problem.dout = view_of<const T, 4>(dout);
    problem.dfinal_state = view_of<const State<T>, 4>(dfinal_state);
    problem.dq = view_of<T, 4>(gradients.q);
    problem.dk = view_of<T, 4>(gradients.k);
    problem.dv = view_of<T, 4>(gradients.v);
    problem.dbeta = view_of<T, 3>(gradients.beta);
    problem.dinitial_state = view_of<State<T>, 4>(gradients.initial_state);
    delta_backward(problem, {.implementation = settings.implementation});
  });
}

struct DeltaRuleFunction : torch::autograd::Function<DeltaRuleFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& beta, const c10::optional<Tensor>& given_state,
                               const c10::intrusive_ptr<Settings>& settings, bool needs_gradient) {
    const Tensor initial_state = given_state.value_or(Tensor());
    Outputs out = run_forward({q, k, v, beta, initial_state}, *settings, true, needs_gradient);
    if (needs_gradient) {
      ctx->save_for_backward({q, k, v, beta, initial_state, out.chunk_states});
      ctx->set_materialize_grads(false);
      keep(ctx, settings);
    }
    return {out.o, out.final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kName);
    const auto saved = ctx->get_saved_variables();
    const Inputs in{saved[0], saved[1], saved[2], saved[3], saved[4]};
    const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(in.v);
    const Inputs gradients{at::empty_like(in.q), at::empty_like(in.k), at::empty_like(in.v), at::empty_like(in.beta),
                           in.initial_state.defined() ? at::empty_like(in.initial_state) : Tensor()};
    run_backward(in, *kept(ctx), saved[5], dout, grads[1], gradients);
    return {gradients.q, gradients.k, gradients.v, gradients.beta, gradients.initial_state, {}, {}};
  }
};

struct PackedDeltaRuleFunction : torch::autograd::Function<PackedDeltaRuleFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& qkv, const Tensor& beta,
                        const c10::intrusive_ptr<Settings>& settings, bool needs_gradient) {
    Outputs out = run_forward(unpack(qkv, beta, settings->key_dim), *settings, false, needs_gradient);
    if (needs_gradient) {
      ctx->save_for_backward({qkv, beta, out.chunk_states});
      keep(ctx, settings);
    }
    return out.o;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kName);
    const auto saved = ctx->get_saved_variables();
    const auto settings = kept(ctx);
    const Tensor dqkv = at::empty(saved[0].sizes(), saved[0].options());
    const Tensor dbeta = at::empty(saved[1].sizes(), saved[1].options());
    run_backward(unpack(saved[0], saved[1], settings->key_dim), *settings, saved[2], grads[0], {},
                 unpack(dqkv, dbeta, settings->key_dim));
    return {dqkv, dbeta, {}, {}};
  }
};

bool any_needs_gradient(std::initializer_list<Tensor> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.defined() && t.requires_grad(); });
}

DeltaRule rule_from(const std::string& step, double erase_scale, double write_scale, c10::optional<double> scale,
                    bool qk_l2norm) {
  DeltaRule rule;
  rule.step = parse_step_size(step);
  rule.step.erase_scale = erase_scale;
  rule.step.write_scale = write_scale;
  rule.qk_l2norm = qk_l2norm;
  rule.scale = scale.value_or(NAN);
  return rule;
}

}  // namespace

DeltaRuleOutput delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                           const Tensor& initial_state, const DeltaRule& rule, const std::string& implementation) {
  check({q, k, v, beta, initial_state});
  const auto out = DeltaRuleFunction::apply(q, k, v, beta, optional_of(initial_state),
                                            c10::make_intrusive<Settings>(rule, implementation, std::int64_t{0}),
                                            any_needs_gradient({q, k, v, beta, initial_state}));
  return {out[0], out[1]};
}

Tensor delta_rule_packed(const Tensor& qkv, const Tensor& beta, std::int64_t key_dim, const DeltaRule& rule,
                         const std::string& implementation) {
  if (!qkv.defined()) throw Error(kName, "qkv", "an undefined tensor", "a tensor [B, T, 2·H·K + H·V]");
  check_tensor(kName, "qkv", qkv, qkv.scalar_type(), 3, "[B, T, 2·H·K + H·V]");
  check_tensor(kName, "beta", beta, qkv.scalar_type(), 3, "[B, T, H]");
  check_shape(kName, "beta", beta, {qkv.size(0), qkv.size(1), beta.size(2)});
  const std::int64_t heads = beta.size(2), values = qkv.size(2) - 2 * heads * key_dim;
  if (key_dim < 1 || heads < 1 || values < heads || values % heads != 0) {
    throw Error(kName, "qkv", "shape " + shape_text(qkv),
                "2·H·K + H·V columns with H = " + std::to_string(heads) + " and K = " + std::to_string(key_dim));
  }
  return PackedDeltaRuleFunction::apply(qkv, beta, c10::make_intrusive<Settings>(rule, implementation, key_dim),
                                        any_needs_gradient({qkv, beta}));
}

Tensor delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, Tensor& state,
                       const DeltaRule& rule, const std::string& implementation) {
  constexpr const char* name = "delta_rule_step";
  if (!q.defined()) throw Error(name, "q", "an undefined tensor", "a tensor [B, H, K]");
  const auto dtype = q.scalar_type();
  check_tensor(name, "q", q, dtype, 3, "[B, H, K]");
  check_tensor(name, "k", k, dtype, 3, "[B, H, K]");
  check_tensor(name, "v", v, dtype, 3, "[B, H, V]");
  check_tensor(name, "beta", beta, dtype, 2, "[B, H]");
  check_tensor(name, "state", state, dtype == at::kDouble ? at::kDouble : at::kFloat, 4, "[B, H, K, V]");
  const at::NoGradGuard no_grad;
  Tensor o = at::empty(v.sizes(), v.options());
  with_element_type(q, [&]<class T>(T) {
    DeltaStep<T> problem;
    problem.shape = {q.size(0), 1, q.size(1), v.size(1), q.size(2), v.size(2)};
    problem.rule = rule;
    problem.q = view_of<const T, 3>(q);
    problem.k = view_of<const T, 3>(k);
    problem.v = view_of<const T, 3>(v);
    problem.beta = view_of<const T, 2>(beta);
    problem.state = view_of<State<T>, 4>(state);
    problem.o = view_of<T, 3>(o);
    delta_step(problem, {.implementation = implementation});
  });
  return o;
}

TORCH_LIBRARY_FRAGMENT(efla, library) {
  library.def(
      "delta_rule(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? initial_state=None, float? scale=None, "
      "str step='exact', float erase_scale=1.0, float write_scale=1.0, bool qk_l2norm=False, "
      "str implementation='auto') -> (Tensor o, Tensor final_state)",
      [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
         const c10::optional<Tensor>& initial_state, c10::optional<double> scale, const std::string& step,
         double erase_scale, double write_scale, bool qk_l2norm, const std::string& implementation) {
        auto out = delta_rule(q, k, v, beta, initial_state.value_or(Tensor()),
                              rule_from(step, erase_scale, write_scale, scale, qk_l2norm), implementation);
        return std::make_tuple(std::move(out.o), std::move(out.final_state));
      });
  library.def(
      "delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor(a!) state, float? scale=None, "
      "str step='exact', float erase_scale=1.0, float write_scale=1.0, bool qk_l2norm=False, "
      "str implementation='auto') -> Tensor",
      [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, Tensor state,
         c10::optional<double> scale, const std::string& step, double erase_scale, double write_scale, bool qk_l2norm,
         const std::string& implementation) {
        return delta_rule_step(q, k, v, beta, state, rule_from(step, erase_scale, write_scale, scale, qk_l2norm),
                               implementation);
      });
}

}  // namespace efla::autograd
