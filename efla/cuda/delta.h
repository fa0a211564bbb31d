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

#include "efla/rule/problem.h"

namespace efla::gpu {

// Memory of the device, aligned to 256 bytes, that no other work may use until the call's kernels have ended.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// The token recurrence in float32: any sizes with K up to kMaxKeyDim, any strides, every step size and decay, and
// states at chunk boundaries. Exact and strictly causal, and slow for long sequences. T is float or bfloat16.
template <class T>
void recurrent_fwd(const DeltaForward<T>& problem, cudaStream_t stream);

inline constexpr std::int64_t kMaxKeyDim = 256;

}  // namespace efla::gpu
