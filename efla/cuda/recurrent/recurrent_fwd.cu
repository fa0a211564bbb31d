// The token recurrence of rule/problem.h in float32 (docs/ops/delta_rule.md). One thread block per sequence, value head
// and slice of kSlice value columns reads one token after another and keeps its part of the state in registers: a
// thread has kColumns columns and every kParts-th group of four keys (token.cuh). "The ladder" in
// docs/design/2026-11-cuda-forward.md explains when it is used.
#include "efla/cuda/common/launch.h"
#include "efla/cuda/delta.h"
#include "efla/cuda/recurrent/token.cuh"

namespace efla::gpu {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kSlice = kWarps * 32 / kParts * kColumns;  // value columns per thread block
constexpr int kStage = 16;                               // tokens that are in shared memory at once

template <int KD, bool kChannel, bool kTwoKeys>
using Stage = TokenStage<KD, kChannel, kTwoKeys, kSlice, kStage>;

template <int KD, bool kChannel, bool kTwoKeys, class T>
__global__ void __launch_bounds__(kThreads, 1)
    recurrent_fwd_kernel(const __grid_constant__ DeltaForward<T> p, int slices, float scale) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& stage = *reinterpret_cast<Stage<KD, kChannel, kTwoKeys>*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x % slices) * kSlice;
  const std::int64_t i_h = blockIdx.x / slices % p.shape.value_heads;
  const std::int64_t n = blockIdx.x / slices / p.shape.value_heads;
  const Sequence at = sequence_of(p, n);

  Columns<KD> columns;
  columns.part = lane % kParts;
  const int own = (warp * (32 / kParts) + lane / kParts) * kColumns;  // the thread's first column in the slice
  columns.column = first + own;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < columns.kKeys; ++i) columns.s[j][i] = 0;
  }
  if (p.initial_state) {
    columns.for_each(p.shape.key_dim, p.shape.value_dim, [&](float& s, std::int64_t key, std::int64_t column) {
      s = p.initial_state(n, i_h, key, column);
    });
  }
  for (std::int64_t start = at.begin; start < at.end; start += kStage) {
    const int rows = static_cast<int>(min(std::int64_t{kStage}, at.end - start));
    __syncthreads();
    for (int r = warp; r < rows; r += kWarps) stage_token<T>(p, at.i_b, start + r, i_h, first, r, lane, stage);
    __syncthreads();
    for (int r = 0; r < rows; ++r) {
      if (p.chunk_states && (start + r - at.begin) % at.interval == 0) {
        columns.for_each(p.shape.key_dim, p.shape.value_dim, [&](float& s, std::int64_t key, std::int64_t column) {
          p.chunk_states(at.i_b, at.chunk(start + r), i_h, key, column) = s;
        });
      }
      float erased[kColumns] = {}, o[kColumns] = {};
      float k[Columns<KD>::kKeys];
#pragma unroll
      for (int i = 0; i < columns.kKeys; ++i) {
        const int key = columns.key(i);
        k[i] = stage.k[r][key];
        const float decay = stage.decay[r][kChannel ? key : 0];
        const float erase_key = kTwoKeys ? stage.erasing(r)[key] : k[i];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          columns.s[j][i] *= decay;
          erased[j] += columns.s[j][i] * erase_key;
        }
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int offset = 1; offset < kParts; offset *= 2) erased[j] += __shfl_xor_sync(0xffffffffU, erased[j], offset);
        erased[j] = stage.b[r] * stage.v[r][own + j] - stage.a[r] * erased[j];
      }
#pragma unroll
      for (int i = 0; i < columns.kKeys; ++i) {
        const float q = stage.q[r][columns.key(i)];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          columns.s[j][i] += k[i] * erased[j];
          o[j] += columns.s[j][i] * q;
        }
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int offset = 1; offset < kParts; offset *= 2) o[j] += __shfl_xor_sync(0xffffffffU, o[j], offset);
        if (columns.part == 0 && columns.column + j < p.shape.value_dim) {
          p.o(at.i_b, start + r, i_h, columns.column + j) = from_state<T>(scale * o[j]);
        }
      }
    }
  }
  if (p.final_state) {
    columns.for_each(p.shape.key_dim, p.shape.value_dim,
                     [&](float& s, std::int64_t key, std::int64_t column) { p.final_state(n, i_h, key, column) = s; });
  }
}

template <int KD, bool kChannel, bool kTwoKeys, class T>
void launch(const DeltaForward<T>& p, cudaStream_t stream) {
  const std::int64_t slices = (p.shape.value_dim + kSlice - 1) / kSlice;
  const unsigned grid = grid_of("recurrent_fwd", p.shape.sequences() * p.shape.value_heads * slices);
  constexpr int kBytes = sizeof(Stage<KD, kChannel, kTwoKeys>);
  const auto kernel = recurrent_fwd_kernel<KD, kChannel, kTwoKeys, T>;
  launch_kernel("recurrent_fwd", kernel, grid, kThreads, kBytes, stream, p, static_cast<int>(slices),
                static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
}

template <int KD, bool kChannel, class T>
void launch(const DeltaForward<T>& p, cudaStream_t stream) {
  if (p.rule.two_keys) return launch<KD, kChannel, true>(p, stream);
  launch<KD, kChannel, false>(p, stream);
}

template <int KD, class T>
void launch(const DeltaForward<T>& p, cudaStream_t stream) {
  if (p.rule.decay == Decay::channel) return launch<KD, true>(p, stream);
  launch<KD, false>(p, stream);
}

}  // namespace

template <class T>
void recurrent_fwd(const DeltaForward<T>& p, cudaStream_t stream) {
  require_key_dim("recurrent_fwd", p.shape.key_dim);
  if (p.shape.key_dim <= 64) return launch<64>(p, stream);
  if (p.shape.key_dim <= 128) return launch<128>(p, stream);
  launch<256>(p, stream);
}

template void recurrent_fwd(const DeltaForward<float>&, cudaStream_t);
template void recurrent_fwd(const DeltaForward<bfloat16>&, cudaStream_t);
template void recurrent_fwd(const DeltaForward<float16>&, cudaStream_t);

}  // namespace efla::gpu
