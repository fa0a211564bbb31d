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

// Computes chunks of kChunk tokens (EFLA, equations 21 to 32). With L = stril(K Kᵀ) and P = tril(Q Kᵀ):
//
//   (I + diag(a) L) U = diag(b) V − diag(a) K S,    O = scale (Q S + P U),    S ← S + Kᵀ U
//
// W and the inverse of the paper are never formed, because U comes from forward substitution. With a decay, the K and Q
// that multiply S contain the decays from the chunk's start, the K of Kᵀ U contains the decays to the chunk's end, and
// each element of L and P contains the decays between its two tokens (decay-inl.h).
template <class T>
void chunk_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// Computes the gradients, last chunk first, from the state saved before each chunk (docs/equations.md).
template <class T>
void chunk_bwd(const DeltaBackward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// Computes the token recurrence (equation 20). chunk_bwd computes its gradients.
template <class T>
void recurrent_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t recurrent_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// Computes a decode step in two passes over each state (docs/ops/delta_rule_step.md). S, the type of the states, is
// float or bfloat16.
template <class T, class S>
void step(const DeltaStep<T, S>& problem, Workspace workspace, ThreadPool& pool);
std::size_t step_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

}  // namespace efla::cpu
