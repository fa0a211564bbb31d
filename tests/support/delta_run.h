// Runs an implementation of the operator, by its name, on a case's tensors.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/cpu/common/target.h"
#include "efla/ops/delta.h"
#include "tests/support/delta_case.h"
#include "tests/support/delta_results.h"

namespace efla::test {

// Kernels run on one SIMD target while this lives, and on the best one again afterwards.
class OnTarget {
 public:
  explicit OnTarget(const std::string& name) { cpu::use_target(name); }
  ~OnTarget() { cpu::use_target(""); }
  OnTarget(const OnTarget&) = delete;
  OnTarget& operator=(const OnTarget&) = delete;
};

// Returns the rows of a list that compute on the CPU, without the reference.
inline std::vector<std::string> fast_rows(const std::vector<ImplementationName>& rows) {
  std::vector<std::string> names;
  for (const auto& row : rows) {
    if (row.device == Device::Kind::cpu && row.name != "ref") names.emplace_back(row.name);
  }
  return names;
}

// Returns false where AMX refuses what f computes; no other row may refuse a problem that it is tested on.
template <class F>
bool run_unless_refused(const std::string& implementation, F&& f) {
  try {
    f();
  } catch (const Error&) {
    if (implementation != "chunk_amx") throw;
    return false;
  }
  return true;
}

// Token t of a view over [B, T, …].
template <class T, int Rank>
View<T, Rank - 1> token_of(const View<T, Rank>& view, std::int64_t t) {
  if (!view) return {};
  View<T, Rank - 1> token{view.at(std::int64_t{0}, t), {view.extent[0]}, {view.stride[0]}};
  for (int d = 2; d < Rank; ++d) {
    token.extent[d - 1] = view.extent[d];
    token.stride[d - 1] = view.stride[d];
  }
  return token;
}

// The forward by decode steps, one for every token; `state` holds the state before them and then the one after.
template <class T, class S>
void run_steps(const DeltaForward<T>& p, const View<S, 4>& state, const RunOptions& options = {}) {
  DeltaShape one = p.shape;
  one.tokens = 1;
  for (std::int64_t t = 0; t < p.shape.tokens; ++t) {
    delta_step(DeltaStep<T, S>{one,
                               p.rule,
                               token_of(p.q, t),
                               token_of(p.k, t),
                               token_of(p.v, t),
                               token_of(p.beta, t),
                               token_of(p.g, t),
                               state,
                               token_of(p.o, t),
                               {},
                               token_of(p.erase_key, t)},
               options);
  }
}

// implementation: one of RunOptions' or "step", for decode steps.
template <class T>
void run_forward(const std::string& implementation, DeltaData<T>& data, ThreadPool& pool) {
  if (implementation != "step") {
    delta_forward(data.forward(), {implementation, {.pool = &pool}});
    return;
  }
  const std::array<std::int64_t, 4> extent{data.shape.batch, data.shape.value_heads, data.shape.key_dim,
                                           data.shape.value_dim};
  auto state = data.final_state;
  if (!state.view()) state = data.initial_state;
  if (!state.view()) {
    state = Tensor<State<T>, 4>(extent, Layout::contiguous);
  }
  state.assign(data.initial_state.view() ? data.initial_state.values() : std::vector<double>(state.view().size()));
  run_steps(data.forward(), state.view());
  if (data.final_state.view()) data.final_state = state;
}

template <class T>
void run_backward(const std::string& implementation, DeltaData<T>& data, ThreadPool& pool) {
  delta_backward(data.backward(), {implementation, {.pool = &pool}});
}

}  // namespace efla::test
