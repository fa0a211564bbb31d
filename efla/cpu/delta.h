// The operator's SIMD kernels (run-time dispatch by Google Highway). Problems are taken as valid (rule/validate.h); T
// is float or bfloat16, arithmetic and states are float32, but for factors of products on a matrix unit (parts-inl.h).
// The bits of the outputs do not depend on the number of threads.
#pragma once

#include <cstddef>

#include "efla/base/threads.h"
#include "efla/cpu/workspace.h"
#include "efla/rule/problem.h"

namespace efla::cpu {

// The chunkwise form in chunks of kChunk tokens (EFLA paper, equations 21 to 32). With L = stril(K Kᵀ), P = tril(Q Kᵀ),
// (I + diag(a) L) U = diag(b) V − diag(a) K S, O = scale (Q S + P U), S ← S + Kᵀ U. W and the inverse are never formed:
// U comes from forward substitution. With a decay, K and Q beside S carry the decays from the chunk's start, K in Kᵀ U
// those to its end, and an element of L and P those between its two tokens (decay-inl.h).
template <class T>
void chunk_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// Whether chunk_fwd is the faster of the two forwards: for more than 256 key dimensions; with a matrix unit (AMX),
// which computes whole chunks, from 32 (bfloat16) or 160 (float32) on for multiples of 32, if chunks are filled: from
// 0.6 of their rows on, or 0.9.
//
// Microseconds a token and head by chunks and by the recurrence at T = 2048, two threads, medians: d = 64 0.43 and
// 0.35, 128 1.49 and 1.03, 256 4.0 and 4.2 (AVX2 on a Zen 3); 0.18 and 0.10, 0.46 and 0.37, 1.6 and 1.6, 2.5 and 2.5 at
// 320 (AVX-512 on a Xeon; these two not recorded). AMX there: bfloat16 0.03 and 0.035 (d = 32), 0.064 and 0.099, 0.19
// and 0.37, 0.7 and 1.5; float32 0.05 and 0.035, 0.12 and 0.098, 0.39 and 0.37, 1.35 and 1.53. Shorter sequences and
// other sizes are in docs/design/2026-11-recurrent-forward.md and docs/design/2026-11-matrix-unit.md.
template <class T>
bool chunk_fwd_is_faster(const DeltaForward<T>& problem);

// Gradients of the chunkwise form, last chunk first, from the state saved before each chunk (docs/equations.md).
template <class T>
void chunk_bwd(const DeltaBackward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// The token recurrence (equation 20) and its gradients.
template <class T>
void recurrent_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t recurrent_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);
template <class T>
void recurrent_bwd(const DeltaBackward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t recurrent_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// One decode step: the state is streamed through the core once.
template <class T, class S>
void step(const DeltaStep<T, S>& problem, Workspace workspace, ThreadPool& pool);
std::size_t step_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

}  // namespace efla::cpu
