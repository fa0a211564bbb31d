#include "efla/autograd/delta_rule.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "efla/autograd/delta_rule_ops.h"
#include "efla/autograd/tensor_view.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a forward keeps for its backward besides tensors.
struct Settings : torch::CustomClassHolder, DeltaRuleSettings {
  std::int64_t heads = 0, key_dim = 0;  // of a packed tensor

  explicit Settings(DeltaRuleSettings settings, std::int64_t h = 0, std::int64_t k = 0)
      : DeltaRuleSettings(std::move(settings)), heads(h), key_dim(k) {}
};

void keep(AutogradContext* ctx, const c10::intrusive_ptr<Settings>& settings) {
  ctx->saved_data["settings"] = at::IValue::make_capsule(settings);
}

c10::intrusive_ptr<Settings> kept(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Settings>(ctx->saved_data["settings"].toCapsule());
}

// Returns views of q, k and v in a packed tensor, or of their gradients in a packed gradient.
DeltaRuleInput unpack(const Tensor& qkv, const Tensor& beta, const Tensor& g, const Tensor& cu_seqlens,
                      const Settings& settings) {
  const std::int64_t keys = settings.heads * settings.key_dim, values = qkv.size(2) - 2 * keys;
  const auto part = [&](std::int64_t start, std::int64_t length, std::int64_t heads) {
    return qkv.narrow(2, start, length).unflatten(2, {heads, length / heads});
  };
  return {part(0, keys, settings.heads),
          part(keys, keys, settings.heads),
          part(2 * keys, values, beta.size(2)),
          beta,
          {},
          g,
          cu_seqlens};
}

struct DeltaRuleFunction : torch::autograd::Function<DeltaRuleFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& beta, const OptionalTensor& g, const OptionalTensor& initial_state,
                               const OptionalTensor& cu_seqlens, const OptionalTensor& erase_key,
                               const c10::intrusive_ptr<Settings>& settings) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const DeltaRuleInput in{q,
                            k,
                            v,
                            beta,
                            initial_state.value_or(Tensor()),
                            g.value_or(Tensor()),
                            cu_seqlens.value_or(Tensor()),
                            erase_key.value_or(Tensor())};
    const ForwardTensors out = call_delta_rule_fwd(in, *settings);
    if (!settings->final_state) ctx->mark_non_differentiable({out.final_state});
    if (settings->save_states) {
      ctx->save_for_backward({q, k, v, beta, in.g, in.initial_state, in.cu_seqlens, out.chunk_states, in.erase_key});
      ctx->set_materialize_grads(false);
      keep(ctx, settings);
    }
    return {out.o, out.final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kDeltaRule);
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto saved = ctx->get_saved_variables();
    const DeltaRuleInput in{saved[0], saved[1], saved[2], saved[3], saved[5], saved[4], saved[6], saved[8]};
    const Tensor dout = grads[0].defined() ? grads[0] : empty_output(in).zero_();
    const auto gradients = call_delta_rule_bwd(in, saved[7], dout, grads[1], *kept(ctx));
    return {gradients.q, gradients.k,         gradients.v, gradients.beta, gradients.g, gradients.initial_state,
            {},          gradients.erase_key, {}};
  }
};

struct PackedDeltaRuleFunction : torch::autograd::Function<PackedDeltaRuleFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& qkv, const Tensor& beta, const OptionalTensor& given_g,
                        const OptionalTensor& given_cu_seqlens, const c10::intrusive_ptr<Settings>& settings) {
    const Tensor g = given_g.value_or(Tensor()), cu_seqlens = given_cu_seqlens.value_or(Tensor());
    const DeltaRuleInput in = unpack(qkv, beta, g, cu_seqlens, *settings);
    check(in);
    if (settings->save_states) settings->saved = saved_states(in, settings->rule, settings->implementation);
    const ForwardTensors out{at::empty(in.v.sizes(), in.v.options()),
                             {},
                             settings->save_states ? empty_chunk_states(in, settings->saved) : Tensor()};
    run_forward(in, *settings, out);
    if (settings->save_states) {
      ctx->save_for_backward({qkv, beta, g, cu_seqlens, out.chunk_states});
      keep(ctx, settings);
    }
    return out.o;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kDeltaRule);
    const auto saved = ctx->get_saved_variables();
    const auto settings = kept(ctx);
    const Tensor dqkv = at::empty(saved[0].sizes(), saved[0].options());
    const Tensor dbeta = at::empty(saved[1].sizes(), saved[1].options());
    const Tensor dg = saved[2].defined() ? at::empty(saved[2].sizes(), saved[2].options()) : Tensor();
    const DeltaRuleInput parts = unpack(dqkv, dbeta, dg, {}, *settings);
    run_backward(unpack(saved[0], saved[1], saved[2], saved[3], *settings), *settings, saved[4], grads[0], {},
                 {parts.q, parts.k, parts.v, parts.beta, dg, {}, {}});
    return {dqkv, dbeta, dg, {}, {}};
  }
};

bool any_needs_gradient(std::initializer_list<Tensor> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.defined() && t.requires_grad(); });
}

}  // namespace

DeltaRuleOutput delta_rule(const DeltaRuleInput& in, const DeltaRule& rule, const std::string& implementation,
                           bool output_final_state) {
  for (const auto& [name, tensor] :
       {std::pair("q", &in.q), std::pair("k", &in.k), std::pair("v", &in.v), std::pair("beta", &in.beta)}) {
    if (!tensor->defined()) throw Error(kDeltaRule, name, "an undefined tensor", "a tensor");  // a Function takes none
  }
  DeltaRuleSettings settings{rule, implementation,
                             any_needs_gradient({in.q, in.k, in.v, in.beta, in.g, in.initial_state, in.erase_key})};
  settings.final_state = output_final_state;
  if (settings.save_states) settings.saved = saved_states(in, rule, implementation);
  const auto out = DeltaRuleFunction::apply(in.q, in.k, in.v, in.beta, optional_of(in.g), optional_of(in.initial_state),
                                            optional_of(in.cu_seqlens), optional_of(in.erase_key),
                                            c10::make_intrusive<Settings>(settings));
  return {out[0], out[1]};
}

Tensor delta_rule_packed(const Tensor& qkv, const Tensor& beta, const Tensor& g, std::int64_t heads,
                         std::int64_t key_dim, const DeltaRule& rule, const Tensor& cu_seqlens,
                         const std::string& implementation) {
  if (!qkv.defined()) throw Error(kDeltaRule, "qkv", "an undefined tensor", "a tensor [B, T, 2·H·K + HV·V]");
  check_tensor(kDeltaRule, "qkv", qkv, qkv.scalar_type(), 3, "[B, T, 2·H·K + HV·V]", qkv.device());
  check_tensor(kDeltaRule, "beta", beta, qkv.scalar_type(), 3, "[B, T, HV]", qkv.device());
  check_shape(kDeltaRule, "beta", beta, {qkv.size(0), qkv.size(1), beta.size(2)});
  const std::int64_t value_heads = beta.size(2), values = qkv.size(2) - 2 * heads * key_dim;
  if (key_dim < 1 || heads < 1 || values < value_heads || value_heads < 1 || values % value_heads != 0) {
    throw Error(kDeltaRule, "qkv", "shape " + shape_text(qkv),
                "2·H·K + HV·V columns with H = " + std::to_string(heads) + ", K = " + std::to_string(key_dim) +
                    " and HV = " + std::to_string(value_heads));
  }
  const DeltaRuleSettings settings{rule, implementation, any_needs_gradient({qkv, beta, g})};
  return PackedDeltaRuleFunction::apply(qkv, beta, optional_of(g), optional_of(cu_seqlens),
                                        c10::make_intrusive<Settings>(settings, heads, key_dim));
}

}  // namespace efla::autograd
