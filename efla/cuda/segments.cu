// The exact split of sequences for few heads.
//
// A segment of chunks maps the state before it to S ← M S + N. Where there are too few heads to fill the GPU, the sweep
// first computes M and N of all segments at once (M by walking the segment's chunks with the identity as the state and
// no values), then the states before all segments follow from one product per segment, and then the sweep computes the
// outputs of all segments at once.
#include <algorithm>

#include "efla/cuda/chunk.h"
#include "efla/cuda/error.h"
#include "efla/cuda/launch.h"

namespace efla::gpu {
namespace {

constexpr int kColumns = 16, kThreads = 128;  // value columns per thread block
constexpr int kMaxKeys = static_cast<int>(kChunkMaxKeyDim);

// One thread block per sequence, value head and 16 value columns; a thread has 4 keys and 4 columns of the state.
__global__ void __launch_bounds__(kThreads) segment_states_kernel(const __grid_constant__ ChunkProblem c, int slices) {
  __shared__ float4 state[kMaxKeys][kColumns / 4];
  const int keys = static_cast<int>(c.p.shape.key_dim), values = static_cast<int>(c.p.shape.value_dim);
  const std::int64_t i_h = blockIdx.x / slices % c.p.shape.value_heads, n = blockIdx.x / slices / c.p.shape.value_heads;
  const int key = threadIdx.x / 4 * 4, part = threadIdx.x % 4, column = blockIdx.x % slices * kColumns + 4 * part;
  const bool exists = key < keys && column < values;
  if (exists) {
    const float* from = c.segment_states.at(n, i_h * (c.segments - 1), key, column);
    for (int i = 0; i < 4; ++i) {
      if (key + i < keys) state[key + i][part] = *reinterpret_cast<const float4*>(from + i * values);
    }
  }
  for (int segment = 1; segment + 1 < c.segments; ++segment) {
    __syncthreads();
    float4 sum[4] = {};
    float* at = c.segment_states.at(n, i_h * (c.segments - 1) + segment, key, column);
    if (exists) {
      const float* map = c.segment_maps.at(n, i_h * (c.segments - 2) + segment - 1, key, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (key + i < keys) sum[i] = *reinterpret_cast<const float4*>(at + i * values);
      }
#pragma unroll 4
      for (int k = 0; k < keys; k += 4) {
        float4 m[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          m[i] = key + i < keys ? *reinterpret_cast<const float4*>(map + i * keys + k) : float4{0, 0, 0, 0};
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4 x = state[k + j][part];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float f = j == 0 ? m[i].x : j == 1 ? m[i].y : j == 2 ? m[i].z : m[i].w;
            sum[i].x += f * x.x;
            sum[i].y += f * x.y;
            sum[i].z += f * x.z;
            sum[i].w += f * x.w;
          }
        }
      }
    }
    __syncthreads();
    if (!exists) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key + i >= keys) continue;
      state[key + i][part] = sum[i];
      *reinterpret_cast<float4*>(at + i * values) = sum[i];
    }
  }
}

}  // namespace

int segments_of(const DeltaShape& s) {
  // In times of a chunk of the sweep that makes outputs; the time of one that makes none is shorter, and the kernels in
  // between take as long as some chunks. Rows of keys or values that the copy engine cannot read are not cut.
  constexpr std::int64_t kMultiprocessors = 132, kMaxSegments = 8;
  const std::int64_t heads = s.sequences() * s.value_heads, chunks = chunk_slots(s) / s.sequences();
  const std::int64_t slices = (s.value_dim + 63) / 64, pairs = (s.value_dim + 127) / 128;
  if (s.key_dim % 8 != 0 || s.value_dim % 8 != 0 || s.key_dim > kChunkMaxKeyDim) return 1;
  const auto waves = [](std::int64_t blocks) { return (blocks + kMultiprocessors - 1) / kMultiprocessors; };
  std::int64_t best = 10 * waves(heads * slices) * chunks;
  int segments = 1;
  for (int i = 3; i <= kMaxSegments; ++i) {
    const std::int64_t cost =
        segment_chunks(chunks, i) * (9 * waves(heads * (pairs * (i - 1) + i - 2)) + 10 * waves(heads * slices * i)) +
        10 * (8 + 2 * i);
    if (cost < best) {
      best = cost;
      segments = i;
    }
  }
  return segments;
}

void launch_segment_states(const ChunkProblem& c, cudaStream_t stream) {
  const int slices = static_cast<int>((c.p.shape.value_dim + kColumns - 1) / kColumns);
  segment_states_kernel<<<grid_of("chunk_fwd", c.p.shape.sequences() * c.p.shape.value_heads * slices), kThreads, 0,
                          stream>>>(c, slices);
  check_launch("segment_states");
}

}  // namespace efla::gpu
