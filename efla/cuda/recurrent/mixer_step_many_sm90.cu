// The kernel of mixer_step for many heads (mixer_step.h). Its time is the reading and writing of the states.
// docs/design/2026-11-cuda-decode.md explains the choices.
//
// A thread block per text and query head computes the head's value heads one after another. Its threads copy the state
// to shared memory, and each thread reads only the pieces that it has copied: lane l of warp w has columns 4 l to 4 l +
// 3 of rows w, w + 8, and so on. A thread block also prefetches to the L2 cache the first state of the thread block
// that is `together` blocks later, which will probably run in its place.
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/prefetch.cuh"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/recurrent/mixer_step.cuh"
#include "efla/cuda/recurrent/mixer_step.h"
#include "efla/rule/short_conv.h"

namespace efla::gpu {
namespace {

constexpr int kStatePieces = kStateKeys / kStateWarps;          // pieces of a state per thread
constexpr int kMixedChannels = 2 * kStateKeys + kStateColumns;  // outputs of the convolution: q, k and v

// Shared memory of a thread block besides the state.
struct MixerScratch {
  float convolved[kMixedChannels];
  float decay[kStateKeys];
  float error[kStateWarps][kStateColumns], out[kStateWarps][kStateColumns];  // parts of S̃ᵀk and S̃ᵀq
  float squares[kStateColumns / 32];                                         // sums of squares of the outputs
};

constexpr int kChannelsPerThread = (kMixedChannels + kStateThreads - 1) / kStateThreads;

// What a thread reads for a head, all of it before it uses any: its channels of the convolution (columns in qkv, −1 for
// none; taps; history and this token), and the scalars of its key channel and value column.
template <int kTaps>
struct HeadInputs : HeadScalars {
  int column[kChannelsPerThread];
  float* past[kChannelsPerThread];
  float x[kChannelsPerThread][kTaps], tap[kChannelsPerThread][kTaps];

  // with_keys: read the channels of q and k too.
  __device__ HeadInputs(const MixerStep& p, int i_b, std::int64_t slot, int h, int i_q, bool with_keys) {
    const int width = static_cast<int>(p.taps.extent[1]), thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kChannelsPerThread; ++i) {
      const int at = thread + i * kStateThreads;
      column[i] = with_keys || at >= 2 * kStateKeys ? channel_column(p, at, i_q, h, 0, kStateColumns) : -1;
      const int from = max(column[i], 0), row = static_cast<int>(p.history.stride[1]);
      const int step = static_cast<int>(p.taps.stride[1]);
      past[i] = p.history.at(slot, 0, from);
      const float* const taps = p.taps.at(from, 0);
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        x[i][j] = j + 1 < width ? __ldcg(past[i] + j * row) : 0.0F;
        tap[i][j] = __ldg(taps + min(j, width - 1) * step);
      }
    }
    const int value_dim = static_cast<int>(p.shape.value_dim), value = min(thread, value_dim - 1);
    const int channel = decay_channel(p, h, thread);
    read_parameters(p, h, channel, value);
    const float* places[kChannelsPerThread + 3];  // of this token's numbers; of another number if one is absent
#pragma unroll
    for (int i = 0; i < kChannelsPerThread; ++i) places[i] = p.qkv.at(i_b, max(column[i], 0));
    places[kChannelsPerThread] = p.beta ? p.beta.at(i_b, h) : places[0];
    places[kChannelsPerThread + 1] = p.decay ? p.decay.at(i_b, channel) : places[0];
    places[kChannelsPerThread + 2] = p.gate ? p.gate.at(i_b, h * value_dim + value) : places[0];
    float read[kChannelsPerThread + 3];
#pragma unroll
    for (int i = 0; i < kChannelsPerThread + 3; ++i) read[i] = __ldcg(places[i]);
#pragma unroll
    for (int i = 0; i < kChannelsPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) x[i][j] = j + 1 == width ? read[i] : x[i][j];
    }
    beta = read[kChannelsPerThread];
    decay = read[kChannelsPerThread + 1];
    gate = read[kChannelsPerThread + 2];
  }

  // Writes the activated outputs of the convolution to `convolved`, and the history after this token.
  __device__ void convolve(const MixerStep& p, bool with_keys, float* convolved) const {
    const int width = static_cast<int>(p.taps.extent[1]), row = static_cast<int>(p.history.stride[1]);
#pragma unroll
    for (int i = 0; i < kChannelsPerThread; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kStateThreads;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) sum = j < width ? fmaf(tap[i][j], x[i][j], sum) : sum;
      if (at < kMixedChannels && (with_keys || at >= 2 * kStateKeys))
        convolved[at] = column[i] < 0 ? 0.0F : sum * sigmoid(sum);
#pragma unroll
      for (int j = 0; j + 1 < kTaps; ++j) {
        if (column[i] >= 0 && j + 1 < width) past[i][j * row] = x[i][j + 1];
      }
    }
  }
};

// Prefetches the taps and the history of a head's channels to the L2 cache.
__device__ __forceinline__ void prefetch_channels(const MixerStep& p, std::int64_t slot, int h, int i_q) {
  for (int i = 0; i < kChannelsPerThread; ++i) {
    const int column = channel_column(p, static_cast<int>(threadIdx.x) + i * kStateThreads, i_q, h, 0, kStateColumns);
    if (column < 0) continue;
    prefetch(p.taps.at(column, 0));
    for (int j = 0; j + 1 < p.taps.extent[1]; ++j) prefetch(p.history.at(slot, j, column));
  }
}

// Starts the copies of a thread's pieces of a state to own[i · kStateThreads]. Does not commit them.
__device__ __forceinline__ void fetch_state(const MixerStep& p, std::int64_t slot, int h, uint4* own) {
  const int warp = threadIdx.x / 32, column = threadIdx.x % 32 * 4;
  const float* const from = p.states.at(slot, h, warp, column);
#pragma unroll
  for (int i = 0; i < kStatePieces; ++i) {
    const bool exists = warp + i * kStateWarps < p.shape.key_dim && column < p.shape.value_dim;
    copy_async_16(shared_address(own + i * kStateThreads),
                  exists ? from + i * kStateWarps * p.states.stride[2] : p.states.data, exists ? 16 : 0);
  }
}

// Computes value head h of a text, whose query head is i_q. The convolution has at most kTaps taps. with_keys: q and k
// are computed too; otherwise q and k of the previous call are used. The caller must wait at a barrier of the block
// before it uses the scratch again.
template <int kTaps>
__device__ __forceinline__ void compute_head(const MixerStep& p, int i_b, std::int64_t slot, int h, int i_q,
                                             bool with_keys, float scale, const uint4* own, MixerScratch& scratch) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int key_dim = static_cast<int>(p.shape.key_dim), value_dim = static_cast<int>(p.shape.value_dim);
  const int at = h * value_dim + tid;
  const HeadInputs<kTaps> inputs(p, i_b, slot, h, i_q, with_keys);
  inputs.convolve(p, with_keys, scratch.convolved);
  if (tid < kStateKeys) scratch.decay[tid] = inputs.decay_of(p);
  const float beta = inputs.beta_of(p);
  copy_async_wait<0>();
  __syncthreads();

  const Keys keys = keys_of(scratch.convolved, p.rule.qk_l2norm, lane);
  const HeadGains gains(p, beta, keys, scale);
  // Lane i of a warp writes what the warp's row i needs of its key. These numbers lie where the warp's sums come later.
  const int own_key = warp + lane % kStatePieces * kStateWarps;
  const float own_decay = scratch.decay[own_key], own_k = keys.k_factor * scratch.convolved[kStateKeys + own_key];
  float4* const of_keys = reinterpret_cast<float4*>(scratch.error[warp]);
  if (lane < kStatePieces) {
    of_keys[lane] = {own_decay, own_k, own_decay * own_k, own_decay * keys.q_factor * scratch.convolved[own_key]};
  }
  __syncwarp();
  float4 error{0, 0, 0, 0}, out{0, 0, 0, 0};
#pragma unroll 4
  for (int i = 0; i < kStatePieces; ++i) {
    const float k = of_keys[i].z, q = of_keys[i].w;
    const float4 s = *reinterpret_cast<const float4*>(own + i * kStateThreads);
    error = accumulated(error, s, k);
    out = accumulated(out, s, q);
  }
  __syncwarp();
  reinterpret_cast<float4*>(scratch.error[warp])[lane] = error;
  reinterpret_cast<float4*>(scratch.out[warp])[lane] = out;
  __syncthreads();

  float4 sums{0, 0, 0, 0};
#pragma unroll
  for (int w = 0; w < kStateWarps; ++w) {
    const float4 part = reinterpret_cast<const float4*>(scratch.error[w])[lane];
    sums = {sums.x + part.x, sums.y + part.y, sums.z + part.z, sums.w + part.w};
  }
  const float4 u = gains.writes(reinterpret_cast<const float4*>(scratch.convolved + 2 * kStateKeys)[lane], sums);
  float o = 0;
  if (tid < kStateColumns) {
    o = gains.output(scratch.error, scratch.out, tid, scratch.convolved[2 * kStateKeys + tid], keys);
    const float squares = warp_sum(o * o);
    if (lane == 0) scratch.squares[warp] = squares;
  }
  __syncthreads();
  if (lane < kStatePieces) of_keys[lane] = {own_decay, own_k, 0, 0};
  __syncwarp();
  if (tid < value_dim) {
    if (p.norm_weight) {
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kStateColumns / 32; ++i) squares += scratch.squares[i];
      o *= norm_factor(p, squares);
    }
    *p.o.at(i_b, at) = o * inputs.output_factor(p);
  }
  if (4 * lane >= value_dim) return;
  float* to = p.states.at(slot, h, warp, 4 * lane);
  const std::int64_t step = kStateWarps * p.states.stride[2];
#pragma unroll 4
  for (int i = 0; i < kStatePieces; ++i, to += step) {
    const float decay = of_keys[i].x, k = of_keys[i].y;
    const float4 s = *reinterpret_cast<const float4*>(own + i * kStateThreads);
    if (warp + i * kStateWarps < key_dim) *reinterpret_cast<float4*>(to) = updated(s, decay, k, u);
  }
}

constexpr int kBlocks = 2;  // thread blocks per multiprocessor
constexpr int kStateBytes = kStatePieces * kStateThreads * 16;

// Prefetches the first state of thread block `block` to the L2 cache.
__device__ __forceinline__ void prefetch_state(const MixerStep& p, int group, int block) {
  const int heads = static_cast<int>(p.shape.heads), i_b = block / heads, thread = static_cast<int>(threadIdx.x);
  if (i_b >= p.shape.batch || thread >= p.shape.key_dim) return;
  const std::int64_t slot = p.slots ? p.slots(i_b) : i_b;
  if (slot < 0) return;
  prefetch_bulk(p.states.at(slot, block % heads * group, thread),
                static_cast<int>(p.shape.value_dim) * static_cast<int>(sizeof(float)));
}

// Computes a text and a query head. `together`: thread blocks that run at the same time.
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
    compute_head<kTaps>(p, i_b, slot, h, i_q, h == i_q * group, scale, own, scratch);
    __syncthreads();
  }
}

}  // namespace

void mixer_step_many(const MixerStep& p, cudaStream_t stream) {
  const auto kernel = p.taps.extent[1] <= kFewTaps ? mixer_step_kernel<kFewTaps> : mixer_step_kernel<kMaxConvWidth>;
  reserve_shared_memory(kernel, kStateBytes);
  launch_early("mixer_step", kernel, grid_of("mixer_step", p.shape.batch * p.shape.heads), kStateThreads, kStateBytes,
               stream, p, static_cast<int>(p.shape.group()), static_cast<float>(p.rule.scale_for(p.shape.key_dim)),
               kBlocks * multiprocessors());
}

}  // namespace efla::gpu
