// Decode: the token recurrence of rule/problem.h over one to eight tokens, bound by the reading and writing of states.
//
// One thread block per batch entry, value head and slice of value columns. Eight threads beside each other own the
// columns of the slice in pieces of 16 bytes, and each group of eight threads every kGroups-th row [V] of the state,
// which stays in registers over all tokens. All of a thread's pieces are requested before anything else is, because
// bytes in flight decide the speed.
#include "efla/base/error.h"
#include "efla/cuda/delta.h"
#include "efla/cuda/error.h"
#include "efla/cuda/launch.h"
#include "efla/cuda/ptx.cuh"
#include "efla/cuda/token.cuh"

namespace efla::gpu {
namespace {

template <int KD, class S>
struct Layout {
  static constexpr int kThreads = KD * sizeof(float) > 128 * sizeof(S) ? 256 : 128;
  static constexpr int kWarps = kThreads / 32, kGroups = kThreads / 8;
  static constexpr int kPiece = 16 / sizeof(S), kSlice = 8 * kPiece;  // columns per piece and per thread block
  static constexpr int kRows = KD / kGroups;                          // rows per thread
  // Per multiprocessor: as many as registers allow.
  static constexpr int kBlocks = (kRows * kPiece > 32 ? 256 : sizeof(S) == 2 ? 768 : 640) / kThreads;
};

template <int KD, class S>
struct Tokens {
  float q[kMaxStepTokens][KD], k[kMaxStepTokens][KD];
  float decay[kMaxStepTokens][KD];
  float v[kMaxStepTokens][Layout<KD, S>::kSlice];
  float a[kMaxStepTokens], b[kMaxStepTokens], q_dot_k[kMaxStepTokens];
  float sums[Layout<KD, S>::kWarps][2][Layout<KD, S>::kSlice];  // S̃ᵀk and S̃ᵀq of the rows of each warp
  float u[Layout<KD, S>::kSlice];
};

// Fills what token t brings; run by one warp.
template <int KD, class T, class S>
__device__ __forceinline__ void stage_token(const DeltaSteps<T, S>& p, std::int64_t i_b, int t, std::int64_t i_h,
                                            std::int64_t first, int lane, Tokens<KD, S>& tokens) {
  const TokenRows<KD> rows =
      read_rows<KD>(p.q, p.k, p.rule.qk_l2norm, i_b, static_cast<std::int64_t>(t), i_h / p.shape.group(), lane);
  float head_decay = 1;
  if (p.rule.decay == Decay::scalar) head_decay = expf(p.g(i_b, t, i_h, 0));
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    const int key = lane + 32 * i;
    tokens.q[t][key] = rows.q[i];
    tokens.k[t][key] = rows.k[i];
    float decay = head_decay;
    if (p.rule.decay == Decay::channel && key < p.shape.key_dim) decay = expf(p.g(i_b, t, i_h, key));
    tokens.decay[t][key] = decay;
  }
  for (int j = lane; j < Layout<KD, S>::kSlice; j += 32) {
    tokens.v[t][j] = first + j < p.shape.value_dim ? to_float(p.v(i_b, t, i_h, first + j)) : 0.0F;
  }
  const float q_dot_k = dot_rows(rows.q, rows.k);
  if (lane == 0) {
    const float alpha = gain_alpha(p.rule.step, to_float(p.beta(i_b, t, i_h)), rows.lambda);
    tokens.a[t] = static_cast<float>(p.rule.step.erase_scale) * alpha;
    tokens.b[t] = static_cast<float>(p.rule.step.write_scale) * alpha;
    tokens.q_dot_k[t] = q_dot_k;
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

// The piece at `from`, of which `count` elements exist; the others are zeros.
template <bool kAligned, int kPiece, class S>
__device__ __forceinline__ uint4 read_piece(const S* from, std::int64_t stride, int count) {
  uint4 piece{0, 0, 0, 0};
  if constexpr (kAligned) {
    if (count > 0) piece = __ldcs(reinterpret_cast<const uint4*>(from));
  } else {
    float x[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) x[j] = j < count ? to_float(from[j * stride]) : 0.0F;
    piece = narrow(x);
  }
  return piece;
}

template <bool kAligned, int kPiece, class S>
__device__ __forceinline__ void write_piece(const float (&x)[kPiece], S* to, std::int64_t stride, int count) {
  if constexpr (kAligned) {
    if (count > 0) __stcs(reinterpret_cast<uint4*>(to), narrow(x));
  } else {
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      if (j < count) to[j * stride] = from_state<S>(x[j]);
    }
  }
}

template <int KD, bool kAligned, class T, class S>
__global__ void __launch_bounds__(Layout<KD, S>::kThreads, kAligned ? Layout<KD, S>::kBlocks : 1)
    step_kernel(const __grid_constant__ DeltaSteps<T, S> p, int slices, float scale) {
  using L = Layout<KD, S>;
  constexpr int kPiece = L::kPiece, kRows = L::kRows;
  __shared__ __align__(16) Tokens<KD, S> tokens;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, own = thread % 8 * kPiece;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x % slices) * L::kSlice, column = first + own;
  const std::int64_t i_h = blockIdx.x / slices % p.shape.value_heads, i_b = blockIdx.x / slices / p.shape.value_heads;
  const std::int64_t slot = p.slots ? p.slots(i_b) : i_b;
  const int count = static_cast<int>(p.shape.tokens);
  if (slot < 0) {
    for (int at = thread; at < count * L::kSlice; at += L::kThreads) {
      const std::int64_t j = first + at % L::kSlice;
      if (j < p.shape.value_dim) p.o(i_b, at / L::kSlice, i_h, j) = from_state<T>(0.0F);
    }
    return;
  }
  S* const state = p.states.at(slot, i_h, thread / 8, column);
  const std::int64_t step = L::kGroups * p.states.stride[2], stride = p.states.stride[3];
  const int rows = static_cast<int>(p.shape.key_dim - thread / 8 + L::kGroups - 1) / L::kGroups;
  const int columns = static_cast<int>(min(p.shape.value_dim - column, std::int64_t{kPiece}));
  uint4 pieces[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    pieces[i] = read_piece<kAligned, kPiece>(state + i * step, stride, i < rows ? columns : 0);
  }
  for (int t = warp; t < count; t += L::kWarps) stage_token(p, i_b, t, i_h, first, lane, tokens);
  __syncthreads();
  float s[kRows][kPiece];
#pragma unroll
  for (int i = 0; i < kRows; ++i) widen(pieces[i], s[i]);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    float error[kPiece] = {}, out[kPiece] = {};  // S̃ᵀk and S̃ᵀq
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int key = thread / 8 + i * L::kGroups;
      const float decay = tokens.decay[t][key], k = tokens.k[t][key], q = tokens.q[t][key];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        s[i][j] *= decay;
        error[j] += s[i][j] * k;
        out[j] += s[i][j] * q;
      }
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      error[j] += __shfl_xor_sync(0xffffffffU, error[j], 8);
      out[j] += __shfl_xor_sync(0xffffffffU, out[j], 8);
      error[j] += __shfl_xor_sync(0xffffffffU, error[j], 16);
      out[j] += __shfl_xor_sync(0xffffffffU, out[j], 16);
      if (lane < 8) {
        tokens.sums[warp][0][own + j] = error[j];
        tokens.sums[warp][1][own + j] = out[j];
      }
    }
    __syncthreads();
    if (thread < L::kSlice) {
      float column_error = 0, column_out = 0;
#pragma unroll
      for (int w = 0; w < L::kWarps; ++w) {
        column_error += tokens.sums[w][0][thread];
        column_out += tokens.sums[w][1][thread];
      }
      const float u = tokens.b[t] * tokens.v[t][thread] - tokens.a[t] * column_error;
      tokens.u[thread] = u;
      if (first + thread < p.shape.value_dim) {
        p.o(i_b, t, i_h, first + thread) = from_state<T>(scale * (column_out + tokens.q_dot_k[t] * u));
      }
    }
    __syncthreads();
    float u[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) u[j] = tokens.u[own + j];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float k = tokens.k[t][thread / 8 + i * L::kGroups];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) s[i][j] += k * u[j];
      if constexpr (sizeof(S) == 2) widen(narrow(s[i]), s[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    write_piece<kAligned>(s[i], state + i * step, stride, i < rows ? columns : 0);
  }
}

template <int KD, class T, class S>
void launch(const DeltaSteps<T, S>& p, cudaStream_t stream) {
  using L = Layout<KD, S>;
  const std::int64_t slices = (p.shape.value_dim + L::kSlice - 1) / L::kSlice;
  const unsigned grid = grid_of("step_fwd", p.shape.batch * p.shape.value_heads * slices);
  const auto kernel = has_aligned_rows(p.states) ? step_kernel<KD, true, T, S> : step_kernel<KD, false, T, S>;
  kernel<<<grid, L::kThreads, 0, stream>>>(p, static_cast<int>(slices),
                                           static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
  check_launch("step_fwd");
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
  step_fwd(DeltaSteps<T, S>{p.shape,
                            p.rule,
                            with_token_axis(p.q),
                            with_token_axis(p.k),
                            with_token_axis(p.v),
                            with_token_axis(p.beta),
                            with_token_axis(p.g),
                            {},
                            p.state,
                            with_token_axis(p.o)},
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
