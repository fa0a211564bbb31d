// An attention layer's part of a decode step on Hopper GPUs (attention_step.h). Its time is the reading of keys and
// values.
//
// The tokens of a text are divided into parts of whole blocks of kBlock tokens. The thread blocks of a text and a head
// of keys and values compute all query heads of the group for some of the parts, each part by the softmax over its own
// tokens. The last thread block that arrives adds the parts. Pages are prefetched while earlier kernels still run. All
// thread blocks of a text normalise and rotate the queries that they need; the one with the text's last tokens also
// writes the new key and value.
#include <algorithm>
#include <string>

#include "efla/cuda/attention/attention_step.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/prefetch.cuh"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/recurrent/token.cuh"
#include "efla/rule/activation.h"

namespace efla::gpu {
namespace {

constexpr int kBlock = static_cast<int>(kAttentionBlock);  // tokens
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostDim = 256;   // K and V
constexpr int kMostParts = 64;  // parts of a text
// Thread blocks of a multiprocessor for which there are registers. kHeads: query heads that are computed together.
template <int kHeads>
constexpr int kBlocksPerSm = kHeads == 1 ? 2 : 1;

// 16 bytes of a page.
template <class S>
struct Piece {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(S));
  uint4 bits;

  __device__ __forceinline__ float operator[](int i) const {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    if constexpr (sizeof(S) == 4) return __uint_as_float(words[i]);
    return i % 2 == 0 ? low_of<bfloat16>(words[i / 2]) : high_of<bfloat16>(words[i / 2]);
  }
};
template <class S>
__device__ __forceinline__ Piece<S> read_piece(const S* from) {
  return {__ldcg(reinterpret_cast<const uint4*>(from))};
}
__device__ __forceinline__ float read_one(const float* from) { return __ldcg(from); }
__device__ __forceinline__ float read_one(const bfloat16* from) {
  return __uint_as_float(static_cast<std::uint32_t>(__ldcg(reinterpret_cast<const unsigned short*>(from))) << 16);
}

// The numbers of parts of texts and of thread blocks.
struct Plan {
  int blocks;        // thread blocks per text and head of keys and values
  int entry_floats;  // of a part of a query head: V sums, padded to a multiple of 4; the largest score; the weights'
                     // sum
  float scale;
};

template <class S>
int entry_floats(const AttentionStep<S>& p) {
  return (static_cast<int>(p.dim()) + 3) / 4 * 4 + 4;
}

// Columns of the sums of values per thread: with kAligned a piece of a row of values.
template <class S, bool kAligned>
constexpr int kColumns = kAligned ? Piece<S>::kCount : 1;

// The shared memory of a thread block. kHeads: query heads that are computed together.
template <class S, int kHeads, bool kAligned>
struct Shared {
  float q[kMostDim][kHeads], key[kMostDim], cos[kMostDim / 2], sin[kMostDim / 2];
  float weights[kHeads][kBlock];                           // of a block's tokens; later of the parts
  float largest[kHeads], sum[kHeads], correction[kHeads];  // of the scores and weights so far
  union {
    float scores[kWarps][kHeads][kBlock];                  // parts of the scores
    float sums[kThreads * kColumns<S, kAligned>][kHeads];  // [row of threads · V + column]
  };
  float squares[2];  // sums of squares of all queries and all keys
  bool last;
};

// What a thread block computes: a text, a head of keys and values and some parts.
struct Work {
  int row, group, first_part;  // group: the head of keys and values
  std::int64_t slot, position;
  int tokens, blocks_per_part, parts;

  template <class S>
  __device__ Work(const AttentionStep<S>& p, const Plan& plan) {
    const int block = static_cast<int>(blockIdx.x), pair = block / plan.blocks;
    const int groups = static_cast<int>(p.shape.key_value_heads);
    first_part = block % plan.blocks;
    row = pair / groups;
    group = pair % groups;
    slot = p.slots(row);
    position = slot < 0 ? 0 : p.positions(row);
    tokens = static_cast<int>(position) + 1;
    const int blocks = (tokens + kBlock - 1) / kBlock;
    blocks_per_part = (blocks + kMostParts - 1) / kMostParts;
    parts = (blocks + blocks_per_part - 1) / blocks_per_part;
  }
  __device__ int first_token(int part) const { return part * blocks_per_part * kBlock; }
  __device__ int end_token(int part) const { return min(tokens, first_token(part + 1)); }
};

// Returns the keys [K, ·] of a block of tokens, whose rows are P tokens apart, and its values [·, V].
template <class S>
__device__ __forceinline__ S* keys_of(const AttentionStep<S>& p, const Work& work, int token) {
  const int page_tokens = static_cast<int>(p.shape.page_tokens);
  return p.table.pages(work.slot, token / page_tokens) + p.table.key_offset +
         work.group * p.shape.key_dim * page_tokens + token % page_tokens;
}
template <class S>
__device__ __forceinline__ S* values_of(const AttentionStep<S>& p, const Work& work, int token) {
  const int page_tokens = static_cast<int>(p.shape.page_tokens);
  return p.table.pages(work.slot, token / page_tokens) + p.table.value_offset +
         (work.group * page_tokens + token % page_tokens) * p.shape.value_dim;
}

// Prefetches the beginning of the thread block's first part to the L2 cache.
template <class S>
__device__ __forceinline__ void prefetch_part(const AttentionStep<S>& p, const Work& work) {
  const int first = work.first_token(work.first_part), end = min(work.end_token(work.first_part), first + 2 * kBlock);
  constexpr int kLine = 128 / static_cast<int>(sizeof(S)), kLines = kBlock / kLine;  // lines per channel
  const int dim = static_cast<int>(p.dim()), page_tokens = static_cast<int>(p.shape.page_tokens);
  for (int token = first; token < end; token += kBlock) {
    const S* const keys = keys_of(p, work, token);
    const S* const values = values_of(p, work, token);
    for (int i = static_cast<int>(threadIdx.x); i < dim * kLines; i += kThreads) {
      if (token + i % kLines * kLine < end) prefetch(keys + i / kLines * page_tokens + i % kLines * kLine);
    }
    for (int i = static_cast<int>(threadIdx.x) * kLine; i < (end - token) * dim && i < kBlock * dim;
         i += kThreads * kLine) {
      prefetch(values + i);
    }
  }
}

// Returns 1 / √(mean of squares + eps).
__device__ __forceinline__ float norm_factor(float squares, std::int64_t count, float eps) {
  return rsqrtf(__fdividef(squares, static_cast<float>(count)) + eps);
}

// Normalises and rotates a head that begins at `from`, times a factor. `weight` begins at the head. `squares`: the sum
// of squares of all heads; negative: the norm is of this head. Writes element i to to[i · kStep]. Run by one warp.
template <int kStep, class S>
__device__ __forceinline__ void prepare_head(const AttentionStep<S>& p, const float* from, const float* weight,
                                             float squares, std::int64_t count, float factor, const float* cos,
                                             const float* sin, float* to, int lane) {
  const int dim = static_cast<int>(p.dim()), half = static_cast<int>(p.rotary) / 2;
  float x[kMostDim / 32], sum = 0;
#pragma unroll
  for (int i = 0; i < kMostDim / 32; ++i) {
    const int c = lane + 32 * i;
    x[i] = c < dim ? __ldcg(from + c) : 0.0F;
    sum = fmaf(x[i], x[i], sum);
  }
  const float r = factor * norm_factor(squares < 0 ? warp_sum(sum) : squares, count, p.norm_eps);
#pragma unroll
  for (int i = 0; i < kMostDim / 32; ++i) {
    const int c = lane + 32 * i;
    if (c < dim) to[c * kStep] = x[i] * r * __ldg(weight + c);
  }
  __syncwarp();
  for (int i = lane; i < half; i += 32) {
    const float a = to[i * kStep], b = to[(i + half) * kStep];
    to[i * kStep] = a * cos[i] - b * sin[i];
    to[(i + half) * kStep] = b * cos[i] + a * sin[i];
  }
}

// Writes the sums of squares of all queries and of all keys of a text, for norms of all heads together.
template <class S>
__device__ __forceinline__ void sum_squares(const AttentionStep<S>& p, int row, float (*parts)[2], float* squares) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = static_cast<int>(p.dim()), heads = static_cast<int>(p.shape.heads);
  float2 sum{0, 0};
  for (int c = static_cast<int>(threadIdx.x); c < heads * dim; c += kThreads) {
    const float x = __ldcg(p.qkv.at(row, p.query_column(c / dim) + c % dim));
    sum.x = fmaf(x, x, sum.x);
  }
  for (int c = static_cast<int>(threadIdx.x); c < p.shape.key_value_heads * dim; c += kThreads) {
    const float x = __ldcg(p.qkv.at(row, p.key_column(0) + c));
    sum.y = fmaf(x, x, sum.y);
  }
  sum = warp_sum(sum);
  if (lane == 0) parts[warp][0] = sum.x, parts[warp][1] = sum.y;
  __syncthreads();
  if (threadIdx.x < 2) {
    float all = 0;
    for (int w = 0; w < kWarps; ++w) all += parts[w][threadIdx.x];
    squares[threadIdx.x] = all;
  }
  __syncthreads();
}

// Writes the text's new key and value, rounded to S. `key` has the key's numbers.
template <class S>
__device__ __forceinline__ void write_token(const AttentionStep<S>& p, const Work& work, const float* key) {
  const int token = static_cast<int>(work.position), page_tokens = static_cast<int>(p.shape.page_tokens);
  S* const keys = keys_of(p, work, token);
  S* const values = values_of(p, work, token);
  for (int c = static_cast<int>(threadIdx.x); c < p.dim(); c += kThreads) {
    keys[c * page_tokens] = from_state<S>(key[c]);
    values[c] = from_state<S>(__ldcg(p.qkv.at(work.row, p.value_column(work.group) + c)));
  }
}

// A thread's part of the scores of a block of tokens: some channels of kCount tokens.
template <class S, int kHeads, bool kAligned>
__device__ __forceinline__ void compute_scores(const AttentionStep<S>& p, const S* keys, int valid,
                                               Shared<S, kHeads, kAligned>& shared) {
  constexpr int kCount = Piece<S>::kCount, kLanes = kBlock / kCount, kChannels = kThreads / kLanes;
  const int thread = static_cast<int>(threadIdx.x), token = thread % kLanes * kCount;
  const int dim = static_cast<int>(p.dim()), page_tokens = static_cast<int>(p.shape.page_tokens);
  float score[kHeads][kCount] = {};
  if (token < valid) {
#pragma unroll 4
    for (int c = thread / kLanes; c < dim; c += kChannels) {
      const Piece<S> piece = read_piece(keys + c * page_tokens + token);
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        const float q = shared.q[c][j];
#pragma unroll
        for (int e = 0; e < kCount; ++e) score[j][e] = fmaf(q, piece[e], score[j][e]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
#pragma unroll
      for (int offset = 16; offset >= kLanes; offset /= 2) {
        score[j][e] += __shfl_xor_sync(0xffffffffU, score[j][e], offset);
      }
    }
    if (thread % 32 < kLanes) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) shared.scores[thread / 32][j][token + e] = score[j][e];
    }
  }
}

// Turns the scores of a block of tokens into weights relative to the largest score so far. Warp j has head j.
template <class S, int kHeads, bool kAligned>
__device__ __forceinline__ void weigh(int valid, Shared<S, kHeads, kAligned>& shared) {
  const int j = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (j >= kHeads) return;
  float score[kBlock / 32], most = shared.largest[j];
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) {
    score[i] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) score[i] += shared.scores[w][j][lane + 32 * i];
    if (lane + 32 * i >= valid) score[i] = -INFINITY;
    most = fmaxf(most, score[i]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffU, most, offset));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) {
    const float weight = expf(score[i] - most);
    shared.weights[j][lane + 32 * i] = weight;
    sum += weight;
  }
  sum = warp_sum(sum);
  __syncwarp();
  if (lane != 0) return;
  const float correction = expf(shared.largest[j] - most);
  shared.correction[j] = correction;
  shared.largest[j] = most;
  shared.sum[j] = fmaf(shared.sum[j], correction, sum);
}

// A thread's sums of values: some columns over some tokens of each block. Neighbouring threads have neighbouring
// columns, and `lanes` threads, a power of two, have a row.
template <class S, int kHeads, bool kAligned>
struct ValueSums {
  static constexpr int kCount = kColumns<S, kAligned>;
  float sum[kHeads][kCount] = {};
  int lanes = 1, column = 0, row = 0;

  __device__ explicit ValueSums(int dim) {
    while (lanes * kCount < dim) lanes *= 2;
    column = static_cast<int>(threadIdx.x) % lanes * kCount;
    row = static_cast<int>(threadIdx.x) / lanes;
  }
  __device__ int rows() const { return kThreads / lanes; }

  __device__ __forceinline__ void add(const S* values, int valid, int dim, const Shared<S, kHeads, kAligned>& shared) {
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[j][e] *= shared.correction[j];
    }
    if (column >= dim) return;
    const int step = rows();
#pragma unroll 4
    for (int t = row; t < valid; t += step) {
      const S* const from = values + t * dim + column;
      if constexpr (kAligned) {
        const Piece<S> piece = read_piece(from);
#pragma unroll
        for (int j = 0; j < kHeads; ++j) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) sum[j][e] = fmaf(shared.weights[j][t], piece[e], sum[j][e]);
        }
      } else {
        const float x = read_one(from);
#pragma unroll
        for (int j = 0; j < kHeads; ++j) sum[j][0] = fmaf(shared.weights[j][t], x, sum[j][0]);
      }
    }
  }

  // Writes the sums to shared memory, for all rows of threads. Waits before and after.
  __device__ __forceinline__ void store(int dim, Shared<S, kHeads, kAligned>& shared) const {
    __syncthreads();
    if (column < dim) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
#pragma unroll
        for (int j = 0; j < kHeads; ++j) shared.sums[row * dim + column + e][j] = sum[j][e];
      }
    }
    __syncthreads();
  }
};

// Computes a part for the query heads first to first + kHeads − 1 of a group, and writes their entries.
template <class S, int kHeads, bool kAligned>
__device__ __forceinline__ void compute_part(const AttentionStep<S>& p, const Plan& plan, const Work& work, int part,
                                             int first, int heads, float* entries,
                                             Shared<S, kHeads, kAligned>& shared) {
  const int thread = static_cast<int>(threadIdx.x), dim = static_cast<int>(p.dim());
  if (thread < kHeads) shared.largest[thread] = -INFINITY, shared.sum[thread] = 0;
  ValueSums<S, kHeads, kAligned> values(dim);
  const int end = work.end_token(part);
  for (int token = work.first_token(part); token < end; token += kBlock) {
    const int valid = min(kBlock, end - token);
    compute_scores(p, keys_of(p, work, token), valid, shared);
    __syncthreads();
    weigh(valid, shared);
    __syncthreads();
    values.add(values_of(p, work, token), valid, dim, shared);
  }
  values.store(dim, shared);
  for (int i = thread; i < heads * dim; i += kThreads) {
    const int j = i / dim, c = i % dim;
    float sum = 0;
    for (int r = 0; r < values.rows(); ++r) sum += shared.sums[r * dim + c][j];
    float* const entry = entries + (first + j) * kMostParts * plan.entry_floats + part * plan.entry_floats;
    entry[c] = sum;
    if (c == 0) {
      entry[plan.entry_floats - 2] = shared.largest[j];
      entry[plan.entry_floats - 1] = shared.sum[j];
    }
  }
  __syncthreads();
}

// Adds the parts of the query heads first to first + heads − 1 of a group, applies the gate and writes the outputs.
template <class S, int kHeads, bool kAligned>
__device__ __forceinline__ void combine(const AttentionStep<S>& p, const Plan& plan, const Work& work, int first,
                                        int heads, const float* entries, Shared<S, kHeads, kAligned>& shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int dim = static_cast<int>(p.dim()), quads = (dim + 3) / 4;
  static_assert(kMostParts == 2 * 32 && kMostParts <= kBlock);
  if (warp < heads) {
    const float* const entry = entries + (first + warp) * kMostParts * plan.entry_floats + plan.entry_floats - 2;
    float2 own[2];
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = lane + 32 * i;
      own[i] = part < work.parts ? __ldcg(reinterpret_cast<const float2*>(entry + part * plan.entry_floats))
                                 : float2{-INFINITY, 0};
      most = fmaxf(most, own[i].x);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffU, most, offset));
    const float a = expf(own[0].x - most), b = expf(own[1].x - most);
    const float all = warp_sum(fmaf(a, own[0].y, b * own[1].y));
    shared.weights[warp][lane] = a / all;
    shared.weights[warp][lane + 32] = b / all;
  }
  __syncthreads();
  for (int i = thread; i < heads * quads; i += kThreads) {
    const int j = i / quads, c = i % quads * 4, h = work.group * static_cast<int>(p.shape.group()) + first + j;
    const float* const entry = entries + (first + j) * kMostParts * plan.entry_floats + c;
    float4 sum{0, 0, 0, 0};
#pragma unroll 8
    for (int part = 0; part < work.parts; ++part) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(entry + part * plan.entry_floats));
      sum = accumulated(sum, x, shared.weights[j][part]);
    }
    const float o[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (c + e >= dim) continue;
      const float gate = p.gated ? sigmoid(__ldcg(p.qkv.at(work.row, p.gate_column(h) + c + e))) : 1.0F;
      *p.o.at(work.row, h * dim + c + e) = o[e] * gate;
    }
  }
  __syncthreads();
}

// Writes zeros for an entry without a text.
template <class S>
__device__ __forceinline__ void write_zeros(const AttentionStep<S>& p, const Work& work) {
  const int count = static_cast<int>(p.shape.group() * p.dim());
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    *p.o.at(work.row, work.group * count + i) = 0;
  }
}

// Returns whether this thread block is the last one of its text and head that has written its parts.
template <class S>
__device__ __forceinline__ bool arrives_last(const AttentionStep<S>& p, const Plan& plan, const Work& work,
                                             bool* last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    std::int32_t* const arrivals = p.arrivals.at(work.row * p.shape.key_value_heads + work.group);
    const int others = min(plan.blocks, work.parts) - 1;
    *last = atomicAdd(arrivals, 1) == others;
    if (*last) *arrivals = 0;
  }
  __syncthreads();
  if (*last) __threadfence();
  return *last;
}

template <class S, int kHeads, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kHeads>)
    attention_step_kernel(const __grid_constant__ AttentionStep<S> p, const __grid_constant__ Plan plan,
                          float* __restrict__ all_entries) {
  __shared__ __align__(16) Shared<S, kHeads, kAligned> shared;
  let_next_kernel_begin();
  const Work work(p, plan);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (work.slot < 0) {
    wait_for_kernels();
    if (work.first_part == 0) write_zeros(p, work);
    return;
  }
  if (work.first_part >= work.parts) return;
  prefetch_part(p, work);
  for (int i = thread; i < p.rotary / 2; i += kThreads) {
    double sine, cosine;
    sincos(static_cast<double>(work.position) * pow(p.theta, -2.0 * i / static_cast<double>(p.rotary)), &sine, &cosine);
    shared.cos[i] = static_cast<float>(cosine);
    shared.sin[i] = static_cast<float>(sine);
  }
  __syncthreads();
  wait_for_kernels();

  const int dim = static_cast<int>(p.dim()), group = static_cast<int>(p.shape.group());
  const bool together = p.q_norm.extent[0] != dim || p.k_norm.extent[0] != dim;
  if (together) sum_squares(p, work.row, reinterpret_cast<float(*)[2]>(shared.scores), shared.squares);
  float* const entries = all_entries + static_cast<std::int64_t>(work.row * p.shape.key_value_heads + work.group) *
                                           group * kMostParts * plan.entry_floats;
  const bool writes = (work.parts - 1) % plan.blocks == work.first_part;
  for (int first = 0; first < group; first += kHeads) {
    const int heads = min(kHeads, group - first);
    if (warp < kHeads) {
      const int h = work.group * group + first + min(warp, heads - 1);
      prepare_head<kHeads>(p, p.qkv.at(work.row, p.query_column(h)), p.q_norm.at(together ? h * dim : 0),
                           together ? shared.squares[0] : -1.0F, p.q_norm.extent[0], plan.scale, shared.cos, shared.sin,
                           &shared.q[0][warp], lane);
    }
    if (writes && first == 0) {
      if (warp == kWarps - 1) {
        prepare_head<1>(p, p.qkv.at(work.row, p.key_column(work.group)), p.k_norm.at(together ? work.group * dim : 0),
                        together ? shared.squares[1] : -1.0F, p.k_norm.extent[0], 1.0F, shared.cos, shared.sin,
                        shared.key, lane);
      }
      __syncthreads();
      write_token(p, work, shared.key);
    }
    __syncthreads();
    for (int part = work.first_part; part < work.parts; part += plan.blocks) {
      compute_part(p, plan, work, part, first, heads, entries, shared);
    }
  }
  if (!arrives_last(p, plan, work, &shared.last)) return;
  for (int first = 0; first < group; first += kHeads) {
    combine(p, plan, work, first, min(kHeads, group - first), entries, shared);
  }
}

template <class S, int kHeads, bool kAligned>
void launch(const AttentionStep<S>& p, const Workspace& workspace, cudaStream_t stream) {
  const std::int64_t pairs = p.qkv.extent[0] * p.shape.key_value_heads;
  const std::int64_t wanted = 4 * multiprocessors();
  const auto blocks = static_cast<int>(std::clamp<std::int64_t>((wanted + pairs - 1) / pairs, 1, kMostParts));
  const Plan plan{blocks, entry_floats(p), static_cast<float>(p.scale_or_default())};
  launch_early("attention_step", attention_step_kernel<S, kHeads, kAligned>, grid_of("attention_step", pairs * blocks),
               kThreads, 0, stream, p, plan, static_cast<float*>(workspace.data));
}

}  // namespace

template <class S>
std::size_t attention_step_workspace_bytes(const AttentionStep<S>& p) {
  return static_cast<std::size_t>(p.qkv.extent[0] * p.shape.heads * kMostParts * entry_floats(p)) * sizeof(float);
}

template <class S>
void attention_step(const AttentionStep<S>& p, const Workspace& workspace, cudaStream_t stream) {
  require_workspace("attention_step", workspace, attention_step_workspace_bytes(p));
  const bool aligned = p.dim() % Piece<S>::kCount == 0 && p.table.value_offset % Piece<S>::kCount == 0;
  constexpr int kTogether = 4;
  if (p.shape.group() == 1) {
    return aligned ? launch<S, 1, true>(p, workspace, stream) : launch<S, 1, false>(p, workspace, stream);
  }
  aligned ? launch<S, kTogether, true>(p, workspace, stream) : launch<S, kTogether, false>(p, workspace, stream);
}

template <class S>
std::string attention_step_refusal(const AttentionStep<S>& p) {
  if (!is_hopper()) return "it needs a Hopper GPU";
  if (p.dim() > kMostDim) return "it takes heads of at most " + std::to_string(kMostDim) + " numbers";
  return p.table.key_offset % Piece<S>::kCount == 0 ? "" : "it needs keys that begin at a multiple of 16 bytes";
}

template void attention_step(const AttentionStep<float>&, const Workspace&, cudaStream_t);
template void attention_step(const AttentionStep<bfloat16>&, const Workspace&, cudaStream_t);
template std::size_t attention_step_workspace_bytes(const AttentionStep<float>&);
template std::size_t attention_step_workspace_bytes(const AttentionStep<bfloat16>&);
template std::string attention_step_refusal(const AttentionStep<float>&);
template std::string attention_step_refusal(const AttentionStep<bfloat16>&);

}  // namespace efla::gpu
