// The operator on NVIDIA GPUs, free of torch. Problems are the structs of rule/problem.h with pointers into the memory
// of the current device (cu_seqlens too); the host reads none of them.
//
// Every function enqueues kernels on the stream that it is given and returns without waiting: it allocates nothing, so
// it may be captured in a CUDA graph. Results have the same bits in every run. What the kernels need beside the problem
// is in a workspace of the caller, whose contents before a call do not matter. Throws CudaError where a launch fails,
// and Error for a problem that the algorithm refuses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "efla/rule/problem.h"

namespace efla::gpu {

// Memory of the device, aligned to 256 bytes, that no other work may use until the call's kernels have ended.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// The token recurrence in float32: any sizes with K up to kMaxKeyDim, any strides, every step size and decay, and
// states at chunk boundaries. Exact and strictly causal, and slow for long sequences. T is float, bfloat16 or float16.
template <class T>
void recurrent_fwd(const DeltaForward<T>& problem, cudaStream_t stream);

inline constexpr std::int64_t kMaxKeyDim = 256;

// The gradients of the token recurrence in float32, for the same problems, from the states that the forward saved every
// kRecurrentInterval tokens or fewer. Where more than one value head or slice of value columns adds to a gradient, they
// are added in a fixed order. T is float, bfloat16 or float16.
template <class T>
void recurrent_bwd(const DeltaBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that recurrent_bwd needs.
std::size_t recurrent_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule);

inline constexpr std::int64_t kRecurrentInterval = 32;

// Decode steps. Every state is read once and written once. Several tokens in one call give the same bits as one call
// per token. Any sizes with K up to
// kMaxKeyDim and any strides; fastest where rows [V] of the states can be read in pieces of 16 bytes. T is float,
// bfloat16 or float16, S float or bfloat16.
template <class T, class S>
void step_fwd(const DeltaSteps<T, S>& problem, cudaStream_t stream);

// One token per batch entry.
template <class T, class S>
void step_fwd(const DeltaStep<T, S>& problem, cudaStream_t stream);

// Which kernels compute the chunkwise form: `automatic` chooses by shapes and GPU, the others are for tests and
// measurements. K above 128 has `sweep` alone.
enum class ChunkKernel {
  automatic,
  portable,  // prepare, then a sweep with mma.sync
  sweep,     // Hopper: prepare, then a sweep with wgmma
  fused      // Hopper: one kernel; of the forward alone, and `sweep` where every key channel has a gate
};

// The chunkwise form (EFLA paper, equations 21 to 32; Gated DeltaNet with a decay) on the tensor cores: products of E,
// bfloat16 or float16, summed in float32, the state in float32. K up to kChunkMaxKeyDim; above 128 on a Hopper GPU
// alone, without a gate per key channel, in rows of whole pieces of 16 bytes. With float16 a factor of a product that
// exceeds 65504 becomes infinite (docs/numerics.md). A non-finite token reaches its own chunk of 64 tokens and what
// comes after, never an earlier chunk nor another sequence. States are saved every saved.interval tokens, a multiple of
// 64.
template <class E>
void chunk_fwd(const DeltaForward<E>& problem, const Workspace& workspace, cudaStream_t stream,
               ChunkKernel kernel = ChunkKernel::automatic);

// Returns the bytes of workspace that chunk_fwd needs.
std::size_t chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule);

// Returns what of the problem chunk_fwd does not take, or "" where it takes the problem.
template <class E>
std::string chunk_fwd_refusal(const DeltaForward<E>& problem);

inline constexpr std::int64_t kChunkMaxKeyDim = 256;

// The gradients of the chunkwise form, for the same problems as chunk_fwd, from states that the forward saved at chunk
// boundaries: every saved.interval tokens, a multiple of 64. The states of the chunks between are computed again, so
// that a longer interval saves memory; the chunks of one interval are computed in order, the intervals
// of a sequence in parallel. A non-finite token reaches its own chunk beside what it reaches in the recurrence, never
// another sequence (docs/numerics.md).
template <class E>
void chunk_bwd(const DeltaBackward<E>& problem, const Workspace& workspace, cudaStream_t stream,
               ChunkKernel kernel = ChunkKernel::automatic);

// Return the bytes of workspace that chunk_bwd needs: for rows of whole pieces of 16 bytes, and for any problem. With K
// above 128 other rows are copied first.
std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule);
template <class E>
std::size_t chunk_bwd_workspace_bytes(const DeltaBackward<E>& problem);

// Returns what of the problem chunk_bwd does not take, or "" where it takes the problem.
template <class E>
std::string chunk_bwd_refusal(const DeltaBackward<E>& problem);

// The chunkwise form with every operand in float32, and products in TF32 of two parts per operand, which have nearly
// float32's accuracy: chunks of 32 tokens, no decay or one per head, K up to kFloat32MaxKeyDim, but up to 64 where a
// thread block cannot have 120 KB of shared memory. A non-finite token reaches its own chunk and what comes after.
// States are saved every saved.interval tokens, a multiple of 32.
void chunk_float32_fwd(const DeltaForward<float>& problem, const Workspace& workspace, cudaStream_t stream);

inline constexpr std::int64_t kFloat32MaxKeyDim = 128;

// The gradients, from states that the forward saved at chunk boundaries, as chunk_bwd computes them.
void chunk_float32_bwd(const DeltaBackward<float>& problem, const Workspace& workspace, cudaStream_t stream);

// Return the bytes of workspace that they need.
std::size_t chunk_float32_fwd_workspace_bytes(const DeltaShape& shape);
std::size_t chunk_float32_bwd_workspace_bytes(const DeltaShape& shape);

// Return what of a problem they do not take, or "" where they take the problem.
std::string chunk_float32_fwd_refusal(const DeltaForward<float>& problem);
std::string chunk_float32_bwd_refusal(const DeltaBackward<float>& problem);

}  // namespace efla::gpu
