// The rows of efla/cuda for the delta rule: what they refuse, and how they run. Included only if the build has these
// kernels. A function refuse_… returns why its row does not take a problem, as a sentence, or "". `named` says that the
// caller named the algorithm or the row; speed and small losses of accuracy are then no reasons to refuse. A function
// run_… enqueues the kernels on the context's stream.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/delta.h"
#include "efla/ops/cuda_call.h"
#include "efla/rule/micro_steps.h"

namespace efla {

// Returns the answer of a kernel's refusal function as a sentence, or "".
inline std::string sentence_of(const std::string& refusal) {
  return refusal.empty() ? "" : "it does not take " + refusal;
}

// What no kernel takes. efla/autograd computes steps as tokens on a GPU.
inline constexpr const char* kMicroSteps = "several steps per token";

// Returns why "auto" does not take chunks of float32 inputs, or "". With keys of one or two dimensions the sums between
// chunks may cancel (docs/numerics.md), and callers expect the accuracy of the recurrence.
template <class T>
std::string refuse_cancelling(const DeltaShape& shape, bool named) {
  if (named || !std::is_same_v<T, float> || shape.key_dim > 2) return "";
  return "chunk is less exact for keys of one or two dimensions";
}

// Return what the chunk kernels for T (float, bfloat16 or float16) do not take of a problem, or "".
template <class T>
std::string chunk_refusal(const DeltaForward<T>& p) {
  if (steps_per_token(p) > 1) return kMicroSteps;
  if constexpr (std::is_same_v<T, float>) {
    return gpu::chunk_float32_fwd_refusal(p);
  } else {
    return gpu::chunk_fwd_refusal(p);
  }
}
template <class T>
std::string chunk_refusal(const DeltaBackward<T>& p) {
  if (steps_per_token(p) > 1) return kMicroSteps;
  if constexpr (std::is_same_v<T, float>) {
    return gpu::chunk_float32_bwd_refusal(p);
  } else {
    return gpu::chunk_bwd_refusal(p);
  }
}

inline constexpr const char* kCudaTypes = "it takes float32, bfloat16 and float16";

// For fewer tokens per sequence than kFewestChunkTokens "auto" does not take the chunk kernels.
template <class T>
std::string refuse_cuda_chunk_forward(const DeltaForward<T>& p, bool named) {
  if constexpr (std::is_same_v<T, double>) {
    return kCudaTypes;
  } else {
    const std::string refusal = chunk_refusal(p);
    const std::int64_t tokens = p.shape.tokens / std::max<std::int64_t>(p.shape.packed, 1);
    if (!refusal.empty()) return sentence_of(refusal);
    if (named || tokens >= gpu::kFewestChunkTokens<T>) return refuse_cancelling<T>(p.shape, named);
    return "recurrent is faster for " + std::to_string(tokens) + " tokens per sequence";
  }
}

template <class T>
void run_cuda_chunk_forward(const DeltaForward<T>& p, const ExecutionContext& context) {
  if constexpr (std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>) {
    call_on_gpu(context, gpu::chunk_fwd_workspace_bytes(p.shape, p.rule),
                [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::chunk_fwd(p, workspace, stream); });
  } else if constexpr (std::is_same_v<T, float>) {
    call_on_gpu(
        context, gpu::chunk_float32_fwd_workspace_bytes(p.shape, p.rule),
        [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::chunk_float32_fwd(p, workspace, stream); });
  }
}

template <class T>
std::string refuse_cuda_chunk_backward(const DeltaBackward<T>& p, bool named) {
  if constexpr (std::is_same_v<T, double>) {
    return kCudaTypes;
  } else {
    const std::string refusal = chunk_refusal(p);
    return refusal.empty() ? refuse_cancelling<T>(p.shape, named) : sentence_of(refusal);
  }
}

template <class T>
void run_cuda_chunk_backward(const DeltaBackward<T>& p, const ExecutionContext& context) {
  if constexpr (std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>) {
    call_on_gpu(context, gpu::chunk_bwd_workspace_bytes(p),
                [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::chunk_bwd(p, workspace, stream); });
  } else if constexpr (std::is_same_v<T, float>) {
    call_on_gpu(
        context, gpu::chunk_float32_bwd_workspace_bytes(p.shape, p.rule),
        [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::chunk_float32_bwd(p, workspace, stream); });
  }
}

// Returns why no kernel of the token recurrence takes a problem, as a sentence, or "".
template <class T>
std::string refuse_cuda_recurrence(const DeltaShape& shape, std::int64_t steps_per_token) {
  if (std::is_same_v<T, double>) return kCudaTypes;
  if (steps_per_token > 1) return sentence_of(kMicroSteps);
  if (shape.key_dim <= gpu::kMaxKeyDim) return "";
  return sentence_of("keys of more than " + std::to_string(gpu::kMaxKeyDim) + " dimensions");
}

template <class T>
std::string refuse_cuda_recurrent_forward(const DeltaForward<T>& p, bool) {
  return refuse_cuda_recurrence<T>(p.shape, steps_per_token(p));
}

template <class T>
void run_cuda_recurrent_forward(const DeltaForward<T>& p, const ExecutionContext& context) {
  if constexpr (!std::is_same_v<T, double>) {
    call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::recurrent_fwd(p, stream); });
  }
}

template <class T>
std::string refuse_cuda_recurrent_backward(const DeltaBackward<T>& p, bool) {
  const std::string reason = refuse_cuda_recurrence<T>(p.shape, steps_per_token(p));
  if (!reason.empty() || p.saved.interval <= gpu::kRecurrentInterval) return reason;
  return "it needs a state per " + std::to_string(gpu::kRecurrentInterval) + " tokens or fewer";
}

template <class T>
void run_cuda_recurrent_backward(const DeltaBackward<T>& p, const ExecutionContext& context) {
  if constexpr (!std::is_same_v<T, double>) {
    call_on_gpu(
        context, gpu::recurrent_bwd_workspace_bytes(p.shape, p.rule),
        [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::recurrent_bwd(p, workspace, stream); });
  }
}

// Returns why no decode kernel takes a problem, as a sentence, or "". Problem is DeltaStep or DeltaSteps.
template <class T, class S, template <class, class> class Problem>
std::string refuse_cuda_step(const Problem<T, S>& p, bool) {
  std::int64_t steps = 1;
  if constexpr (std::is_same_v<Problem<T, S>, DeltaSteps<T, S>>) steps = steps_per_token(p);
  return refuse_cuda_recurrence<T>(p.shape, steps);
}

template <class T, class S, template <class, class> class Problem>
void run_cuda_step(const Problem<T, S>& p, const ExecutionContext& context) {
  if constexpr (!std::is_same_v<T, double>) {
    call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::step_fwd(p, stream); });
  }
}

}  // namespace efla
