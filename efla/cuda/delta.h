// The delta rule on NVIDIA GPUs, without LibTorch. rule/problem.h has the problems with their shapes, types and
// equations. Their pointers, cu_seqlens too, point into the memory of the current device, and the host reads none of
// this memory.
//
// Every function enqueues kernels on its stream and returns without waiting. It allocates nothing, so it may be
// captured in a CUDA graph. Results have the same bits in every run. What the kernels need besides the problem is in a
// workspace of the caller, whose contents before a call do not matter. Functions throw CudaError where a launch fails,
// and Error for a problem that the algorithm does not take or a workspace that is too small.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "efla/cuda/common/workspace.h"
#include "efla/rule/problem.h"

namespace efla::gpu {

// Computes the forward by the token recurrence in float32: any sizes with K up to kMaxKeyDim, any strides, every step
// size and decay, with saved states. It is strictly causal, and slow for long sequences. T is float, bfloat16 or
// float16.
template <class T>
void recurrent_fwd(const DeltaForward<T>& problem, cudaStream_t stream);

inline constexpr std::int64_t kMaxKeyDim = 256;

// Computes the gradients of the token recurrence in float32 (docs/ops/delta_rule.md), for the same problems. The
// forward has saved states every saved.interval tokens, at most kRecurrentInterval. If several value heads or slices of
// value columns add to a gradient, they are added in a fixed order. T is float, bfloat16 or float16.
template <class T>
void recurrent_bwd(const DeltaBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that recurrent_bwd needs.
std::size_t recurrent_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule);

inline constexpr std::int64_t kRecurrentInterval = 32;

// Computes decode steps of 1 to kMaxStepTokens tokens (docs/ops/delta_rule_step.md) and updates the states. Every state
// is read once and written once. Several tokens in one call give the same bits as one call per token. Takes any sizes
// with K up to kMaxKeyDim and any strides; fastest if rows [V] of the states can be read in pieces of 16 bytes. T is
// float, bfloat16 or float16, S float or bfloat16.
template <class T, class S>
void step_fwd(const DeltaSteps<T, S>& problem, cudaStream_t stream);

// Computes a decode step of one token per batch entry, as above.
template <class T, class S>
void step_fwd(const DeltaStep<T, S>& problem, cudaStream_t stream);

// The kernels of the chunk algorithm. `automatic` chooses by sizes and GPU. The other values are for tests and
// measurements. For K above 128 the kernels are always `sweep`.
enum class ChunkKernel {
  automatic,
  portable,  // prepare, then a sweep with mma.sync
  sweep,     // Hopper: prepare, then a sweep with wgmma
  fused      // Hopper: one kernel for the forward; as `sweep` in the backward and with a gate per key channel
};

// Computes the forward by the chunk algorithm (docs/equations.md; EFLA, equations 21 to 32) on the tensor cores:
// products of E, bfloat16 or float16, summed in float32, with the state in float32. K is up to kChunkMaxKeyDim. K above
// 128 needs a Hopper GPU, one key, no gate per key channel, K and V that are multiples of 8, and rows that can be read
// in pieces of 16 bytes. With float16 a factor of a product above 65504 becomes infinite (docs/numerics.md). A
// non-finite token affects its own chunk of 64 tokens and later tokens, never an earlier chunk or another sequence.
// States are saved every saved.interval tokens, a multiple of 64.
template <class E>
void chunk_fwd(const DeltaForward<E>& problem, const Workspace& workspace, cudaStream_t stream,
               ChunkKernel kernel = ChunkKernel::automatic);

// Returns the bytes of workspace that chunk_fwd needs.
std::size_t chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule);

// Returns what chunk_fwd does not take of a problem, or "".
template <class E>
std::string chunk_fwd_refusal(const DeltaForward<E>& problem);

inline constexpr std::int64_t kChunkMaxKeyDim = 256;

// Computes the gradients by the chunk algorithm (docs/equations.md, the backward), for the problems of chunk_fwd. A
// gate per key channel and two keys need a Hopper GPU. States are saved every saved.interval tokens, a multiple of 64.
// The states of the chunks between are computed again, so a longer interval saves memory; the chunks of an interval are
// computed in order, the intervals of a sequence at the same time. A non-finite token affects its own chunk besides
// what it affects in the recurrence, never another sequence (docs/numerics.md).
template <class E>
void chunk_bwd(const DeltaBackward<E>& problem, const Workspace& workspace, cudaStream_t stream,
               ChunkKernel kernel = ChunkKernel::automatic);

// Return the bytes of workspace that chunk_bwd needs: the first function if all rows can be read in pieces of 16 bytes,
// the second for any problem. If K is above 128, other rows are copied to the workspace first.
std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule);
template <class E>
std::size_t chunk_bwd_workspace_bytes(const DeltaBackward<E>& problem);

// Returns what chunk_bwd does not take of a problem, or "".
template <class E>
std::string chunk_bwd_refusal(const DeltaBackward<E>& problem);

// Computes the forward by the chunk algorithm with every operand in float32. Each operand of a product is the sum of
// two TF32 numbers, which has nearly the accuracy of float32 (docs/design/2026-11-cuda-float32.md). Chunks have 32
// tokens. Takes every kind of decay. K is up to kFloat32MaxKeyDim, or up to 64 if a thread block cannot have 120 KB of
// shared memory, or 150 KB with two keys or a decay per key channel. A non-finite token affects its own chunk and later
// tokens. States are saved every saved.interval tokens, a multiple of 32.
void chunk_float32_fwd(const DeltaForward<float>& problem, const Workspace& workspace, cudaStream_t stream);

inline constexpr std::int64_t kFloat32MaxKeyDim = 128;

// Computes the gradients for the problems of chunk_float32_fwd. The forward has saved states every saved.interval
// tokens, a multiple of 32.
void chunk_float32_bwd(const DeltaBackward<float>& problem, const Workspace& workspace, cudaStream_t stream);

// Return the bytes of workspace that chunk_float32_fwd and chunk_float32_bwd need.
std::size_t chunk_float32_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule);
std::size_t chunk_float32_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule);

// Return what chunk_float32_fwd and chunk_float32_bwd do not take of a problem, or "".
std::string chunk_float32_fwd_refusal(const DeltaForward<float>& problem);
std::string chunk_float32_bwd_refusal(const DeltaBackward<float>& problem);

}  // namespace efla::gpu
