#include "efla/ops/delta.h"

#include <algorithm>
#include <string>
#include <type_traits>

#include "efla/cpu/common/target.h"
#include "efla/cpu/delta/amx/amx.h"
#include "efla/cpu/delta/kernels.h"
#include "efla/ops/scratch.h"
#include "efla/ref/delta.h"
#include "efla/rule/micro_steps.h"
#include "efla/rule/validate.h"

#ifdef EFLA_HAS_CUDA
#include "efla/ops/delta_cuda.h"
#endif

namespace efla {
namespace {

constexpr auto kCpu = Device::Kind::cpu, kCuda = Device::Kind::cuda;
constexpr SavedStates kSavedOnCpu{};
// Each saved state is written by the forward and read by the backward, which computes the intervals of a sequence at
// the same time. For elements of 16 bits longer intervals than this one save little more, and leave too few of them
// where sequences and heads are few (docs/design/2026-11-cuda-backward.md).
template <class T>
constexpr SavedStates kSavedByCudaChunks{.interval = sizeof(T) == 2 ? 1024 : 256};

// Whether the SIMD kernels take elements of type T.
template <class T>
inline constexpr bool kCpuTakes = std::is_same_v<T, float> || std::is_same_v<T, bfloat16>;

// Returns why the SIMD kernels do not take elements of type T, or "". The functions below return refusals in the same
// way.
template <class T>
std::string refuse_type() {
  if (std::is_same_v<T, double>) return "it computes in float32; float64 inputs need ref";
  return kCpuTakes<T> ? "" : "it takes float32 and bfloat16";
}

std::string text_of(const SavedStates& saved) { return "a state per " + std::to_string(saved.interval) + " tokens"; }

// Refuses chunk states with another interval than the row's.
template <class Problem>
std::string refuse_saved(const Problem& p, const SavedStates& own) {
  if (p.saved == own || !p.chunk_states) return "";
  return "it saves " + text_of(own) + ", and the problem has " + text_of(p.saved);
}

// Refuses what no SIMD kernel for sequences takes.
template <class T, class Problem>
std::string refuse_simd(const Problem& p, bool) {
  const std::string reason = refuse_type<T>();
  return reason.empty() ? refuse_saved(p, kSavedOnCpu) : reason;
}

std::string dimensions(const DeltaShape& shape) { return "keys of " + std::to_string(shape.key_dim) + " dimensions"; }

// Refuses what neither AMX kernel takes.
template <class T, class Problem>
std::string refuse_amx(const Problem& p) {
  if (!cpu::uses_amx()) return "this processor has no AMX, or it is not in use";
  if (p.rule.two_keys) return "it does not take rules with two keys";
  if (steps_per_token(p) > 1) return "it takes one step per token";
  if (!cpu::amx_takes(p.shape)) return "AMX takes keys of a multiple of 32 dimensions";
  return refuse_simd<T>(p, true);
}

// "auto" takes AMX from 32 (bfloat16) or 160 (float32) key dimensions on, if most rows of the chunks hold tokens,
// because AMX computes all rows.
template <class T>
std::string refuse_amx_forward(const DeltaForward<T>& p, bool named) {
  constexpr std::int64_t kMinKeys = std::is_same_v<T, float> ? 160 : 32;
  constexpr double kFilled = std::is_same_v<T, float> ? 0.9 : 0.6;
  const std::string reason = refuse_amx<T>(p);
  if (!reason.empty() || named) return reason;
  if (p.shape.key_dim < kMinKeys) return "recurrent is faster for " + dimensions(p.shape);
  if (cpu::filled_rows(p.shape) < kFilled) {
    return "recurrent is faster for " + std::to_string(p.shape.tokens) + " tokens, which leave chunks unfilled";
  }
  return "";
}

// "auto" takes chunks without AMX for more than 256 key dimensions, unless AMX takes the shape: "auto" then refused AMX
// because of few tokens, and for these the recurrence is faster too.
template <class T>
std::string refuse_simd_chunk_forward(const DeltaForward<T>& p, bool named) {
  constexpr std::int64_t kMaxRecurrentKeys = 256;
  const std::string reason = refuse_simd<T>(p, named);
  if (!reason.empty() || named || (p.shape.key_dim > kMaxRecurrentKeys && !cpu::amx_takes(p.shape))) return reason;
  return "recurrent is faster for " + dimensions(p.shape) + " and " + std::to_string(p.shape.tokens) + " tokens";
}

// With keys of one or two dimensions the sums between chunks may cancel (docs/numerics.md).
template <class T>
bool chunks_may_cancel(const DeltaBackward<T>& p) {
  return p.shape.key_dim <= 2;
}

template <class T>
std::string refuse_chunk_backward(const DeltaBackward<T>& p, bool named) {
  if (!named && chunks_may_cancel(p)) return "chunk is less exact for keys of one or two dimensions";
  return refuse_simd<T>(p, named);
}

// "auto" takes the reference where the sums between chunks may cancel, because no other row computes the recurrence's
// gradients on a CPU.
template <class T>
std::string refuse_reference_backward(const DeltaBackward<T>& p, bool named) {
  return !std::is_same_v<T, double> && chunks_may_cancel(p) ? "" : refuse_unless_named(p, named);
}

// The AMX kernel divides gradients by the scale.
template <class T>
std::string refuse_amx_backward(const DeltaBackward<T>& p, bool named) {
  const std::string reason = refuse_amx<T>(p);
  if (!reason.empty()) return reason;
  if (!cpu::amx_takes_backward(p.shape, p.rule)) return "AMX takes a scale between 1e-20 and 1e20";
  return refuse_chunk_backward(p, named);
}

// Runs a kernel on the CPU with the scratch memory that it needs. The kernels exist for float32 and bfloat16.
#define EFLA_CPU_KERNEL(T, function)                                                                       \
  [](const auto& problem, [[maybe_unused]] const ExecutionContext& context) {                              \
    if constexpr (kCpuTakes<T>) {                                                                          \
      ThreadPool& pool = context.threads();                                                                \
      const Scratch scratch(cpu::function##_workspace_bytes(problem.shape, problem.rule, pool.threads())); \
      cpu::function(problem, scratch.workspace(), pool);                                                   \
    }                                                                                                      \
  }

template <class T, class Problem = DeltaForward<T>>
std::span<const Implementation<Problem>> forward_rows() {
  static const Implementation<Problem> rows[]{
      {"chunk_amx", "chunk", kCpu, refuse_amx_forward<T>, EFLA_CPU_KERNEL(T, amx_chunk_fwd)},
      {"chunk_simd", "chunk", kCpu, refuse_simd_chunk_forward<T>, EFLA_CPU_KERNEL(T, chunk_fwd)},
      {"recurrent_simd", "recurrent", kCpu, refuse_simd<T, Problem>, EFLA_CPU_KERNEL(T, recurrent_fwd)},
      {"chunk_cuda", "chunk", kCuda, EFLA_CUDA_ROW(refuse_cuda_chunk_forward<T>, run_cuda_chunk_forward<T>),
       kSavedByCudaChunks<T>},
      {"recurrent_cuda", "recurrent", kCuda,
       EFLA_CUDA_ROW(refuse_cuda_recurrent_forward<T>, run_cuda_recurrent_forward<T>)},
      {"ref", "ref", kCpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::recurrent_fwd(p); }},
  };
  return rows;
}

template <class T, class Problem = DeltaBackward<T>>
std::span<const Implementation<Problem>> backward_rows() {
  static const Implementation<Problem> rows[]{
      {"chunk_amx", "chunk", kCpu, refuse_amx_backward<T>, EFLA_CPU_KERNEL(T, amx_chunk_bwd)},
      {"chunk_simd", "chunk", kCpu, refuse_chunk_backward<T>, EFLA_CPU_KERNEL(T, chunk_bwd)},
      {"chunk_cuda", "chunk", kCuda, EFLA_CUDA_ROW(refuse_cuda_chunk_backward<T>, run_cuda_chunk_backward<T>)},
      {"recurrent_cuda", "recurrent", kCuda,
       EFLA_CUDA_ROW(refuse_cuda_recurrent_backward<T>, run_cuda_recurrent_backward<T>)},
      {"ref", "recurrent", kCpu, refuse_reference_backward<T>,
       [](const Problem& p, const ExecutionContext&) { ref::recurrent_bwd(p); }},
  };
  return rows;
}

template <class T, class S, class Problem = DeltaStep<T, S>>
std::span<const Implementation<Problem>> step_rows() {
  static const Implementation<Problem> rows[]{
      {"recurrent_simd", "recurrent", kCpu, [](const Problem&, bool) { return refuse_type<T>(); },
       EFLA_CPU_KERNEL(T, step)},
      {"recurrent_cuda", "recurrent", kCuda, EFLA_CUDA_ROW(refuse_cuda_step, run_cuda_step)},
      {"ref", "ref", kCpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::step(p); }},
  };
  return rows;
}

// Returns token t of a view over [B, T, …].
template <class T, int Rank>
View<T, Rank - 1> token_of(const View<T, Rank>& view, std::int64_t t) {
  View<T, Rank - 1> token;
  if (!view) return token;
  token.data = view.at(std::int64_t{0}, t);
  for (int d = 0; d < Rank - 1; ++d) {
    token.extent[d] = view.extent[d == 0 ? 0 : d + 1];
    token.stride[d] = view.stride[d == 0 ? 0 : d + 1];
  }
  return token;
}

// Calls f(x) with every element x of the state of a slot.
template <class S, class F>
void for_each_element(const View<S, 4>& states, std::int64_t slot, F&& f) {
  for (std::int64_t h = 0; h < states.extent[1]; ++h) {
    for (std::int64_t i = 0; i < states.extent[2]; ++i) {
      for (std::int64_t j = 0; j < states.extent[3]; ++j) f(states(slot, h, i, j));
    }
  }
}

// Calls f with every step of a problem as a problem of its own, and then rolls back the tokens that are not kept. All
// steps of a token write its output, of which that of the last step remains.
template <class T, class S, class F>
void for_each_token(const DeltaSteps<T, S>& p, F&& f) {
  const MicroSteps steps{steps_per_token(p)};
  DeltaShape one = p.shape;
  one.tokens = 1;
  DeltaRule without_decay = p.rule;
  without_decay.decay = Decay::none;
  const auto slot = [&](std::int64_t i_b) { return p.slots ? p.slots(i_b) : i_b; };
  // Per batch entry a copy of the state before the first token that is rolled back.
  std::vector<std::vector<S>> before(p.kept ? p.shape.batch : 0);
  for (std::int64_t t = 0; t < p.shape.tokens; ++t) {
    for (std::int64_t i_b = 0; i_b < std::ssize(before); ++i_b) {
      if (p.kept(i_b) * steps.n != t || slot(i_b) < 0) continue;
      for_each_element(p.states, slot(i_b), [&](const S& x) { before[i_b].push_back(x); });
    }
    const std::int64_t row = steps.token(t);
    const bool decays = steps.decays(t);
    f(DeltaStep<T, S>{one, decays ? p.rule : without_decay, token_of(p.q, row), token_of(p.k, t), token_of(p.v, t),
                      token_of(p.beta, t), decays ? token_of(p.g, row) : View<const State<T>, 3>{}, p.states,
                      token_of(p.o, row), p.slots, token_of(p.erase_key, t)});
  }
  for (std::int64_t i_b = 0; i_b < std::ssize(before); ++i_b) {
    auto next = before[i_b].begin();
    if (next != before[i_b].end()) for_each_element(p.states, slot(i_b), [&](S& x) { x = *next++; });
  }
}

template <class T, class S, class Problem = DeltaSteps<T, S>>
std::span<const Implementation<Problem>> steps_rows() {
  static const Implementation<Problem> rows[]{
      {"recurrent_simd", "recurrent", kCpu, [](const Problem&, bool) { return refuse_type<T>(); },
       [](const Problem& p, const ExecutionContext& context) {
         for_each_token(p, [&](const DeltaStep<T, S>& token) { EFLA_CPU_KERNEL(T, step)(token, context); });
       }},
      {"recurrent_cuda", "recurrent", kCuda, EFLA_CUDA_ROW(refuse_cuda_step, run_cuda_step)},
      {"ref", "ref", kCpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) {
         for_each_token(p, [](const DeltaStep<T, S>& token) { ref::step(token); });
       }},
  };
  return rows;
}

#undef EFLA_CPU_KERNEL

}  // namespace

template <class T>
Choice delta_forward(const DeltaForward<T>& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("delta_forward", forward_rows<T>(), problem, options);
}

template <class T>
Choice choose_delta_forward(const DeltaForward<T>& problem, const RunOptions& options) {
  validate("delta_forward", problem.shape, problem.rule);
  std::vector<Implementation<DeltaForward<T>>> rows;
  for (const auto& row : forward_rows<T>()) {
    if (row.saved.interval > 0) rows.push_back(row);
  }
  Choice choice;
  choose("delta_forward", rows, problem, options, choice);
  return choice;
}

template <class T>
SavedStates choose_saved_states(const DeltaShape& shape, const DeltaRule& rule, const RunOptions& options) {
  DeltaForward<T> forward;
  forward.shape = shape;
  forward.rule = rule;
  DeltaBackward<T> backward;
  backward.shape = shape;
  backward.rule = rule;
  const auto takes = [&](const auto& row, const auto& problem) {
    const auto reason = refusal_of(row, problem, options);
    return reason && reason->empty();
  };
  for (const auto& row : forward_rows<T>()) {
    if (row.saved.interval == 0 || !takes(row, forward)) continue;
    backward.saved = row.saved;
    const auto rows = backward_rows<T>();
    if (std::any_of(rows.begin(), rows.end(), [&](const auto& r) { return takes(r, backward); })) return row.saved;
  }
  // No pair of rows takes the problems. These calls throw the reasons.
  backward.saved = choose_delta_forward(forward, options).saved;
  Choice choice;
  choose("delta_backward", backward_rows<T>(), backward, options, choice);
  return backward.saved;
}

template <class T>
Choice delta_backward(const DeltaBackward<T>& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("delta_backward", backward_rows<T>(), problem, options);
}

template <class T, class S>
Choice delta_step(const DeltaStep<T, S>& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("delta_step", step_rows<T, S>(), problem, options);
}

template <class T, class S>
Choice delta_steps(const DeltaSteps<T, S>& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("delta_steps", steps_rows<T, S>(), problem, options);
}

#define EFLA_INSTANTIATE(T)                                                                            \
  template Choice delta_forward(const DeltaForward<T>&, const RunOptions&);                            \
  template Choice choose_delta_forward(const DeltaForward<T>&, const RunOptions&);                     \
  template SavedStates choose_saved_states<T>(const DeltaShape&, const DeltaRule&, const RunOptions&); \
  template Choice delta_backward(const DeltaBackward<T>&, const RunOptions&);                          \
  template Choice delta_step(const DeltaStep<T, State<T>>&, const RunOptions&);                        \
  template Choice delta_steps(const DeltaSteps<T, State<T>>&, const RunOptions&);
EFLA_INSTANTIATE(float)
EFLA_INSTANTIATE(bfloat16)
EFLA_INSTANTIATE(float16)
EFLA_INSTANTIATE(double)
#undef EFLA_INSTANTIATE
template Choice delta_step(const DeltaStep<float, bfloat16>&, const RunOptions&);
template Choice delta_step(const DeltaStep<bfloat16, bfloat16>&, const RunOptions&);
template Choice delta_step(const DeltaStep<float16, bfloat16>&, const RunOptions&);
template Choice delta_steps(const DeltaSteps<float, bfloat16>&, const RunOptions&);
template Choice delta_steps(const DeltaSteps<bfloat16, bfloat16>&, const RunOptions&);
template Choice delta_steps(const DeltaSteps<float16, bfloat16>&, const RunOptions&);

// Every element type has the same rows.
std::vector<ImplementationName> delta_forward_implementations() { return names_of(forward_rows<float>()); }
std::vector<ImplementationName> delta_step_implementations() { return names_of(step_rows<float, float>()); }

}  // namespace efla
