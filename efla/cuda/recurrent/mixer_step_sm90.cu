// The kernel of mixer_step for few heads (mixer_step.h). Few heads do not use the bandwidth of a GPU, so the latency of
// reads decides. docs/design/2026-11-cuda-decode.md explains the choices.
//
// A cluster of 8 thread blocks computes a text and a query head, and its value heads one after another. Each thread
// block has 16 value columns of the state in registers, and computes the convolution of q, of k and of its own value
// columns. It reads parameters while earlier kernels run, and all other inputs together after these kernels have ended.
// The thread blocks of a cluster send each other the sums of squares of their outputs, for the output norm. When these
// sums have arrived, every block has read the history of q and k, and the first block writes it.
#include <string>

#include "efla/cuda/common/cluster.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/prefetch.cuh"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/recurrent/mixer_step.cuh"
#include "efla/cuda/recurrent/mixer_step.h"
#include "efla/rule/short_conv.h"

namespace efla::gpu {
namespace {

// A thread has columns 4 (thread % kQuads) to 4 (thread % kQuads) + 3 of its block's kColumns, of keys thread / kQuads
// + i · kKeysPerPiece for all i < kPieces.
constexpr int kColumns = 16, kQuads = kColumns / 4, kKeysPerPiece = kStateThreads / kQuads;
constexpr int kPieces = kStateKeys / kKeysPerPiece;
constexpr int kCluster = kStateColumns / kColumns;
constexpr int kChannels = 2 * kStateKeys + kColumns;  // outputs of the convolution: q, k and own value columns
constexpr int kPasses = (kChannels + kStateThreads - 1) / kStateThreads;  // channels per thread

// The shared memory of a thread block.
template <int kTaps>
struct Shared {
  float convolved[kChannels];
  float history[kTaps > 1 ? kTaps - 1 : 1][kChannels];             // the history after this token
  float4 of_keys[kStateKeys];                                      // decay, k, decay · k, decay · q after the L2 norm
  float error[kStateWarps][kColumns], out[kStateWarps][kColumns];  // parts of S̃ᵀk and S̃ᵀq
  float squares[2][kCluster];  // sums of squares of the outputs, for even and odd turns
  std::uint64_t arrived[2];    // barriers of `squares`
};

// Sends a number to the shared memory of thread block `rank` of the cluster, to the place that `to` has in this block.
// The barrier at the place of `arrived` in that block counts its bytes.
__device__ __forceinline__ void send_number(float* to, float x, std::uint64_t* arrived, int rank) {
  asm volatile(
      "{ .reg .b32 place, barrier; mapa.shared::cluster.u32 place, %0, %3; mapa.shared::cluster.u32 barrier, %2, %3; "
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], %1, [barrier]; }" ::"r"(
          shared_address(to)),
      "r"(__float_as_uint(x)), "r"(shared_address(arrived)), "r"(rank)
      : "memory");
}

// A thread block's part of a problem: a text, a query head and some value columns.
struct Part {
  int i_b, i_q, rank;  // rank: the block's number in the cluster
  std::int64_t slot;
};

// What a thread reads for a value head: its channels of the convolution (columns in qkv, −1 for none; taps; history and
// this token), and the scalars of its key channel and value column.
template <int kTaps>
struct HeadInputs : HeadScalars {
  int column[kPasses];
  float* past[kPasses];
  float x[kPasses][kTaps], tap[kPasses][kTaps];
  const float *now[kPasses], *beta_place, *decay_place, *gate_place;

  // Reads what no kernel writes. with_keys: of the channels of q and k too.
  __device__ HeadInputs(const MixerStep& p, const Part& part, int h, bool with_keys) {
    const int width = static_cast<int>(p.taps.extent[1]), thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int at = thread + i * kStateThreads;
      column[i] =
          with_keys || at >= 2 * kStateKeys ? channel_column(p, at, part.i_q, h, part.rank * kColumns, kColumns) : -1;
      if (column[i] < 0) continue;
      const int step = static_cast<int>(p.taps.stride[1]);
      const float* const taps = p.taps.at(column[i], 0);
#pragma unroll
      for (int j = 0; j < kTaps; ++j) tap[i][j] = j < width ? __ldg(taps + j * step) : 0.0F;
      past[i] = p.history.at(part.slot, 0, column[i]);
      now[i] = p.qkv.at(part.i_b, column[i]);
    }
    const int value_dim = static_cast<int>(p.shape.value_dim), channel = decay_channel(p, h, thread);
    const int value = min(part.rank * kColumns + thread, value_dim - 1);
    read_parameters(p, h, channel, value);
    beta_place = p.beta ? p.beta.at(part.i_b, h) : nullptr;
    decay_place = p.decay ? p.decay.at(part.i_b, channel) : nullptr;
    gate_place = p.gate ? p.gate.at(part.i_b, h * value_dim + value) : nullptr;
  }

  // Reads all other inputs.
  __device__ void read(const MixerStep& p) {
    const int width = static_cast<int>(p.taps.extent[1]), row = static_cast<int>(p.history.stride[1]);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (column[i] < 0) continue;
      const float last = __ldcg(now[i]);
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        x[i][j] = j + 1 < width ? __ldcg(past[i] + j * row) : j + 1 == width ? last : 0.0F;
      }
    }
    if (beta_place != nullptr) beta = __ldcg(beta_place);
    if (decay_place != nullptr) decay = __ldcg(decay_place);
    if (gate_place != nullptr) gate = __ldcg(gate_place);
  }

  // Writes the activated outputs of the convolution to `convolved`, and the history after this token to `rows`.
  __device__ void convolve(bool with_keys, float* convolved, float (*rows)[kChannels]) const {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kStateThreads;
      if (at >= kChannels || (!with_keys && at < 2 * kStateKeys)) continue;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) sum = column[i] < 0 ? 0.0F : fmaf(tap[i][j], x[i][j], sum);
      convolved[at] = sum * sigmoid(sum);
#pragma unroll
      for (int j = 0; j + 1 < kTaps; ++j) rows[j][at] = x[i][j + 1];
    }
  }
};

// Writes the history after this token. Only the first block of a cluster writes it for q and k.
__device__ __forceinline__ void write_history(const MixerStep& p, const Part& part, int h, bool with_keys,
                                              const float (*rows)[kChannels]) {
  const int first = with_keys && part.rank == 0 ? 0 : 2 * kStateKeys;
  for (int at = first + static_cast<int>(threadIdx.x); at < kChannels; at += kStateThreads) {
    const int column = channel_column(p, at, part.i_q, h, part.rank * kColumns, kColumns);
    if (column < 0) continue;
    for (int j = 0; j + 1 < p.taps.extent[1]; ++j) *p.history.at(part.slot, j, column) = rows[j][at];
  }
}

// Prefetches the history of a thread's channels to the L2 cache.
template <int kTaps>
__device__ __forceinline__ void prefetch_history(const MixerStep& p, const HeadInputs<kTaps>& inputs) {
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    if (inputs.column[i] < 0) continue;
    for (int j = 0; j + 1 < p.taps.extent[1]; ++j) prefetch(inputs.past[i] + j * p.history.stride[1]);
  }
}
// Prefetches the block's part of a state to the L2 cache.
__device__ __forceinline__ void prefetch_state(const MixerStep& p, const Part& part, int h) {
  const int thread = static_cast<int>(threadIdx.x), column = part.rank * kColumns;
  if (thread < p.shape.key_dim && column < p.shape.value_dim) prefetch(p.states.at(part.slot, h, thread, column));
}

// Returns the sum over the lanes that have the same columns.
__device__ __forceinline__ float4 sum_keys(float4 x) {
#pragma unroll
  for (int offset = 16; offset >= kQuads; offset /= 2) {
    x.x += __shfl_xor_sync(0xffffffffU, x.x, offset);
    x.y += __shfl_xor_sync(0xffffffffU, x.y, offset);
    x.z += __shfl_xor_sync(0xffffffffU, x.z, offset);
    x.w += __shfl_xor_sync(0xffffffffU, x.w, offset);
  }
  return x;
}

// Writes the warp's parts of S̃ᵀk and S̃ᵀq.
template <int kTaps>
__device__ __forceinline__ void put_products(const float4 (&state)[kPieces], int first_key, int warp, int lane,
                                             Shared<kTaps>& shared) {
  float4 error{}, out{};
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const float4 key = shared.of_keys[first_key + i * kKeysPerPiece];
    error = accumulated(error, state[i], key.z);
    out = accumulated(out, state[i], key.w);
  }
  error = sum_keys(error);
  out = sum_keys(out);
  if (lane >= kQuads) return;
  reinterpret_cast<float4*>(shared.error[warp])[lane] = error;
  reinterpret_cast<float4*>(shared.out[warp])[lane] = out;
}

// Computes the block's columns of value head h. `turn` is the number of earlier value heads. The first turn waits for
// the previous kernels.
template <int kTaps>
__device__ __forceinline__ void compute_head(const MixerStep& p, const Part& part, int h, int turn, float scale,
                                             Shared<kTaps>& shared) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int key_dim = static_cast<int>(p.shape.key_dim), value_dim = static_cast<int>(p.shape.value_dim);
  const int quad = tid % kQuads, first_key = tid / kQuads, column = part.rank * kColumns + 4 * quad;
  float* const place = p.states.at(part.slot, h, first_key, column);
  const int step = kKeysPerPiece * static_cast<int>(p.states.stride[2]);
  const auto exists = [&](int i) { return first_key + i * kKeysPerPiece < key_dim && column < value_dim; };
  const bool with_keys = turn == 0;
  HeadInputs<kTaps> inputs(p, part, h, with_keys);
  if (turn == 0) {
    prefetch_state(p, part, h);
    prefetch_history(p, inputs);
    wait_for_kernels();
  }
  inputs.read(p);
  float4 state[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    state[i] = exists(i) ? __ldcg(reinterpret_cast<const float4*>(place + i * step)) : float4{};
  }
  inputs.convolve(with_keys, shared.convolved, shared.history);
  const float beta = inputs.beta_of(p), key_decay = inputs.decay_of(p), output_factor = inputs.output_factor(p);
  __syncthreads();

  const Keys keys = keys_of(shared.convolved, p.rule.qk_l2norm, lane);
  const HeadGains gains(p, beta, keys, scale);
  if (tid < kStateKeys) {
    const float decay = key_decay, k = keys.k_factor * shared.convolved[kStateKeys + tid];
    shared.of_keys[tid] = {decay, k, decay * k, decay * keys.q_factor * shared.convolved[tid]};
  }
  __syncthreads();
  put_products(state, first_key, warp, lane, shared);
  __syncthreads();

  float o = 0;
  float* const squares = shared.squares[turn % 2];
  std::uint64_t* const arrived = &shared.arrived[turn % 2];
  static_assert(kColumns <= 32);
  if (warp == 0) {
    const int c = min(tid, kColumns - 1);
    o = gains.output(shared.error, shared.out, c, shared.convolved[2 * kStateKeys + c], keys);
    const float sum = warp_sum(tid < kColumns ? o * o : 0.0F);
    if (turn == 0) wait_at_cluster_barrier();
    if (lane < kCluster) send_number(&squares[part.rank], sum, arrived, lane);
  } else if (turn == 0) {
    wait_at_cluster_barrier();
  }
  float4 sums{};
#pragma unroll
  for (int w = 0; w < kStateWarps; ++w) {
    sums = accumulated(sums, reinterpret_cast<const float4*>(shared.error[w])[quad], 1.0F);
  }
  const float4 u = gains.writes(reinterpret_cast<const float4*>(shared.convolved + 2 * kStateKeys)[quad], sums);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const float4 key = shared.of_keys[first_key + i * kKeysPerPiece];
    if (exists(i)) *reinterpret_cast<float4*>(place + i * step) = updated(state[i], key.x, key.y, u);
  }
  barrier_wait(arrived, turn / 2 % 2);
  write_history(p, part, h, with_keys, shared.history);
  const int value = part.rank * kColumns + tid;
  if (tid >= kColumns || value >= value_dim) return;
  if (p.norm_weight) {
    float all = 0;
#pragma unroll
    for (int i = 0; i < kCluster; ++i) all += squares[i];
    o *= norm_factor(p, all);
  }
  *p.o.at(part.i_b, h * value_dim + value) = o * output_factor;
}

template <int kTaps>
__global__ void __launch_bounds__(kStateThreads)
    mixer_step_kernel(const __grid_constant__ MixerStep p, int group, float scale) {
  __shared__ __align__(16) Shared<kTaps> shared;
  let_next_kernel_begin();
  const int cluster = static_cast<int>(blockIdx.x) / kCluster, heads = static_cast<int>(p.shape.heads);
  Part part{cluster / heads, cluster % heads, static_cast<int>(blockIdx.x) % kCluster, 0};
  part.slot = p.slots ? p.slots(part.i_b) : part.i_b;
  const int first = part.i_q * group, value_dim = static_cast<int>(p.shape.value_dim);
  if (part.slot < 0) {
    wait_for_kernels();
    if (part.rank != 0) return;
    for (int c = threadIdx.x; c < group * value_dim; c += kStateThreads) *p.o.at(part.i_b, first * value_dim + c) = 0;
    return;
  }
  const auto expect = [&](int turn) {
    barrier_expect(&shared.arrived[turn % 2], kCluster * static_cast<int>(sizeof(float)));
  };
  if (threadIdx.x == 0) {
    barrier_init(&shared.arrived[0], 1);
    barrier_init(&shared.arrived[1], 1);
    announce_barriers();
    expect(0);
    expect(1);
  }
  __syncthreads();
  arrive_at_cluster_barrier();
  for (int turn = 0; turn < group; ++turn) {
    compute_head<kTaps>(p, part, first + turn, turn, scale, shared);
    __syncthreads();
    if (threadIdx.x == 0 && turn + 2 < group) expect(turn);
  }
}

}  // namespace

void mixer_step(const MixerStep& p, cudaStream_t stream) {
  if (p.shape.batch * p.shape.heads * kCluster > multiprocessors()) return mixer_step_many(p, stream);
  const auto kernel = p.taps.extent[1] <= kFewTaps ? mixer_step_kernel<kFewTaps> : mixer_step_kernel<kMaxConvWidth>;
  reserve_shared_memory(kernel, 0);
  launch_clusters_early("mixer_step", kernel, grid_of("mixer_step", p.shape.batch * p.shape.heads * kCluster), kCluster,
                        kStateThreads, 0, stream, p, static_cast<int>(p.shape.group()),
                        static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
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
