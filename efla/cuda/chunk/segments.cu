// The exact split of sequences for few heads.
//
// A segment of chunks maps the state before it to S ← M S + N. Where there are too few heads to fill the GPU, the sweep
// first computes the outputs of the first segment and, at once, M and N of the others (M by walking the segment's
// chunks with the identity as the state and no values), then the states before all segments follow from one product per
// segment, and then the sweep computes the outputs of the other segments at once.
#include <algorithm>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ptx.cuh"

namespace efla::gpu {
namespace {

constexpr int kColumns = 16, kThreads = 256;  // value columns per thread block
constexpr int kRows = 2;                      // keys per thread
constexpr int kMaxKeys = static_cast<int>(kChunkMaxKeyDim);

struct SegmentMemory {
  float map[2][kMaxKeys][kMaxKeys + 4];  // of the step and of the next; padded against bank conflicts
  float4 state[kMaxKeys][kColumns / 4];
};

// One thread block per sequence, value head and 16 value columns; a thread has kRows keys and 4 columns of the state.
__global__ void __launch_bounds__(kThreads) segment_states_kernel(const __grid_constant__ ChunkProblem c, int slices) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SegmentMemory*>(memory);
  const int keys = static_cast<int>(c.p.shape.key_dim), values = static_cast<int>(c.p.shape.value_dim);
  const std::int64_t i_h = blockIdx.x / slices % c.p.shape.value_heads, n = blockIdx.x / slices / c.p.shape.value_heads;
  const int key = threadIdx.x / 4 * kRows, part = threadIdx.x % 4, column = blockIdx.x % slices * kColumns + 4 * part;
  const bool exists = key < keys && column < values;
  const auto start_map = [&](int segment) {
    if (segment + 1 < c.segments) {
      const float* map = c.segment_maps.at(n, i_h * (c.segments - 2) + segment - 1);
      for (int at = 4 * static_cast<int>(threadIdx.x); at < keys * keys; at += 4 * kThreads) {
        copy_async_16(shared_address(&shared.map[segment % 2][at / keys][at % keys]), map + at, 16);
      }
    }
    copy_async_commit();
  };
  // The state after `segment`, had it begun with zeros; then the state after it.
  const auto state_of = [&](int segment) {
    return c.segment_states.at(n, i_h * (c.segments - 1) + segment, key, column);
  };
  float4 sum[kRows] = {};
  const auto read_sum = [&](int segment) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (exists) sum[i] = *reinterpret_cast<const float4*>(state_of(segment) + i * values);
    }
  };
#if __CUDA_ARCH__ >= 900
  let_next_kernel_begin();
  wait_for_kernels();
#endif
  start_map(1);
  read_sum(0);
  for (int segment = 1; segment + 1 < c.segments; ++segment) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (exists) shared.state[key + i][part] = sum[i];
    }
    start_map(segment + 1);
    read_sum(segment);
    copy_async_wait<1>();
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < keys && exists; k += 4) {
      float4 m[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) m[i] = *reinterpret_cast<const float4*>(&shared.map[segment % 2][key + i][k]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 x = shared.state[k + j][part];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float f = j == 0 ? m[i].x : j == 1 ? m[i].y : j == 2 ? m[i].z : m[i].w;
          sum[i].x += f * x.x;
          sum[i].y += f * x.y;
          sum[i].z += f * x.z;
          sum[i].w += f * x.w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (exists) *reinterpret_cast<float4*>(state_of(segment) + i * values) = sum[i];
    }
    __syncthreads();
  }
}

}  // namespace

int segments_of(const DeltaShape& s) {
  // In times of a chunk of the sweep; the kernels in between take as long as some chunks. Rows of keys or values that
  // the copy engine cannot read are not cut.
  constexpr std::int64_t kMultiprocessors = 132, kMaxSegments = 8;
  const std::int64_t heads = s.sequences() * s.value_heads, chunks = chunk_slots(s) / s.sequences();
  const std::int64_t slices = (s.value_dim + 63) / 64, pairs = (s.value_dim + 127) / 128;
  if (s.key_dim % 8 != 0 || s.value_dim % 8 != 0 || s.key_dim > kChunkMaxKeyDim) return 1;
  const auto waves = [](std::int64_t blocks) { return (blocks + kMultiprocessors - 1) / kMultiprocessors; };
  std::int64_t best = waves(heads * slices) * chunks;
  int segments = 1;
  for (int i = 3; i <= kMaxSegments; ++i) {
    const std::int64_t before = waves(heads * (slices + (pairs + 1) * (i - 2))),
                       after = waves(heads * slices * (i - 1));
    const std::int64_t cost = segment_chunks(chunks, i) * (before + after) + 7 + 2 * i;
    if (cost < best) {
      best = cost;
      segments = i;
    }
  }
  return segments;
}

void launch_segment_states(const ChunkProblem& c, cudaStream_t stream) {
  const int slices = static_cast<int>((c.p.shape.value_dim + kColumns - 1) / kColumns);
  constexpr int kBytes = sizeof(SegmentMemory);
  check(cudaFuncSetAttribute(segment_states_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "cudaFuncSetAttribute");
  launch_early("segment_states", segment_states_kernel,
               grid_of("chunk_fwd", c.p.shape.sequences() * c.p.shape.value_heads * slices), kThreads, kBytes, stream,
               c, slices);
}

}  // namespace efla::gpu
