// Decode steps (docs/ops/delta_rule_step.md): the token recurrence of rule/problem.h over one to eight tokens. Their
// time is the reading and writing of the states. step_registers.cu has the kernel for four tokens or more and float32
// states with K = 64 or 128 and V a multiple of 64; this kernel takes every size.
// docs/design/2026-11-cuda-decode-step.md explains both.
//
// A thread block has kColumns value columns of one state. It copies them to shared memory in whole rows, because memory
// is fast in pieces of 128 bytes and more. Meanwhile each warp prepares a token. Then every warp computes its own slice
// of the columns: four neighbouring lanes have one piece each of a row, and each of the eight groups of four lanes has
// four rows of every 32. The last token's update is computed while the state is written. If fewer tokens are kept, the
// state is written earlier.
#include "efla/base/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/delta.h"
#include "efla/cuda/recurrent/step_registers.h"
#include "efla/cuda/recurrent/step_token.cuh"

namespace efla::gpu {
namespace {

template <int KD, class S>
struct Layout {
  static constexpr int kPiece = 16 / sizeof(S);            // columns per lane
  static constexpr int kLanes = 4, kGroups = 32 / kLanes;  // neighbouring lanes with a row; groups of lanes per warp
  static constexpr int kRows = KD / kGroups;               // rows per lane
  static constexpr int kSlice = kLanes * kPiece;           // columns per warp
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kPieces = kLanes * kWarps, kColumns = kPieces * kPiece;  // pieces and columns per thread block
  static constexpr int kStep = kThreads / kPieces;  // rows that a thread block copies at once
  // Thread blocks per multiprocessor that registers must allow.
  template <bool kTwoKeys>
  static constexpr int kBlocks = KD > 128   ? 1
                                 : kTwoKeys ? 5
                                            : 6;
  static_assert(kGroups == kRowGroups && kGroups >= kPiece && kStep % 8 == 0);
};

template <int KD, class S>
using Token = StepToken<KD, Layout<KD, S>::kColumns>;

// The shared memory of a thread block; the tokens follow.
template <int KD, class S>
struct Memory {
  uint4 pieces[KD * Layout<KD, S>::kPieces];
  float u[Layout<KD, S>::kColumns];
  // Returns the index of a piece. Neighbouring lanes and the next group, four rows below, use other banks.
  __device__ static int index(int row, int piece) { return row * Layout<KD, S>::kPieces + (piece ^ (row & 4)); }
  // Returns the bytes with `tokens` tokens.
  static constexpr int bytes(std::int64_t tokens) {
    return static_cast<int>(sizeof(Memory) + tokens * sizeof(Token<KD, S>));
  }
};

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
    x[2 * i] = low_of<bfloat16>(words[i]);
    x[2 * i + 1] = high_of<bfloat16>(words[i]);
  }
}
// Converts a piece by other instructions, so that the compiler does not keep the results of the first conversion.
__device__ __forceinline__ void widen_again(const uint4& piece, float (&x)[4]) { widen(piece, x); }
__device__ __forceinline__ void widen_again(const uint4& piece, float (&x)[8]) {
  const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(__byte_perm(words[i], 0, 0x1044));
    x[2 * i + 1] = __uint_as_float(__byte_perm(words[i], 0, 0x3244));
  }
}
__device__ __forceinline__ uint4 narrow(const float (&x)[4]) {
  return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
}
__device__ __forceinline__ uint4 narrow(const float (&x)[8]) {
  return {pack<bfloat16>(x[0], x[1]), pack<bfloat16>(x[2], x[3]), pack<bfloat16>(x[4], x[5]),
          pack<bfloat16>(x[6], x[7])};
}

// Returns the lane that gets the sum of column j from sum_groups, counted from the first lane with the same columns.
template <class L>
__device__ constexpr int lane_of(int j) {
  int lane = 0;
  for (int bit = L::kLanes, half = L::kPiece / 2; half > 0; bit *= 2, half /= 2) lane += (j & half) ? bit : 0;
  return lane;
}
// Returns the column whose sum a lane gets from sum_groups.
template <class L>
__device__ __forceinline__ int column_of(int lane) {
  int column = 0;
#pragma unroll
  for (int bit = L::kLanes, half = L::kPiece / 2; half > 0; bit *= 2, half /= 2) column += (lane & bit) ? half : 0;
  return column;
}

// Returns the sum of x[column_of(lane)] over the groups of a warp. In every step two lanes exchange sums: each keeps
// half of the columns and gives the other half to the other lane.
template <class L>
__device__ __forceinline__ float sum_groups(float (&x)[L::kPiece], int lane) {
#pragma unroll
  for (int bit = L::kLanes, half = L::kPiece / 2; bit < 32; bit *= 2, half /= 2) {
    if (half == 0) {
      x[0] += __shfl_xor_sync(0xffffffffU, x[0], bit);
      continue;
    }
    const bool upper = lane & bit;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const float give = upper ? x[j] : x[j + half], keep = upper ? x[j + half] : x[j];
      x[j] = keep + __shfl_xor_sync(0xffffffffU, give, bit);
    }
  }
  return x[0];
}

// Returns u and the output, without the scale, of column column_of(lane) of a warp's slice. piece(i) is row i of the
// lane.
template <int KD, class S, class F>
__device__ __forceinline__ float2 read_out(const Token<KD, S>& token, int own, int lane, F&& piece) {
  using L = Layout<KD, S>;
  const int group = lane / L::kLanes;
  float error[L::kPiece] = {}, out[L::kPiece] = {};  // S̃ᵀk and S̃ᵀq
#pragma unroll
  for (int i = 0; i < L::kRows; i += 4) {
    const float4 k4 = *reinterpret_cast<const float4*>(&token.decayed_k[row_of(i) + 4 * group]);
    const float4 q4 = *reinterpret_cast<const float4*>(&token.decayed_q[row_of(i) + 4 * group]);
    const float k[4] = {k4.x, k4.y, k4.z, k4.w}, q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float s[L::kPiece];
      widen(piece(i + c), s);
#pragma unroll
      for (int j = 0; j < L::kPiece; ++j) {
        error[j] = fmaf(s[j], k[c], error[j]);
        out[j] = fmaf(s[j], q[c], out[j]);
      }
    }
  }
  const float u = fmaf(-token.a, sum_groups<L>(error, lane), token.v[own]);
  return {u, fmaf(token.q_dot_k, u, sum_groups<L>(out, lane))};
}

// Returns a piece of a row of the state after a token.
template <int kPiece>
__device__ __forceinline__ uint4 updated(const uint4& piece, float decay, float k, const float (&u)[kPiece]) {
  float s[kPiece];
  widen_again(piece, s);
#pragma unroll
  for (int j = 0; j < kPiece; ++j) s[j] = fmaf(k, u[j], __fmul_rn(decay, s[j]));
  return narrow(s);
}

// A thread's part of the copies between a state and shared memory: one piece of every kStep-th row.
template <int KD, bool kAligned, class S>
struct Copy {
  using L = Layout<KD, S>;
  const View<S, 4>& states;
  S* state;       // the first piece
  uint4* memory;  // its place in shared memory
  int row;        // of the first piece
  int rows;       // of the state, 0 if it does not have the piece's first column
  int columns;    // columns of the state from the piece's first column on

  static constexpr int kPieces = KD / L::kStep;

  // Calls f(state, memory, row, exists) for every piece. For rows that cannot be read in pieces this is a loop, because
  // the addresses of all elements would take too many registers.
  template <int kAtOnce = kAligned ? kPieces : 1, class F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll(kAtOnce)
    for (int i = 0; i < kPieces; ++i) {
      const int at = row + i * L::kStep;
      f(state + i * L::kStep * states.stride[2], memory + i * L::kStep * L::kPieces, at, at < rows);
    }
  }

  // Starts and commits the copies to shared memory. What the state does not have becomes zeros.
  __device__ __forceinline__ void start() const {
    for_each([&](const S* from, uint4* to, int, bool exists) {
      if constexpr (kAligned) {
        copy_async_16(shared_address(to), from, exists ? 16 : 0);
      } else {
        float x[L::kPiece];
#pragma unroll
        for (int j = 0; j < L::kPiece; ++j) x[j] = exists && j < columns ? to_float(from[j * states.stride[3]]) : 0.0F;
        *to = narrow(x);
      }
    });
    copy_async_commit();
  }

  // Writes value(row, x) to the state for every piece x of shared memory.
  template <int kAtOnce = kAligned ? kPieces : 1, class F>
  __device__ __forceinline__ void write(F&& value) const {
    for_each<kAtOnce>([&](S* to, const uint4* from, int at, bool exists) {
      if (!exists) return;
      if constexpr (kAligned) {
        store_at_once(to, value(at, *from));
      } else {
        float x[L::kPiece];
        widen(value(at, *from), x);
#pragma unroll
        for (int j = 0; j < L::kPiece; ++j) {
          if (j < columns) to[j * states.stride[3]] = from_state<S>(x[j]);
        }
      }
    });
  }
};

// Computes all tokens of a batch entry, a value head and kColumns value columns.
template <int KD, bool kAligned, bool kTwoKeys, class T, class S, class L = Layout<KD, S>>
__global__ void __launch_bounds__(L::kThreads, kAligned ? L::template kBlocks<kTwoKeys> : 1)
    step_kernel(const __grid_constant__ DeltaSteps<T, S> p, int heads, int group, int blocks_per_head, float scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory<KD, S>*>(shared);
  auto* tokens = reinterpret_cast<Token<KD, S>*>(shared + sizeof(memory));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = static_cast<int>(p.shape.tokens);
  const int head = blockIdx.x / blocks_per_head, i_b = head / heads, i_h = head % heads;
  const int first = blockIdx.x % blocks_per_head * L::kColumns;
  const auto read = [&](int t) {
    return read_token<KD, L::kColumns, kTwoKeys>(p, i_b, t, i_h, i_h / group, first, lane);
  };
  StepTokenInputs<KD, L::kColumns, kTwoKeys, T> in;
  if (warp < count) in = read(warp);
  const int own = warp * L::kSlice + lane % L::kLanes * L::kPiece + column_of<L>(lane);
  const int columns = static_cast<int>(p.shape.value_dim) - first;
  const bool sums = lane < L::kLanes * L::kPiece, gives = sums && own < columns;
  T* const o = p.o.at(i_b, 0, i_h, first + own);
  const std::int64_t slot = p.slots ? p.slots(i_b) : i_b;
  const int kept = p.kept ? static_cast<int>(min(max(p.kept(i_b), std::int64_t{0}), p.shape.tokens)) : count;
  if (slot < 0) {
    for (int t = 0; t < count && gives; ++t) o[t * p.o.stride[1]] = from_state<T>(0.0F);
    return;
  }
  const int row = threadIdx.x / L::kPieces, column = threadIdx.x % L::kPieces * L::kPiece;
  const Copy<KD, kAligned, S> copy{p.states,
                                   p.states.at(slot, i_h, row, first + column),
                                   memory.pieces + memory.index(row, column / L::kPiece),
                                   row,
                                   column < columns ? static_cast<int>(p.shape.key_dim) : 0,
                                   columns - column};
  copy.start();
  for (int t = warp; t < count; t += L::kWarps) {
    finish_token(p.rule, in, lane, tokens[t]);
    if (t + L::kWarps < count) in = read(t + L::kWarps);
  }
  copy_async_wait<0>();
  __syncthreads();
  uint4* const slice = memory.pieces + memory.index(lane / L::kLanes * 4, warp * L::kLanes + lane % L::kLanes);
  const auto piece = [&](int i) -> uint4& { return slice[row_of(i) * L::kPieces]; };
#pragma unroll 1
  for (int t = 0;; ++t) {
    const Token<KD, S>& token = tokens[t];
    const float2 result = read_out<KD, S>(token, own, lane, piece);
    if (gives) o[t * p.o.stride[1]] = from_state<T>(scale * result.y);
    if (t + 1 == count) {
      if (sums) memory.u[own] = result.x;
      break;
    }
    float u[L::kPiece];
#pragma unroll
    for (int j = 0; j < L::kPiece; ++j) {
      u[j] = __shfl_sync(0xffffffffU, result.x, lane % L::kLanes + lane_of<L>(j));
    }
#pragma unroll
    for (int i = 0; i < L::kRows; i += 4) {
      const int row = row_of(i) + lane / L::kLanes * 4;
      const float4 k = *reinterpret_cast<const float4*>(&token.k[row]);
      const float4 decay = *reinterpret_cast<const float4*>(&token.decay[row]);
      piece(i) = updated(piece(i), decay.x, k.x, u);
      piece(i + 1) = updated(piece(i + 1), decay.y, k.y, u);
      piece(i + 2) = updated(piece(i + 2), decay.z, k.z, u);
      piece(i + 3) = updated(piece(i + 3), decay.w, k.w, u);
    }
    if (t + 1 != kept) continue;
    __syncthreads();
    copy.template write<1>([](int, const uint4& x) { return x; });  // a loop, because registers are scarce
    __syncthreads();
  }
  if (kept < count) return;
  __syncthreads();
  const Token<KD, S>& last = tokens[count - 1];
  float u[L::kPiece];
#pragma unroll
  for (int j = 0; j < L::kPiece; ++j) u[j] = memory.u[column + j];
  copy.write([&](int row, const uint4& x) { return updated(x, last.decay[row], last.k[row], u); });
}

template <int KD, bool kAligned, bool kTwoKeys, class T, class S>
void launch(const DeltaSteps<T, S>& p, cudaStream_t stream) {
  using L = Layout<KD, S>;
  const std::int64_t blocks_per_head = (p.shape.value_dim + L::kColumns - 1) / L::kColumns;
  const auto kernel = step_kernel<KD, kAligned, kTwoKeys, T, S>;
  const int bytes = Memory<KD, S>::bytes(p.shape.tokens);
  launch_kernel("step_fwd", kernel, grid_of("step_fwd", p.shape.batch * p.shape.value_heads * blocks_per_head),
                L::kThreads, static_cast<std::size_t>(bytes), stream, p, static_cast<int>(p.shape.value_heads),
                static_cast<int>(p.shape.group()), static_cast<int>(blocks_per_head),
                static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
}

template <int KD, bool kAligned, class T, class S>
void launch(const DeltaSteps<T, S>& p, cudaStream_t stream) {
  return p.rule.two_keys ? launch<KD, kAligned, true>(p, stream) : launch<KD, kAligned, false>(p, stream);
}

template <int KD, class T, class S>
void launch(const DeltaSteps<T, S>& p, cudaStream_t stream) {
  if constexpr (std::is_same_v<S, float>) {
    if (takes_step_in_registers(p)) return step_in_registers(p, stream);
  }
  return has_aligned_rows(p.states) ? launch<KD, true>(p, stream) : launch<KD, false>(p, stream);
}

// Returns a view of [B, …] as a view of [B, 1, …].
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
                            p.slots,
                            p.state,
                            with_token_axis(p.o),
                            {},
                            with_token_axis(p.erase_key)},
           stream);
}

#define EFLA_INSTANTIATE(T, S)                                   \
  template void step_fwd(const DeltaSteps<T, S>&, cudaStream_t); \
  template void step_fwd(const DeltaStep<T, S>&, cudaStream_t);
EFLA_INSTANTIATE(float, float)
EFLA_INSTANTIATE(float, bfloat16)
EFLA_INSTANTIATE(bfloat16, float)
EFLA_INSTANTIATE(bfloat16, bfloat16)
EFLA_INSTANTIATE(float16, float)
EFLA_INSTANTIATE(float16, bfloat16)
#undef EFLA_INSTANTIATE

}  // namespace efla::gpu
