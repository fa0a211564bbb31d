// Decode steps of four to eight tokens for float32 states with K = 64 or 128 and V a multiple of 64
// (docs/ops/delta_rule_step.md): the token recurrence of rule/problem.h. docs/design/2026-11-cuda-decode-step.md
// explains the choices.
//
// A thread block has kBlockColumns value columns of one state. Its threads read the columns directly to registers,
// where they stay for all tokens: 16 neighbouring lanes have four columns each of a row, and each half of a warp is a
// group of step_token.cuh. All reads are in progress before a thread waits for one. Meanwhile the warps prepare the
// tokens. Sums over the rows go through shared memory, with separate places for even and odd tokens, so that a token
// needs only one barrier. They are added in the order of step.cu.
#include "efla/cuda/recurrent/step_registers.h"

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/recurrent/step_token.cuh"

namespace efla::gpu {
namespace {

constexpr int kLanes = 16, kBlockColumns = 4 * kLanes, kWarps = kRowGroups / 2, kThreads = 32 * kWarps;

// Thread blocks per multiprocessor that registers must allow.
template <int KD, bool kTwoKeys>
constexpr int kBlocks = KD > 64 ? (kTwoKeys ? 3 : 4) : (kTwoKeys ? 5 : 6);

// Rows of a state per lane.
template <int KD>
constexpr int kRows = KD / kRowGroups;

template <int KD>
using Token = StepToken<KD, kBlockColumns>;

__device__ __forceinline__ float element(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Returns the sums of a lane's columns over the rows of its warp: Σ s k in the first half of a warp, Σ s q in the
// second.
template <int KD>
__device__ __forceinline__ float4 sum_rows(const float4 (&state)[kRows<KD>], const Token<KD>& token, int row,
                                           int lane) {
  float4 error{}, out{};
#pragma unroll
  for (int i = 0; i < kRows<KD>; i += 4) {
    const float4 k = *reinterpret_cast<const float4*>(&token.decayed_k[row + row_of(i)]);
    const float4 q = *reinterpret_cast<const float4*>(&token.decayed_q[row + row_of(i)]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      error = accumulated(error, state[i + c], element(k, c));
      out = accumulated(out, state[i + c], element(q, c));
    }
  }
  // Two lanes exchange sums: each keeps one sum and gives the other sum to the other lane.
  const bool second = lane >= kLanes;
  const float4 give = second ? error : out, keep = second ? out : error;
  const auto other = [](float x) { return __shfl_xor_sync(0xffffffffU, x, kLanes); };
  return {keep.x + other(give.x), keep.y + other(give.y), keep.z + other(give.z), keep.w + other(give.w)};
}

__device__ __forceinline__ float4 operator+(const float4& x, const float4& y) {
  return {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
}

// Returns the sum of of_warp(w) over the warps, in the order in which step.cu adds groups.
template <class F>
__device__ __forceinline__ auto sum_warps(F&& of_warp) {
  static_assert(kWarps == 4);
  return (of_warp(0) + of_warp(1)) + (of_warp(2) + of_warp(3));
}

template <int KD, bool kTwoKeys, class T>
__global__ void __launch_bounds__(kThreads, kBlocks<KD, kTwoKeys>)
    step_kernel(const __grid_constant__ DeltaSteps<T, float> p, int heads, int group, int blocks_per_head,
                float scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  // S̃ᵀk and S̃ᵀq per warp, for even and odd tokens.
  __shared__ __align__(16) float sums[2][2][kWarps][kBlockColumns];
  auto* tokens = reinterpret_cast<Token<KD>*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = static_cast<int>(p.shape.tokens);
  const int head = blockIdx.x / blocks_per_head, i_b = head / heads, i_h = head % heads;
  const int first = blockIdx.x % blocks_per_head * kBlockColumns;
  T* const o = p.o.at(i_b, 0, i_h, first + threadIdx.x);  // one column per thread
  const bool gives = threadIdx.x < kBlockColumns;
  const std::int64_t slot = p.slots ? p.slots(i_b) : i_b;
  const int kept = p.kept ? static_cast<int>(min(max(p.kept(i_b), std::int64_t{0}), p.shape.tokens)) : count;
  if (slot < 0) {
    for (int t = 0; t < count && gives; ++t) o[t * p.o.stride[1]] = from_state<T>(0.0F);
    return;
  }
  // Every warp prepares a token while the state is read. Tokens from number kWarps on are prepared before.
  StepTokenInputs<KD, kBlockColumns, kTwoKeys, T> in;
  for (int t = warp + (count - 1) / kWarps * kWarps; t >= 0; t -= kWarps) {
    if (t >= count) continue;
    in = read_token<KD, kBlockColumns, kTwoKeys>(p, i_b, t, i_h, i_h / group, first, lane);
    if (t >= kWarps) finish_token(p.rule, in, lane, tokens[t]);
  }
  const int half = lane / kLanes, row = 4 * (2 * warp + half), own = lane % kLanes * 4;
  float* const place = p.states.at(slot, i_h, row, first + own);
  float4 state[kRows<KD>];
#pragma unroll
  for (int i = 0; i < kRows<KD>; ++i) {
    state[i] = *reinterpret_cast<const float4*>(place + row_of(i) * p.states.stride[2]);
  }
  if (warp < count) finish_token(p.rule, in, lane, tokens[warp]);
  __syncthreads();
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    const Token<KD>& token = tokens[t];
    auto& of_token = sums[t % 2];
    *reinterpret_cast<float4*>(&of_token[half][warp][own]) = sum_rows<KD>(state, token, row, lane);
    __syncthreads();
    if (gives) {
      const auto& [errors, outs] = of_token;
      const float error = sum_warps([&](int w) { return errors[w][threadIdx.x]; });
      const float out = sum_warps([&](int w) { return outs[w][threadIdx.x]; });
      const float u = fmaf(-token.a, error, token.v[threadIdx.x]);
      o[t * p.o.stride[1]] = from_state<T>(scale * fmaf(token.q_dot_k, u, out));
    }
    if (t + 1 == count && kept < count) return;
    const float4 error = sum_warps([&](int w) { return *reinterpret_cast<const float4*>(&of_token[0][w][own]); });
    const float4 u = accumulated(*reinterpret_cast<const float4*>(&token.v[own]), error, -token.a);
#pragma unroll
    for (int i = 0; i < kRows<KD>; i += 4) {
      const float4 k = *reinterpret_cast<const float4*>(&token.k[row + row_of(i)]);
      const float4 decay = *reinterpret_cast<const float4*>(&token.decay[row + row_of(i)]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float4& s = state[i + c];
        const float d = element(decay, c);
        s = accumulated({__fmul_rn(d, s.x), __fmul_rn(d, s.y), __fmul_rn(d, s.z), __fmul_rn(d, s.w)}, u, element(k, c));
      }
    }
    if (t + 1 == kept) {
#pragma unroll
      for (int i = 0; i < kRows<KD>; ++i) {
        *reinterpret_cast<float4*>(place + row_of(i) * p.states.stride[2]) = state[i];
      }
    }
  }
}

template <int KD, bool kTwoKeys, class T>
void launch(const DeltaSteps<T, float>& p, cudaStream_t stream) {
  static_assert(kThreads >= kBlockColumns);
  // More shared memory than the default would need an attribute of the kernel.
  static_assert(kMaxStepTokens * sizeof(Token<KD>) + 4 * kWarps * kBlockColumns * sizeof(float) <= 48 * 1024);
  const std::int64_t blocks_per_head = p.shape.value_dim / kBlockColumns;
  const int bytes = static_cast<int>(p.shape.tokens * sizeof(Token<KD>));
  step_kernel<KD, kTwoKeys, T>
      <<<grid_of("step_fwd", p.shape.batch * p.shape.value_heads * blocks_per_head), kThreads, bytes, stream>>>(
          p, static_cast<int>(p.shape.value_heads), static_cast<int>(p.shape.group()),
          static_cast<int>(blocks_per_head), static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
  check_launch("step_fwd");
}

template <int KD, class T>
void launch(const DeltaSteps<T, float>& p, cudaStream_t stream) {
  return p.rule.two_keys ? launch<KD, true>(p, stream) : launch<KD, false>(p, stream);
}

}  // namespace

template <class T>
bool takes_step_in_registers(const DeltaSteps<T, float>& p) {
  const bool keys = p.shape.key_dim == 64 || p.shape.key_dim == 128;
  return p.shape.tokens >= kFewestRegisterTokens && keys && p.shape.value_dim % kBlockColumns == 0 &&
         has_aligned_rows(p.states);
}

template <class T>
void step_in_registers(const DeltaSteps<T, float>& p, cudaStream_t stream) {
  return p.shape.key_dim == 64 ? launch<64>(p, stream) : launch<128>(p, stream);
}

template bool takes_step_in_registers(const DeltaSteps<float, float>&);
template bool takes_step_in_registers(const DeltaSteps<bfloat16, float>&);
template bool takes_step_in_registers(const DeltaSteps<float16, float>&);
template void step_in_registers(const DeltaSteps<float, float>&, cudaStream_t);
template void step_in_registers(const DeltaSteps<bfloat16, float>&, cudaStream_t);
template void step_in_registers(const DeltaSteps<float16, float>&, cudaStream_t);

}  // namespace efla::gpu
