// Parts of the kernels of a mixer's part of a decode step. A thread block computes a value head, whose state its
// threads have in shared memory, each its own pieces: lane l of warp w has columns 4 l … of rows w, w + 8, ….
#pragma once

#include "efla/cuda/common/exchange.cuh"
#include "efla/cuda/common/prefetch.cuh"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/recurrent/token.cuh"
#include "efla/rule/mixer_step.h"
#include "efla/rule/short_conv.h"

namespace efla::gpu {

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0F, 1.0F + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// What q and k of a head bring to the recurrence: factors of the L2 norm, λ and q·k after it.
struct Keys {
  float q_factor = 1, k_factor = 1, lambda, q_dot_k;
};

// Computed by every warp for itself.
template <int KD>
__device__ __forceinline__ Keys keys_of(const float* u, bool l2norm, int lane) {
  float q[KD / 32], k[KD / 32];
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    q[i] = u[lane + 32 * i];
    k[i] = u[KD + lane + 32 * i];
  }
  Keys keys;
  keys.lambda = dot_rows(k, k);
  keys.q_dot_k = dot_rows(q, k);
  if (!l2norm) return keys;
  constexpr auto kEpsilon = static_cast<float>(kL2NormEpsilon);
  keys.q_factor = rsqrtf(dot_rows(q, q) + kEpsilon);
  keys.k_factor = rsqrtf(keys.lambda + kEpsilon);
  keys.lambda *= keys.k_factor * keys.k_factor;
  keys.q_dot_k *= keys.q_factor * keys.k_factor;
  return keys;
}

inline constexpr int kStateThreads = 256, kStateWarps = kStateThreads / 32;
inline constexpr int kStateKeys = 128, kStateColumns = 128;            // of a state at most
inline constexpr int kStatePieces = kStateKeys / kStateWarps;          // per thread
inline constexpr int kMixedChannels = 2 * kStateKeys + kStateColumns;  // outputs of the convolution: of q, k and v

inline constexpr int kFewTaps = 4;  // of most convolutions

struct MixerScratch {
  float u[kMixedChannels];
  float decay[kStateKeys];
  float error[kStateWarps][kStateColumns], out[kStateWarps][kStateColumns];  // parts of S̃ᵀk and S̃ᵀq
  float squares[kStateColumns / 32];                                         // of the outputs
};

inline constexpr int kChannelsPerThread = (kMixedChannels + kStateThreads - 1) / kStateThreads;

// Returns the column in qkv of the convolution's output `at`, of query head i_q and value head h; −1: there is none.
__device__ __forceinline__ int channel_column(const MixerStep& p, int at, int h, int i_q) {
  const int key_dim = static_cast<int>(p.shape.key_dim), value_dim = static_cast<int>(p.shape.value_dim);
  const int heads = static_cast<int>(p.shape.heads), in_head = at - 2 * kStateKeys;
  if (at < 2 * kStateKeys)
    return at % kStateKeys < key_dim ? (at / kStateKeys * heads + i_q) * key_dim + at % kStateKeys : -1;
  return at < kMixedChannels && in_head < value_dim ? 2 * heads * key_dim + h * value_dim + in_head : -1;
}

// What a thread reads for a head, all of it before any is used: its channels of the convolution (their columns in qkv,
// −1 for none; taps; the history and this token), and what beta, the decay of the thread's key channel and the output
// norm and gate of its column are computed from.
template <int kTaps, bool kAwaits>
struct HeadInputs {
  int column[kChannelsPerThread];
  float* past[kChannelsPerThread];
  float x[kChannelsPerThread][kTaps], tap[kChannelsPerThread][kTaps];
  float beta, beta_factor, decay, decay_bias = 0, rate = 0, norm_weight = 1, gate, gate_bias = 0;

  // with_keys: the channels of q and k too. awaited: waits for what a projection writes (exchange.cuh).
  __device__ HeadInputs(const MixerStep& p, int i_b, std::int64_t slot, int h, int i_q, bool with_keys, bool awaited) {
    const int width = static_cast<int>(p.taps.extent[1]), thread = static_cast<int>(threadIdx.x);
    const float* projected[kChannelsPerThread + 3];
#pragma unroll
    for (int i = 0; i < kChannelsPerThread; ++i) {
      const int at = thread + i * kStateThreads;
      column[i] = with_keys || at >= 2 * kStateKeys ? channel_column(p, at, h, i_q) : -1;
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
    const int key = min(thread, static_cast<int>(p.shape.key_dim) - 1);
    const int value_dim = static_cast<int>(p.shape.value_dim), value = min(thread, value_dim - 1);
    const int channel = p.rule.decay == Decay::channel ? h * static_cast<int>(p.shape.key_dim) + key : h;
    beta_factor = p.beta_factor(h);
    if (p.rule.decay != Decay::none) decay_bias = p.decay_bias(channel), rate = p.rate(h);
    if (p.norm_weight) norm_weight = p.norm_weight(value);
    if (p.gate_bias) gate_bias = p.gate_bias(h * value_dim + value);
    const bool has_beta = p.beta_activation != BetaActivation::one, has_decay = p.rule.decay != Decay::none;
#pragma unroll
    for (int i = 0; i < kChannelsPerThread; ++i) projected[i] = p.qkv.at(i_b, max(column[i], 0));
    projected[kChannelsPerThread] = has_beta ? p.beta.at(i_b, h) : projected[0];
    projected[kChannelsPerThread + 1] = has_decay ? p.decay.at(i_b, channel) : projected[0];
    projected[kChannelsPerThread + 2] = p.gate ? p.gate.at(i_b, h * value_dim + value) : projected[0];
    float read[kChannelsPerThread + 3];
    if constexpr (kAwaits) {
      read_places(projected, read, awaited);
    } else {
#pragma unroll
      for (int i = 0; i < kChannelsPerThread + 3; ++i) read[i] = __ldcg(projected[i]);
    }
#pragma unroll
    for (int i = 0; i < kChannelsPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) x[i][j] = j + 1 == width ? read[i] : x[i][j];
    }
    beta = read[kChannelsPerThread];
    decay = read[kChannelsPerThread + 1];
    gate = read[kChannelsPerThread + 2] + gate_bias;
  }

  // Writes the activated outputs of the convolution to u, and the history after this token.
  __device__ void convolve(const MixerStep& p, bool with_keys, float* u) const {
    const int width = static_cast<int>(p.taps.extent[1]), row = static_cast<int>(p.history.stride[1]);
#pragma unroll
    for (int i = 0; i < kChannelsPerThread; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kStateThreads;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) sum = j < width ? fmaf(tap[i][j], x[i][j], sum) : sum;
      if (at < kMixedChannels && (with_keys || at >= 2 * kStateKeys)) u[at] = column[i] < 0 ? 0.0F : sum * sigmoid(sum);
#pragma unroll
      for (int j = 0; j + 1 < kTaps; ++j) {
        if (column[i] >= 0 && j + 1 < width) past[i][j * row] = x[i][j + 1];
      }
    }
  }
  __device__ float beta_of(const MixerStep& p) const {
    if (p.beta_activation == BetaActivation::one) return beta_factor;
    return beta_factor * (p.beta_activation == BetaActivation::sigmoid ? sigmoid(beta) : softplus(beta));
  }
  // Returns e^g of the thread's key channel.
  __device__ float decay_of(const MixerStep& p) const {
    if (p.rule.decay == Decay::none) return 1;
    const float z = decay + decay_bias;
    return expf(p.decay_activation == DecayActivation::sigmoid ? p.bound * sigmoid(rate * z) : -rate * softplus(z));
  }
};

// Brings the taps and the history of a head's channels to the L2 cache.
__device__ __forceinline__ void prefetch_channels(const MixerStep& p, std::int64_t slot, int h, int i_q) {
  for (int i = 0; i < kChannelsPerThread; ++i) {
    const int column = channel_column(p, static_cast<int>(threadIdx.x) + i * kStateThreads, h, i_q);
    if (column < 0) continue;
    prefetch(p.taps.at(column, 0));
    for (int j = 0; j + 1 < p.taps.extent[1]; ++j) prefetch(p.history.at(slot, j, column));
  }
}

// Starts the copies of a thread's pieces of a state to own[i · kStateThreads]; not committed.
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

// Computes value head h of a text, whose query head is i_q. Waits for the pieces of its state until at most kPending
// later groups of copies are under way. The convolution has at most kTaps taps. with_keys: q and k are computed too,
// otherwise q and k of the call before are used. The scratch is free after a barrier of the block.
template <int kPending, int kTaps, bool kAwaits = false>
__device__ __forceinline__ void compute_head(const MixerStep& p, int i_b, std::int64_t slot, int h, int i_q,
                                             bool with_keys, float scale, const uint4* own, MixerScratch& scratch,
                                             float* exchange = nullptr, bool awaited = false) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int key_dim = static_cast<int>(p.shape.key_dim), value_dim = static_cast<int>(p.shape.value_dim);
  const int at = h * value_dim + tid;
  const HeadInputs<kTaps, kAwaits> inputs(p, i_b, slot, h, i_q, with_keys, awaited);
  inputs.convolve(p, with_keys, scratch.u);
  if (tid < kStateKeys) scratch.decay[tid] = inputs.decay_of(p);
  const float beta = inputs.beta_of(p);
  copy_async_wait<kPending>();
  __syncthreads();

  const Keys keys = keys_of<kStateKeys>(scratch.u, p.rule.qk_l2norm, lane);
  const float alpha = gain_alpha(p.rule.step, beta, keys.lambda);
  // What lane i of a warp knows of the warp's key i: the warp's sums lie where this is for all of its lanes.
  const int own_key = warp + lane % kStatePieces * kStateWarps;
  const float own_decay = scratch.decay[own_key], own_k = keys.k_factor * scratch.u[kStateKeys + own_key];
  float4* const of_keys = reinterpret_cast<float4*>(scratch.error[warp]);
  if (lane < kStatePieces) {
    of_keys[lane] = {own_decay, own_k, own_decay * own_k, own_decay * keys.q_factor * scratch.u[own_key]};
  }
  __syncwarp();
  float4 error{0, 0, 0, 0}, out{0, 0, 0, 0};
#pragma unroll 4
  for (int i = 0; i < kStatePieces; ++i) {
    const float k = of_keys[i].z, q = of_keys[i].w;
    const float4 s = *reinterpret_cast<const float4*>(own + i * kStateThreads);
    error = {fmaf(s.x, k, error.x), fmaf(s.y, k, error.y), fmaf(s.z, k, error.z), fmaf(s.w, k, error.w)};
    out = {fmaf(s.x, q, out.x), fmaf(s.y, q, out.y), fmaf(s.z, q, out.z), fmaf(s.w, q, out.w)};
  }
  __syncwarp();
  reinterpret_cast<float4*>(scratch.error[warp])[lane] = error;
  reinterpret_cast<float4*>(scratch.out[warp])[lane] = out;
  __syncthreads();

  const float a = static_cast<float>(p.rule.step.erase_scale) * alpha;
  const float b = static_cast<float>(p.rule.step.write_scale) * alpha;
  float4 sums{0, 0, 0, 0};
#pragma unroll
  for (int w = 0; w < kStateWarps; ++w) {
    const float4 part = reinterpret_cast<const float4*>(scratch.error[w])[lane];
    sums = {sums.x + part.x, sums.y + part.y, sums.z + part.z, sums.w + part.w};
  }
  const float4 v = reinterpret_cast<const float4*>(scratch.u + 2 * kStateKeys)[lane];
  const float4 u{fmaf(b, v.x, -a * sums.x), fmaf(b, v.y, -a * sums.y), fmaf(b, v.z, -a * sums.z),
                 fmaf(b, v.w, -a * sums.w)};
  float o = 0;
  if (tid < kStateColumns) {
    float column_error = 0, column_out = 0;
#pragma unroll
    for (int w = 0; w < kStateWarps; ++w) {
      column_error += scratch.error[w][tid];
      column_out += scratch.out[w][tid];
    }
    o = scale * fmaf(keys.q_dot_k, fmaf(b, scratch.u[2 * kStateKeys + tid], -a * column_error), column_out);
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
      o *= inputs.norm_weight * rsqrtf(__fdividef(squares, static_cast<float>(value_dim)) + p.norm_eps);
    }
    if (p.gate) o *= sigmoid(inputs.gate) * (p.gate_activation == GateActivation::silu ? inputs.gate : 1.0F);
    *p.o.at(i_b, at) = o;
    if (exchange != nullptr) write_place(exchange + i_b * p.o.stride[0] + at, o);
  }
  if (4 * lane >= value_dim) return;
  float* to = p.states.at(slot, h, warp, 4 * lane);
  const std::int64_t step = kStateWarps * p.states.stride[2];
#pragma unroll 4
  for (int i = 0; i < kStatePieces; ++i, to += step) {
    const float decay = of_keys[i].x, k = of_keys[i].y;
    const float4 s = *reinterpret_cast<const float4*>(own + i * kStateThreads);
    if (warp + i * kStateWarps < key_dim) {
      *reinterpret_cast<float4*>(to) = {fmaf(k, u.x, decay * s.x), fmaf(k, u.y, decay * s.y), fmaf(k, u.z, decay * s.z),
                                        fmaf(k, u.w, decay * s.w)};
    }
  }
}

}  // namespace efla::gpu
