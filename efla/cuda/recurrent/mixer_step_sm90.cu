// A mixer's part of a decode step, bound by reading and writing the states: a thread block per text and query head,
// which computes the head's value heads one after the other (mixer_step.cuh). The first thread blocks fetch their
// states while the second ones' come to the L2 cache, and so on.
#include <string>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/prefetch.cuh"
#include "efla/cuda/recurrent/mixer_step.cuh"
#include "efla/cuda/recurrent/mixer_step.h"

namespace efla::gpu {
namespace {

constexpr int kBlocks = 2;  // per multiprocessor
constexpr int kStateBytes = kStatePieces * kStateThreads * 16;

// Brings the first state of thread block `block` to the L2 cache.
__device__ __forceinline__ void prefetch_state(const MixerStep& p, int group, int block) {
  const int heads = static_cast<int>(p.shape.heads), i_b = block / heads, thread = static_cast<int>(threadIdx.x);
  if (i_b >= p.shape.batch || thread >= p.shape.key_dim) return;
  const std::int64_t slot = p.slots ? p.slots(i_b) : i_b;
  if (slot < 0) return;
  prefetch_bulk(p.states.at(slot, block % heads * group, thread),
                static_cast<int>(p.shape.value_dim) * static_cast<int>(sizeof(float)));
}

// together: thread blocks that run at once.
template <int kTaps>
__global__ void __launch_bounds__(kStateThreads, kTaps == kFewTaps ? kBlocks : 1)
    mixer_step_kernel(const __grid_constant__ MixerStep p, int group, float scale, int together) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ __align__(16) MixerScratch scratch;
  uint4* const own = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  const int block = static_cast<int>(blockIdx.x), heads = static_cast<int>(p.shape.heads), i_q = block % heads;
  const int i_b = block / heads, value_dim = static_cast<int>(p.shape.value_dim);
  const std::int64_t slot = p.slots ? p.slots(i_b) : i_b;
  if (block < together) prefetch_state(p, group, block);
  if (slot >= 0) prefetch_channels(p, slot, i_q * group, i_q);
  let_next_kernel_begin();
  wait_for_kernels();
  if (slot < 0) {
    for (int c = threadIdx.x; c < group * value_dim; c += kStateThreads) p.o(i_b, i_q * group * value_dim + c) = 0;
    return;
  }
  for (int h = i_q * group; h < (i_q + 1) * group; ++h) {
    fetch_state(p, slot, h, own);
    copy_async_commit();
    if (h == i_q * group) prefetch_state(p, group, block + together);
    compute_head<0, kTaps>(p, i_b, slot, h, i_q, h == i_q * group, scale, own, scratch);
    __syncthreads();
  }
}

}  // namespace

void mixer_step(const MixerStep& p, cudaStream_t stream) {
  const auto kernel = p.taps.extent[1] <= kFewTaps ? mixer_step_kernel<kFewTaps> : mixer_step_kernel<kMaxConvWidth>;
  reserve_shared_memory(kernel, kStateBytes);
  launch_early("mixer_step", kernel, grid_of("mixer_step", p.shape.batch * p.shape.heads), kStateThreads, kStateBytes,
               stream, p, static_cast<int>(p.shape.group()), static_cast<float>(p.rule.scale_for(p.shape.key_dim)),
               kBlocks * multiprocessors());
}

std::string mixer_step_refusal(const MixerStep& p) {
  if (!is_hopper()) return "it needs a Hopper GPU";
  if (p.shape.key_dim > kStateKeys || p.shape.value_dim > kStateColumns) {
    return "it takes heads of at most " + std::to_string(kStateKeys) + " keys and " + std::to_string(kStateColumns) +
           " values";
  }
  return has_aligned_rows(p.states) ? "" : "it needs states whose rows are pieces of 16 bytes";
}

}  // namespace efla::gpu
