// Decode: the token recurrence of rule/problem.h over one to eight tokens, bound by the reading and writing of states.
//
// An item is a batch entry, a value head and a slice of value columns. Eight threads beside each other own the columns
// of the slice in pieces of 16 bytes, and each group of eight threads every kGroups-th row [V] of the state, which
// stays in registers over all tokens. Thread blocks stay and go from item to item: every thread copies its own pieces
// of the next two items to shared memory while it computes one, because bytes in flight decide the speed, and one more
// warp reads the next item's tokens.
#include <algorithm>

#include "efla/base/error.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/delta.h"
#include "efla/cuda/recurrent/token.cuh"

namespace efla::gpu {
namespace {

template <int KD, class S>
struct Layout {
  static constexpr int kThreads = KD > 128 ? 256 : 128;  // with a part of the state
  static constexpr int kWarps = kThreads / 32, kGroups = kThreads / 8;
  static constexpr int kPiece = 16 / sizeof(S), kSlice = 8 * kPiece;  // columns per piece and per thread block
  static constexpr int kRows = KD / kGroups;                          // rows per thread
  static constexpr int kStages = 3;
};

// What a token brings.
template <int KD, class S>
struct Token {
  float q[KD], k[KD], decay[KD];
  float v[Layout<KD, S>::kSlice];
  float a, b, q_dot_k, unused;
};

template <int KD, class S>
struct Memory {
  using L = Layout<KD, S>;
  uint4 pieces[L::kStages][L::kRows][L::kThreads];  // every thread's own
  // S̃ᵀk and S̃ᵀq of the rows of each warp; by the parity of the token, so that one barrier per token is enough
  float sums[2][L::kWarps][2][L::kSlice];

  // The tokens of the item that is computed and of the next, two times the number of tokens, are behind.
  static constexpr int bytes(std::int64_t tokens) {
    return static_cast<int>(sizeof(Memory) + 2 * tokens * sizeof(Token<KD, S>));
  }
};

// Fills what token t brings; run by one warp.
template <int KD, class T, class S>
__device__ __forceinline__ void stage_token(const DeltaSteps<T, S>& p, std::int64_t i_b, std::int64_t t,
                                            std::int64_t i_h, std::int64_t first, int lane, Token<KD, S>& token) {
  // All of the token's inputs are read before any is used, so that one wait for memory is enough.
  TokenRows<KD> rows = read_rows<KD>(p.q, p.k, i_b, t, i_h / p.shape.group(), lane);
  const float beta = to_float(p.beta(i_b, t, i_h));
  constexpr int kValues = Layout<KD, S>::kSlice / 32;
  float g[KD / 32], v[kValues];
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    const int channel = p.rule.decay == Decay::channel ? lane + 32 * i : 0;
    g[i] = p.g && channel < p.shape.key_dim ? p.g(i_b, t, i_h, channel) : 0.0F;
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const std::int64_t column = first + lane + 32 * i;
    v[i] = column < p.shape.value_dim ? to_float(p.v(i_b, t, i_h, column)) : 0.0F;
  }
  finish_rows(rows, p.rule.qk_l2norm);
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    const int key = lane + 32 * i;
    token.q[key] = rows.q[i];
    token.k[key] = rows.k[i];
    token.decay[key] = expf(g[i]);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) token.v[lane + 32 * i] = v[i];
  const float q_dot_k = dot_rows(rows.q, rows.k);
  if (lane == 0) {
    const float alpha = gain_alpha(p.rule.step, beta, rows.lambda);
    token.a = static_cast<float>(p.rule.step.erase_scale) * alpha;
    token.b = static_cast<float>(p.rule.step.write_scale) * alpha;
    token.q_dot_k = q_dot_k;
  }
}

__device__ __forceinline__ void widen(const uint4& piece, float (&x)[4]) {
  x[0] = __uint_as_float(piece.x);
  x[1] = __uint_as_float(piece.y);
  x[2] = __uint_as_float(piece.z);
  x[3] = __uint_as_float(piece.w);
}
__device__ __forceinline__ void widen(const uint4& piece, float (&x)[8]) {
  const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = low_bf16(words[i]);
    x[2 * i + 1] = high_bf16(words[i]);
  }
}
__device__ __forceinline__ uint4 narrow(const float (&x)[4]) {
  return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
}
__device__ __forceinline__ uint4 narrow(const float (&x)[8]) {
  return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}

// The place of a slice of a state. Of a batch entry without a state, `state` is null.
template <class S>
struct Item {
  std::int64_t i_b = 0;
  int i_h = 0, first = 0;  // first column
  S* state = nullptr;      // the thread's first piece
};

// Asks for the pieces of a thread: copies those that can be copied whole, reads the others element by element. Elements
// that the state does not have become zeros.
template <int KD, bool kAligned, class T, class S>
__device__ __forceinline__ void start_pieces(const DeltaSteps<T, S>& p, const Item<S>& item, int thread,
                                             uint4 (*pieces)[Layout<KD, S>::kThreads]) {
  using L = Layout<KD, S>;
  if (!item.state) return;
  const std::int64_t step = L::kGroups * p.states.stride[2];
  const int columns = static_cast<int>(p.shape.value_dim) - item.first - thread % 8 * L::kPiece;
#pragma unroll
  for (int i = 0; i < L::kRows; ++i) {
    const bool exists = thread / 8 + i * L::kGroups < p.shape.key_dim && columns > 0;
    const S* from = item.state + i * step;
    if constexpr (kAligned) {
      copy_async_16(shared_address(&pieces[i][thread]), exists ? from : p.states.data, exists ? 16 : 0);
    } else {
      float x[L::kPiece];
#pragma unroll
      for (int j = 0; j < L::kPiece; ++j) x[j] = exists && j < columns ? to_float(from[j * p.states.stride[3]]) : 0.0F;
      pieces[i][thread] = narrow(x);
    }
  }
}

// Computes the tokens of an item and writes its state.
template <int KD, bool kAligned, class T, class S>
__device__ __forceinline__ void compute(const DeltaSteps<T, S>& p, const Item<S>& item, float scale, int thread,
                                        const uint4 (*pieces)[Layout<KD, S>::kThreads], const Token<KD, S>* tokens,
                                        float (*sums)[Layout<KD, S>::kWarps][2][Layout<KD, S>::kSlice]) {
  using L = Layout<KD, S>;
  constexpr int kPiece = L::kPiece, kRows = L::kRows;
  const int warp = thread / 32, lane = thread % 32, own = thread % 8 * kPiece, count = static_cast<int>(p.shape.tokens);
  const int columns = static_cast<int>(p.shape.value_dim) - item.first - own;
  if (!item.state) {
    for (int t = 0; t < count && thread < 8; ++t) {
      for (int j = 0; j < min(kPiece, columns); ++j)
        p.o(item.i_b, t, item.i_h, item.first + own + j) = from_state<T>(0.0F);
    }
    return;
  }
  float s[kRows][kPiece];
#pragma unroll
  for (int i = 0; i < kRows; ++i) widen(pieces[i][thread], s[i]);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    const Token<KD, S>& token = tokens[t];
    float error[kPiece] = {}, out[kPiece] = {};  // S̃ᵀk and S̃ᵀq
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int key = thread / 8 + i * L::kGroups;
      const float decay = token.decay[key], k = token.k[key], q = token.q[key];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        s[i][j] *= decay;
        error[j] += s[i][j] * k;
        out[j] += s[i][j] * q;
      }
    }
    auto& of_token = sums[t % 2];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      error[j] += __shfl_xor_sync(0xffffffffU, error[j], 8);
      out[j] += __shfl_xor_sync(0xffffffffU, out[j], 8);
      error[j] += __shfl_xor_sync(0xffffffffU, error[j], 16);
      out[j] += __shfl_xor_sync(0xffffffffU, out[j], 16);
    }
    if (lane < 8) {
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        of_token[warp][0][own + j] = error[j];
        of_token[warp][1][own + j] = out[j];
      }
    }
    named_barrier(1, L::kThreads);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) error[j] = 0;
#pragma unroll
    for (int w = 0; w < L::kWarps; ++w) {
#pragma unroll
      for (int j = 0; j < kPiece; ++j) error[j] += of_token[w][0][own + j];
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) error[j] = token.b * token.v[own + j] - token.a * error[j];  // u
    if (thread < 8) {
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < L::kWarps; ++w) sum += of_token[w][1][own + j];
        if (j < columns) {
          p.o(item.i_b, t, item.i_h, item.first + own + j) = from_state<T>(scale * (sum + token.q_dot_k * error[j]));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float k = token.k[thread / 8 + i * L::kGroups];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) s[i][j] += k * error[j];
      if constexpr (sizeof(S) == 2) widen(narrow(s[i]), s[i]);
    }
  }
  const std::int64_t step = L::kGroups * p.states.stride[2];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (thread / 8 + i * L::kGroups >= p.shape.key_dim) break;
    S* to = item.state + i * step;
    if constexpr (kAligned) {
      if (columns > 0) __stcs(reinterpret_cast<uint4*>(to), narrow(s[i]));
    } else {
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        if (j < columns) to[j * p.states.stride[3]] = from_state<S>(s[i][j]);
      }
    }
  }
}

template <int KD, bool kAligned, class T, class S>
__global__ void __launch_bounds__(Layout<KD, S>::kThreads + 32, 1)
    step_kernel(const __grid_constant__ DeltaSteps<T, S> p, int items, int slices, float scale) {
  using L = Layout<KD, S>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory<KD, S>*>(shared);
  auto* tokens = reinterpret_cast<Token<KD, S>*>(shared + sizeof(memory));
  const int thread = threadIdx.x, count = static_cast<int>(p.shape.tokens),
            heads = static_cast<int>(p.shape.value_heads);
  const auto item_of = [&](int index) {
    Item<S> item;
    if (index >= items) return item;
    item.first = index % slices * L::kSlice;
    item.i_h = index / slices % heads;
    item.i_b = index / slices / heads;
    const std::int64_t slot = p.slots ? p.slots(item.i_b) : item.i_b;
    if (slot >= 0) item.state = p.states.at(slot, item.i_h, thread / 8, item.first + thread % 8 * L::kPiece);
    return item;
  };
  const int stride = static_cast<int>(gridDim.x);
  int index = static_cast<int>(blockIdx.x);
  if (thread >= L::kThreads) {  // the warp that brings the tokens, one item ahead
    for (int turn = 0;; ++turn, index += stride) {
      if (index < items) {
        const std::int64_t i_b = index / slices / heads;
        for (int t = 0; t < count; ++t) {
          stage_token(p, i_b, t, index / slices % heads, index % slices * L::kSlice, thread % 32,
                      tokens[turn % 2 * count + t]);
        }
      }
      __syncthreads();
      if (index >= items) return;
    }
  }
  Item<S> item = item_of(index), next = item_of(index + stride);
  start_pieces<KD, kAligned>(p, item, thread, memory.pieces[0]);
  copy_async_commit();
  start_pieces<KD, kAligned>(p, next, thread, memory.pieces[1]);
  copy_async_commit();
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; index < items; ++turn, index += stride) {
    const Item<S> after = item_of(index + 2 * stride);
    start_pieces<KD, kAligned>(p, after, thread, memory.pieces[(turn + 2) % L::kStages]);
    copy_async_commit();
    copy_async_wait<2>();
    compute<KD, kAligned>(p, item, scale, thread, memory.pieces[turn % L::kStages], tokens + turn % 2 * count,
                          memory.sums);
    item = next;
    next = after;
    __syncthreads();
  }
}

template <int KD, bool kAligned, class T, class S>
void launch(const DeltaSteps<T, S>& p, cudaStream_t stream) {
  using L = Layout<KD, S>;
  const std::int64_t slices = (p.shape.value_dim + L::kSlice - 1) / L::kSlice;
  const unsigned items = grid_of("step_fwd", p.shape.batch * p.shape.value_heads * slices);
  const auto kernel = step_kernel<KD, kAligned, T, S>;
  const int bytes = Memory<KD, S>::bytes(p.shape.tokens);
  int device = 0, processors = 0, blocks = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, L::kThreads + 32, bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const unsigned grid = std::min(items, static_cast<unsigned>(processors * std::max(blocks, 1)));
  kernel<<<grid, L::kThreads + 32, bytes, stream>>>(p, static_cast<int>(items), static_cast<int>(slices),
                                                    static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
  check_launch("step_fwd");
}

template <int KD, class T, class S>
void launch(const DeltaSteps<T, S>& p, cudaStream_t stream) {
  if (has_aligned_rows(p.states)) return launch<KD, true>(p, stream);
  launch<KD, false>(p, stream);
}

// A view of [B, …] as one of [B, 1, …].
template <class T, int Rank>
View<T, Rank + 1> with_token_axis(const View<T, Rank>& view) {
  View<T, Rank + 1> tokens{view.data, {view.extent[0], 1}, {view.stride[0], 0}};
  for (int d = 1; d < Rank; ++d) {
    tokens.extent[d + 1] = view.extent[d];
    tokens.stride[d + 1] = view.stride[d];
  }
  return tokens;
}

}  // namespace

template <class T, class S>
void step_fwd(const DeltaSteps<T, S>& p, cudaStream_t stream) {
  require_key_dim("step_fwd", p.shape.key_dim);
  if (p.shape.tokens < 1 || p.shape.tokens > kMaxStepTokens) {
    throw Error("step_fwd", "tokens T", std::to_string(p.shape.tokens), "1 to " + std::to_string(kMaxStepTokens));
  }
  if (p.shape.key_dim <= 64) return launch<64>(p, stream);
  if (p.shape.key_dim <= 128) return launch<128>(p, stream);
  launch<256>(p, stream);
}

template <class T, class S>
void step_fwd(const DeltaStep<T, S>& p, cudaStream_t stream) {
  step_fwd(DeltaSteps<T, S>{p.shape, p.rule, with_token_axis(p.q), with_token_axis(p.k), with_token_axis(p.v),
                            with_token_axis(p.beta), with_token_axis(p.g), p.slots, p.state, with_token_axis(p.o)},
           stream);
}

#define EFLA_INSTANTIATE(T, S)                                   \
  template void step_fwd(const DeltaSteps<T, S>&, cudaStream_t); \
  template void step_fwd(const DeltaStep<T, S>&, cudaStream_t);
EFLA_INSTANTIATE(float, float)
EFLA_INSTANTIATE(float, bfloat16)
EFLA_INSTANTIATE(bfloat16, float)
EFLA_INSTANTIATE(bfloat16, bfloat16)
#undef EFLA_INSTANTIATE

}  // namespace efla::gpu
