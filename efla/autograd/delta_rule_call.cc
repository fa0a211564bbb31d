#include "efla/autograd/delta_rule_call.h"

#include <algorithm>
#include <string_view>

#include "efla/autograd/delta_rule_problem.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/delta.h"
#include "efla/torch/context.h"

namespace efla::autograd {
namespace {

using at::Tensor;

// Outputs are made from symbolic sizes, because torch.compile has no other sizes when it traces for varying lengths.
c10::SymInt sequences(const DeltaRuleInput& in) {
  return is_packed(in) ? in.cu_seqlens.sym_size(0) - 1 : in.q.sym_size(0);
}

// Fills the members that a forward and a backward problem have in common.
template <class T, class Problem>
void fill(Problem& problem, const DeltaRuleInput& in, const DeltaRuleSettings& settings) {
  problem.shape = shape_of(in);
  problem.rule = settings.rule;
  problem.rule.decay = decay_of(in.g, 3);
  problem.rule.two_keys = in.erase_key.defined();
  if (settings.save_states) problem.saved = settings.saved;
  problem.q = view_of<const T, 4>(in.q);
  problem.k = view_of<const T, 4>(in.k);
  problem.v = view_of<const T, 4>(in.v);
  problem.beta = view_of<const T, 3>(in.beta);
  problem.g = view_of_gate<const State<T>, 4>(in.g);
  problem.erase_key = view_of<const T, 4>(in.erase_key);
  if (is_packed(in)) problem.cu_seqlens = view_of<const std::int64_t, 1>(in.cu_seqlens);
}

// Returns the tensor; on a GPU a copy of it if its columns are apart in memory, as after a convolution along the last
// axis, because the fast kernels read whole rows.
Tensor with_rows(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? with_contiguous_rows(tensor) : tensor;
}

DeltaRuleInput with_rows(const DeltaRuleInput& in) {
  DeltaRuleInput rows = in;
  for (Tensor* tensor : {&rows.q, &rows.k, &rows.v, &rows.erase_key}) *tensor = with_rows(*tensor);
  if (in.g.defined() && in.g.dim() == 4) rows.g = with_rows(in.g);
  return rows;
}

// Whether a call computes steps as tokens: the kernels of a GPU take one step per token.
bool spreads_steps(const DeltaRuleInput& in) { return in.q.is_cuda() && steps_per_token(in) > 1; }

// Returns the rows of one step of every token, [B, T, …], of a tensor [B, T·n, …].
Tensor rows_of_step(const Tensor& tensor, std::int64_t n, std::int64_t step) {
  return tensor.unflatten(1, {tensor.size(1) / n, n}).select(2, step);
}

// Returns [B, T·n, …] with the rows of a tensor [B, T, …] at one step of every token and zeros elsewhere.
Tensor spread(const Tensor& tensor, std::int64_t n, std::int64_t step) {
  if (!tensor.defined()) return {};
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes[1] *= n;
  Tensor rows = at::zeros(sizes, tensor.options());
  rows_of_step(rows, n, step).copy_(tensor);
  return rows;
}

// Returns the same problem with a token per step: the first step of a token has its decay, the last one its query.
DeltaRuleInput with_token_per_step(const DeltaRuleInput& in) {
  const std::int64_t n = steps_per_token(in);
  DeltaRuleInput tokens = in;
  tokens.q = spread(in.q, n, n - 1);
  tokens.g = spread(in.g, n, 0);
  return tokens;
}

}  // namespace

at::TensorOptions state_options(const DeltaRuleInput& in) {
  return in.q.options().dtype(in.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

Tensor empty_state(const DeltaRuleInput& in) {
  return at::empty_symint({sequences(in), in.v.sym_size(2), in.q.sym_size(3), in.v.sym_size(3)}, state_options(in));
}

std::int64_t steps_per_token(const DeltaRuleInput& in) {
  const std::int64_t tokens = in.q.size(1), steps = in.k.size(1);
  return tokens > 0 && steps > tokens && steps % tokens == 0 && in.v.size(1) == steps ? steps / tokens : 1;
}

DeltaShape shape_of(const DeltaRuleInput& in) {
  return {in.q.size(0),
          in.q.size(1) * steps_per_token(in),
          in.q.size(2),
          in.v.size(2),
          in.q.size(3),
          in.v.size(3),
          is_packed(in) ? std::max<std::int64_t>(in.cu_seqlens.size(0) - 1, 1) : 0};
}

Tensor empty_output(const DeltaRuleInput& in) {
  return at::empty_symint({in.v.sym_size(0), in.q.sym_size(1), in.v.sym_size(2), in.v.sym_size(3)}, in.v.options());
}

void check(const DeltaRuleInput& in) {
  if (!in.q.defined()) throw Error(kDeltaRule, "q", "an undefined tensor", "a tensor [B, T, H, K]");
  with_element_type(kDeltaRule, in.q, [](auto) {});  // throws for other types
  const auto dtype = in.q.scalar_type();
  const auto state = c10::typeMetaToScalarType(state_options(in).dtype());
  const auto check_one = [&](const char* name, const Tensor& tensor, at::ScalarType type, std::int64_t rank,
                             const char* axes) {
    check_tensor(kDeltaRule, name, tensor, type, rank, axes, in.q.device());
  };
  check_one("q", in.q, dtype, 4, "[B, T, H, K]");
  check_one("k", in.k, dtype, 4, "[B, T, H, K]");
  check_one("v", in.v, dtype, 4, "[B, T, HV, V]");
  check_one("beta", in.beta, dtype, 3, "[B, T, HV]");
  if (in.erase_key.defined()) check_one("erase_key", in.erase_key, dtype, 4, "[B, T, H, K]");
  if (in.g.defined()) check_one("g", in.g, state, in.g.dim() == 3 ? 3 : 4, "[B, T, HV] or [B, T, HV, K]");
  if (in.initial_state.defined()) {
    check_one("initial_state", in.initial_state, state, 4, "[N, HV, K, V]");
    if (in.initial_state.numel() == 0) {  // its view would count as none
      const std::int64_t n = is_packed(in) ? in.cu_seqlens.numel() - 1 : in.q.size(0);
      check_shape(kDeltaRule, "initial_state", in.initial_state, {n, in.v.size(2), in.q.size(3), in.v.size(3)});
    }
  }
  if (is_packed(in)) {
    check_one("cu_seqlens", in.cu_seqlens, at::kLong, 1, "[N + 1]");
    if (in.cu_seqlens.size(0) == 0) throw Error(kDeltaRule, "cu_seqlens", "shape [0]", "shape [N + 1]");
  }
}

SavedStates saved_states(const DeltaRuleInput& in, const DeltaRule& rule, const std::string& implementation) {
  SavedStates saved;
  const auto has_sizes = [](const Tensor& t) {
    return t.defined() && t.dim() == 4 && c10::asIntArrayRefSlowOpt(t.sym_sizes());
  };
  const bool known = has_sizes(in.q) && has_sizes(in.k) && has_sizes(in.v) &&
                     (!is_packed(in) || in.cu_seqlens.dim() == 1);  // check() refuses another one
  if (!known || in.q.is_meta()) return saved;
  with_element_type(kDeltaRule, in.q, [&]<class T>(T) {
    DeltaRule full = rule;
    full.decay = decay_of(in.g, 3);
    full.two_keys = in.erase_key.defined();
    saved = choose_saved_states<T>(shape_of(in), full, {implementation, libtorch::context_of(in.q)});
  });
  return saved;
}

Tensor empty_chunk_states(const DeltaRuleInput& in, const SavedStates& saved) {
  const c10::SymInt tokens = in.v.sym_size(1);  // as DeltaShape::chunks
  const c10::SymInt chunks =
      is_packed(in) ? tokens / saved.interval + sequences(in) : (tokens + (saved.interval - 1)) / saved.interval;
  return at::empty_symint({in.q.sym_size(0), chunks, in.v.sym_size(2), in.q.sym_size(3), in.v.sym_size(3)},
                          state_options(in));
}

void run_forward(const DeltaRuleInput& given, const DeltaRuleSettings& settings, const ForwardTensors& out) {
  if (spreads_steps(given)) {
    const std::int64_t n = steps_per_token(given);
    const Tensor o = at::empty(given.v.sizes(), given.v.options());
    run_forward(with_token_per_step(given), settings, {o, out.final_state, out.chunk_states});
    Tensor(out.o).copy_(rows_of_step(o, n, n - 1));
    return;
  }
  const DeltaRuleInput in = with_rows(given);
  with_element_type(kDeltaRule, in.q, [&]<class T>(T) {
    DeltaForward<T> problem;
    fill<T>(problem, in, settings);
    problem.initial_state = view_of<const State<T>, 4>(in.initial_state);
    problem.o = view_of<T, 4>(out.o);
    problem.final_state = view_of<State<T>, 4>(out.final_state);
    problem.chunk_states = view_of<State<T>, 5>(out.chunk_states);
    delta_forward(problem, {settings.implementation, libtorch::context_of(in.q)});
  });
}

void run_backward(const DeltaRuleInput& given, const DeltaRuleSettings& settings, const Tensor& chunk_states,
                  const Tensor& dout, const Tensor& dfinal_state, const DeltaRuleGradients& gradients) {
  if (spreads_steps(given)) {
    const std::int64_t n = steps_per_token(given);
    const DeltaRuleInput tokens = with_token_per_step(given);
    DeltaRuleGradients all = gradients;
    all.q = at::empty_like(tokens.q);
    if (tokens.g.defined()) all.g = at::empty_like(tokens.g);
    run_backward(tokens, settings, chunk_states, spread(dout, n, n - 1), dfinal_state, all);
    Tensor(gradients.q).copy_(rows_of_step(all.q, n, n - 1));
    if (all.g.defined()) Tensor(gradients.g).copy_(rows_of_step(all.g, n, 0));
    return;
  }
  const DeltaRuleInput in = with_rows(given);
  const auto state_type = c10::typeMetaToScalarType(state_options(in).dtype());
  check_tensor(kDeltaRule, "chunk_states", chunk_states, state_type, 5, "[B, NC, HV, K, V]", in.q.device());
  check_tensor(kDeltaRule, "dout", dout, in.q.scalar_type(), 4, "[B, T, HV, V]", in.q.device());
  if (dfinal_state.defined()) {
    check_tensor(kDeltaRule, "dfinal_state", dfinal_state, state_type, 4, "[N, HV, K, V]", in.q.device());
  }
  const Tensor do_rows = with_rows(dout);
  with_element_type(kDeltaRule, in.q, [&]<class T>(T) {
    DeltaBackward<T> problem;
    fill<T>(problem, in, settings);
    problem.chunk_states = view_of<const State<T>, 5>(chunk_states);
    problem.dout = view_of<const T, 4>(do_rows);
    problem.dfinal_state = view_of<const State<T>, 4>(dfinal_state);
    problem.dq = view_of<T, 4>(gradients.q);
    problem.dk = view_of<T, 4>(gradients.k);
    problem.dv = view_of<T, 4>(gradients.v);
    problem.dbeta = view_of<T, 3>(gradients.beta);
    problem.dg = view_of_gate<State<T>, 4>(gradients.g);
    problem.dinitial_state = view_of<State<T>, 4>(gradients.initial_state);
    problem.derase_key = view_of<T, 4>(gradients.erase_key);
    // On a CPU the row "recurrent" of the backward is the slow reference. All rows compute the same gradients, so
    // "recurrent" stands for "auto".
    const std::string_view named = settings.implementation;
    delta_backward(problem, {named == "recurrent" ? "auto" : named, libtorch::context_of(in.q)});
  });
}

}  // namespace efla::autograd
