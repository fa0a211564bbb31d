// The operator's SIMD kernels; Google Highway selects the target at run time. Problems must be valid (rule/validate.h).
// T is float or bfloat16; arithmetic and states are float32. The kernels that use AMX are in amx/amx.h. The bits of the
// outputs do not depend on the number of threads. A function …_workspace_bytes returns the bytes of workspace that its
// kernel needs with `threads` threads in the pool.
#pragma once

#include <cstddef>

#include "efla/base/threads.h"
#include "efla/cpu/common/workspace.h"
#include "efla/rule/problem.h"

namespace efla::cpu {

// The kernels for rules with one key and for rules with two keys. The functions below choose between them.
#define EFLA_DECLARE(keys)                                                                                \
  namespace keys {                                                                                        \
  template <class T>                                                                                      \
  void chunk_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);                  \
  std::size_t chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);     \
  template <class T>                                                                                      \
  void chunk_bwd(const DeltaBackward<T>& problem, Workspace workspace, ThreadPool& pool);                 \
  std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);     \
  template <class T>                                                                                      \
  void recurrent_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);              \
  std::size_t recurrent_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads); \
  template <class T, class S>                                                                             \
  void step(const DeltaStep<T, S>& problem, Workspace workspace, ThreadPool& pool);                       \
  std::size_t step_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);          \
  }
EFLA_DECLARE(one_key)
EFLA_DECLARE(two_keys)
#undef EFLA_DECLARE

// Computes chunks of kChunk tokens (EFLA, equations 21 to 32). With L = stril(E Kᵀ) and P = tril(Q Kᵀ), where E has the
// erase keys, which are K in a rule with one key:
//
//   (I + diag(a) L) U = diag(b) V − diag(a) E S,    O = scale (Q S + P U),    S ← S + Kᵀ U
//
// W and the inverse of the paper are never formed, because U comes from forward substitution. With a decay, the E and Q
// that multiply S contain the decays from the chunk's start, the K of Kᵀ U contains the decays to the chunk's end, and
// each element of L and P contains the decays between its two tokens (decay-inl.h).
template <class T>
void chunk_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool) {
  problem.rule.two_keys ? two_keys::chunk_fwd(problem, workspace, pool) : one_key::chunk_fwd(problem, workspace, pool);
}
inline std::size_t chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return rule.two_keys ? two_keys::chunk_fwd_workspace_bytes(shape, rule, threads)
                       : one_key::chunk_fwd_workspace_bytes(shape, rule, threads);
}

// Computes the gradients, last chunk first, from the state saved before each chunk (docs/equations.md).
template <class T>
void chunk_bwd(const DeltaBackward<T>& problem, Workspace workspace, ThreadPool& pool) {
  problem.rule.two_keys ? two_keys::chunk_bwd(problem, workspace, pool) : one_key::chunk_bwd(problem, workspace, pool);
}
inline std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return rule.two_keys ? two_keys::chunk_bwd_workspace_bytes(shape, rule, threads)
                       : one_key::chunk_bwd_workspace_bytes(shape, rule, threads);
}

// Computes the token recurrence (equation 20). chunk_bwd computes its gradients.
template <class T>
void recurrent_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool) {
  problem.rule.two_keys ? two_keys::recurrent_fwd(problem, workspace, pool)
                        : one_key::recurrent_fwd(problem, workspace, pool);
}
inline std::size_t recurrent_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return rule.two_keys ? two_keys::recurrent_fwd_workspace_bytes(shape, rule, threads)
                       : one_key::recurrent_fwd_workspace_bytes(shape, rule, threads);
}

// Computes a decode step in two passes over each state (docs/ops/delta_rule_step.md). S, the type of the states, is
// float or bfloat16.
template <class T, class S>
void step(const DeltaStep<T, S>& problem, Workspace workspace, ThreadPool& pool) {
  problem.rule.two_keys ? two_keys::step(problem, workspace, pool) : one_key::step(problem, workspace, pool);
}
inline std::size_t step_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return rule.two_keys ? two_keys::step_workspace_bytes(shape, rule, threads)
                       : one_key::step_workspace_bytes(shape, rule, threads);
}

}  // namespace efla::cpu
