#include "efla/rule/validate.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/rule/check.h"
#include "efla/rule/micro_steps.h"
#include "efla/rule/mixer_step.h"
#include "efla/rule/short_conv.h"

namespace efla {
namespace {

// The largest number of elements of a tensor. With this limit products of extents and byte counts stay within int64.
constexpr std::int64_t kMaxElements = std::numeric_limits<std::int64_t>::max() / 64;

void check_rule(const char* operation, const DeltaRule& rule) {
  const auto& step = rule.step;
  if (step.integrator < Integrator::euler || step.integrator > Integrator::trapezoid) {
    throw Error(operation, "integrator", std::to_string(static_cast<int>(step.integrator)), "one of enum Integrator");
  }
  if (rule.decay < Decay::none || rule.decay > Decay::channel) {
    throw Error(operation, "decay", std::to_string(static_cast<int>(rule.decay)), "one of enum Decay");
  }
  if (step.integrator == Integrator::rk && (step.order < 1 || step.order > kMaxRungeKuttaOrder)) {
    throw Error(operation, "order", std::to_string(step.order), "1 to " + std::to_string(kMaxRungeKuttaOrder));
  }
  for (const auto& [name, value] : {std::pair{"erase_scale", step.erase_scale}, {"write_scale", step.write_scale}}) {
    if (!std::isfinite(value)) throw Error(operation, name, value_text(value), "a finite number");
  }
  if (std::isinf(rule.scale)) throw Error(operation, "scale", value_text(rule.scale), "a finite number");
}

// Checks g, and dg if there is one.
template <class T, int Rank>
void check_decay(const char* operation, const char* name, const DeltaRule& rule, const View<T, Rank>& view,
                 std::array<std::int64_t, Rank> expected) {
  if (rule.decay == Decay::none) {
    if (view) throw Error(operation, name, "a tensor", "nothing, as the rule has no decay");
    return;
  }
  if (rule.decay == Decay::scalar) expected.back() = 1;
  check_view(operation, name, view, expected);
}

// Checks erase_key, and derase_key if there is one.
template <class T, int Rank>
void check_erase_key(const char* operation, const char* name, const DeltaRule& rule, const View<T, Rank>& view,
                     const std::type_identity_t<std::array<std::int64_t, Rank>>& expected) {
  if (rule.two_keys) return check_view(operation, name, view, expected);
  if (view) throw Error(operation, name, "a tensor", "nothing, as the rule has one key");
}

// Checks the ends of packed sequences, counted in steps, of which a token has n.
void check_sequences(const char* operation, const DeltaShape& s, const View<const std::int64_t, 1>& cu_seqlens,
                     std::int64_t n, const Device& device) {
  if (s.packed == 0) {
    if (cu_seqlens) throw Error(operation, "cu_seqlens", "a tensor", "nothing, as the shape has no packed sequences");
    return;
  }
  check_cu_seqlens(operation, cu_seqlens, s.packed, s.batch, s.tokens, device);
  for (std::int64_t i = 0; n > 1 && device.is_cpu() && i <= s.packed; ++i) {
    if (cu_seqlens(i) % n == 0) continue;
    throw Error(operation, "cu_seqlens[" + std::to_string(i) + "]", std::to_string(cu_seqlens(i)),
                "a multiple of the " + std::to_string(n) + " steps per token");
  }
}

// Returns the rows of q, g and o, one per token, of a problem whose T counts steps; T if q has another number of rows
// than tokens can have, so that the check of q refuses it.
template <class Problem>
std::int64_t token_rows(const Problem& p) {
  const std::int64_t n = steps_per_token(p);
  return p.q.extent[1] * n == p.shape.tokens ? p.q.extent[1] : p.shape.tokens;
}

template <class S>
void check_saved_states(const char* operation, const DeltaShape& s, const SavedStates& saved, const View<S, 5>& states,
                        Presence presence) {
  check_size(operation, "interval of saved states", saved.interval, 1);
  check_view(operation, "chunk_states", states,
             {s.batch, s.chunks(saved.interval), s.value_heads, s.key_dim, s.value_dim}, presence);
}

// Checks the states [B, HV, K, V] of a decode step, or with slots a pool of states [P, HV, K, V], and the slots.
template <class S>
void check_states(const char* operation, const char* name, const DeltaShape& s, const View<S, 4>& states,
                  const View<const std::int64_t, 1>& slots, const Device& device) {
  const std::int64_t count = slots ? states.extent[0] : s.batch;
  check_size(operation, "state count P", count, 0);
  check_view(operation, name, states, {count, s.value_heads, s.key_dim, s.value_dim});
  if (!slots) return;
  check_view(operation, "slots", slots, {s.batch});
  if (!device.is_cpu()) return;
  std::vector<bool> taken(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < s.batch; ++i) {
    const std::int64_t slot = slots(i);
    if (slot < -1 || slot >= count || (slot >= 0 && taken[static_cast<std::size_t>(slot)])) {
      throw Error(operation, "slots[" + std::to_string(i) + "]", std::to_string(slot),
                  "-1 or a state of " + std::to_string(count) + " that no other entry has");
    }
    if (slot >= 0) taken[static_cast<std::size_t>(slot)] = true;
  }
}

}  // namespace

void validate(const char* operation, const DeltaShape& s, const DeltaRule& rule) {
  validate(operation, s);
  check_rule(operation, rule);
}

void validate(const char* operation, const DeltaShape& s) {
  check_size(operation, "batch size B", s.batch, 1);
  check_size(operation, "token count T", s.tokens, 1);
  check_size(operation, "head count H", s.heads, 1);
  check_size(operation, "key dim K", s.key_dim, 1);
  check_size(operation, "value dim V", s.value_dim, 1);
  if (s.value_heads < s.heads || s.value_heads % s.heads != 0) {
    throw Error(operation, "value head count HV", std::to_string(s.value_heads),
                "a multiple of H = " + std::to_string(s.heads));
  }
  const auto check_elements = [&](std::initializer_list<std::int64_t> extents) {
    std::int64_t elements = 1;
    for (const auto n : extents) {
      if (elements > kMaxElements / n) {
        throw Error(operation, "sizes B, T, H, K, V", "more than 2^57 elements per tensor", "fewer");
      }
      elements *= n;
    }
  };
  check_elements({s.batch, s.tokens, s.value_heads, std::max(s.key_dim, s.value_dim)});
  check_elements({s.sequences(), s.value_heads, s.key_dim, s.value_dim});
}

void validate_step(const char* operation, const DeltaShape& s, const DeltaRule& rule, std::int64_t most_tokens) {
  check_size(operation, "token count T", s.tokens, 1, most_tokens);
  if (s.packed != 0) throw Error(operation, "packed sequence count N", std::to_string(s.packed), "0 for decode steps");
  validate(operation, s, rule);
}

template <class T>
void validate(const DeltaForward<T>& p, const Device& device) {
  constexpr const char* op = "delta_forward";
  const auto& s = p.shape;
  validate(op, s, p.rule);
  const std::int64_t rows = token_rows(p);
  check_view(op, "q", p.q, {s.batch, rows, s.heads, s.key_dim});
  check_view(op, "k", p.k, {s.batch, s.tokens, s.heads, s.key_dim});
  check_erase_key(op, "erase_key", p.rule, p.erase_key, {s.batch, s.tokens, s.heads, s.key_dim});
  check_view(op, "v", p.v, {s.batch, s.tokens, s.value_heads, s.value_dim});
  check_view(op, "beta", p.beta, {s.batch, s.tokens, s.value_heads});
  check_decay(op, "g", p.rule, p.g, {s.batch, rows, s.value_heads, s.key_dim});
  check_sequences(op, s, p.cu_seqlens, s.tokens / rows, device);
  const std::array<std::int64_t, 4> state{s.sequences(), s.value_heads, s.key_dim, s.value_dim};
  check_view(op, "initial_state", p.initial_state, state, Presence::optional);
  check_view(op, "o", p.o, {s.batch, rows, s.value_heads, s.value_dim});
  check_view(op, "final_state", p.final_state, state, Presence::optional);
  check_saved_states(op, s, p.saved, p.chunk_states, Presence::optional);
}

template <class T>
void validate(const DeltaBackward<T>& p, const Device& device) {
  constexpr const char* op = "delta_backward";
  const auto& s = p.shape;
  validate(op, s, p.rule);
  const std::int64_t rows = token_rows(p);
  const std::array<std::int64_t, 4> queries{s.batch, rows, s.heads, s.key_dim};
  const std::array<std::int64_t, 4> keys{s.batch, s.tokens, s.heads, s.key_dim};
  const std::array<std::int64_t, 4> values{s.batch, s.tokens, s.value_heads, s.value_dim};
  const std::array<std::int64_t, 4> state{s.sequences(), s.value_heads, s.key_dim, s.value_dim};
  check_view(op, "q", p.q, queries);
  check_view(op, "k", p.k, keys);
  check_erase_key(op, "erase_key", p.rule, p.erase_key, keys);
  check_view(op, "v", p.v, values);
  check_view(op, "beta", p.beta, {s.batch, s.tokens, s.value_heads});
  check_decay(op, "g", p.rule, p.g, {s.batch, rows, s.value_heads, s.key_dim});
  check_sequences(op, s, p.cu_seqlens, s.tokens / rows, device);
  check_saved_states(op, s, p.saved, p.chunk_states, Presence::required);
  check_view(op, "dout", p.dout, {s.batch, rows, s.value_heads, s.value_dim});
  check_view(op, "dfinal_state", p.dfinal_state, state, Presence::optional);
  check_view(op, "dq", p.dq, queries);
  check_view(op, "dk", p.dk, keys);
  check_erase_key(op, "derase_key", p.rule, p.derase_key, keys);
  check_view(op, "dv", p.dv, values);
  check_view(op, "dbeta", p.dbeta, {s.batch, s.tokens, s.value_heads});
  check_decay(op, "dg", p.rule, p.dg, {s.batch, rows, s.value_heads, s.key_dim});
  check_view(op, "dinitial_state", p.dinitial_state, state, Presence::optional);
}

template <class T, class S>
void validate(const DeltaStep<T, S>& p, const Device& device) {
  constexpr const char* op = "delta_step";
  const auto& s = p.shape;
  validate_step(op, s, p.rule);
  check_view(op, "q", p.q, {s.batch, s.heads, s.key_dim});
  check_view(op, "k", p.k, {s.batch, s.heads, s.key_dim});
  check_erase_key(op, "erase_key", p.rule, p.erase_key, {s.batch, s.heads, s.key_dim});
  check_view(op, "v", p.v, {s.batch, s.value_heads, s.value_dim});
  check_view(op, "beta", p.beta, {s.batch, s.value_heads});
  check_decay(op, "g", p.rule, p.g, {s.batch, s.value_heads, s.key_dim});
  check_states(op, "state", s, p.state, p.slots, device);
  check_view(op, "o", p.o, {s.batch, s.value_heads, s.value_dim});
}

template <class T, class S>
void validate(const DeltaSteps<T, S>& p, const Device& device) {
  constexpr const char* op = "delta_steps";
  const auto& s = p.shape;
  const std::int64_t n = steps_per_token(p);
  validate_step(op, s, p.rule, kMaxStepTokens * n);
  const std::int64_t rows = token_rows(p);
  check_view(op, "q", p.q, {s.batch, rows, s.heads, s.key_dim});
  check_view(op, "k", p.k, {s.batch, s.tokens, s.heads, s.key_dim});
  check_erase_key(op, "erase_key", p.rule, p.erase_key, {s.batch, s.tokens, s.heads, s.key_dim});
  check_view(op, "v", p.v, {s.batch, s.tokens, s.value_heads, s.value_dim});
  check_view(op, "beta", p.beta, {s.batch, s.tokens, s.value_heads});
  check_decay(op, "g", p.rule, p.g, {s.batch, rows, s.value_heads, s.key_dim});
  check_states(op, "states", s, p.states, p.slots, device);
  check_view(op, "o", p.o, {s.batch, rows, s.value_heads, s.value_dim});
  check_view(op, "kept", p.kept, {s.batch}, Presence::optional);
  for (std::int64_t i = 0; p.kept && device.is_cpu() && i < s.batch; ++i) {
    check_size(op, ("kept[" + std::to_string(i) + "]").c_str(), p.kept(i), 0, rows);
  }
}

void validate(const MixerStep& p, const Device& device) {
  constexpr const char* op = "mixer_step";
  const auto& s = p.shape;
  validate_step(op, s, p.rule);
  if (p.rule.two_keys) throw Error(op, "two_keys", "true", "false, as a mixer step has one key per token");
  check_size(op, "filter width W", p.taps.extent[1], 1, kMaxConvWidth);
  const std::int64_t values = s.value_heads * s.value_dim, width = p.taps.extent[1];
  check_view(op, "qkv", p.qkv, {s.batch, p.channels()});
  check_view(op, "taps", p.taps, {p.channels(), width});
  if (p.beta_activation != BetaActivation::one) check_view(op, "beta", p.beta, {s.batch, s.value_heads});
  check_view(op, "beta_factor", p.beta_factor, {s.value_heads});
  if (p.rule.decay != Decay::none) {
    const std::int64_t decays = s.value_heads * (p.rule.decay == Decay::channel ? s.key_dim : 1);
    check_view(op, "decay", p.decay, {s.batch, decays});
    check_view(op, "rate", p.rate, {s.value_heads});
    check_view(op, "decay_bias", p.decay_bias, {decays});
  }
  check_view(op, "norm_weight", p.norm_weight, {s.value_dim}, Presence::optional);
  check_view(op, "gate", p.gate, {s.batch, values}, Presence::optional);
  check_view(op, "gate_bias", p.gate_bias, {values}, Presence::optional);
  check_states(op, "states", s, p.states, p.slots, device);
  if (width > 1) check_view(op, "history", p.history, {p.states.extent[0], width - 1, p.channels()});
  check_view(op, "o", p.o, {s.batch, values});
}

template void validate(const DeltaForward<float>&, const Device&);
template void validate(const DeltaForward<bfloat16>&, const Device&);
template void validate(const DeltaForward<float16>&, const Device&);
template void validate(const DeltaForward<double>&, const Device&);
template void validate(const DeltaBackward<float>&, const Device&);
template void validate(const DeltaBackward<bfloat16>&, const Device&);
template void validate(const DeltaBackward<float16>&, const Device&);
template void validate(const DeltaBackward<double>&, const Device&);

#define EFLA_INSTANTIATE(T, S)                                   \
  template void validate(const DeltaStep<T, S>&, const Device&); \
  template void validate(const DeltaSteps<T, S>&, const Device&);
EFLA_INSTANTIATE(float, float)
EFLA_INSTANTIATE(float, bfloat16)
EFLA_INSTANTIATE(bfloat16, float)
EFLA_INSTANTIATE(bfloat16, bfloat16)
EFLA_INSTANTIATE(float16, float)
EFLA_INSTANTIATE(float16, bfloat16)
EFLA_INSTANTIATE(double, double)
#undef EFLA_INSTANTIATE

}  // namespace efla
