// The product of a few rows with a weight matrix, bound by reading the weight (linear.h).
//
// A tile is 8 rows of the weight. The 8 warps of a thread block compute the same tiles, each with a slice of the
// columns, and add their sums in shared memory, always in the same order. A lane has row lane / 4 of a tile and every
// fourth piece of 16 bytes of the warp's slice, as the operand of the tensor cores wants it. It copies its pieces to
// its own part of shared memory, several tiles ahead and the first ones before the kernels before it have ended: no
// thread waits for another before the sums of its block.
#include <algorithm>
#include <type_traits>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/layers/linear.h"

namespace efla::gpu {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kTileRows = 8;
constexpr int kMostRows = 8;                     // of x
constexpr int kMostFloatRows = 4;                // with weights in float32
constexpr std::int64_t kMostBytes = 200 * 1024;  // of shared memory

template <class W>
constexpr int kPiece = 16 / sizeof(W);  // weights that a lane reads at once
template <class W>
constexpr int kSpan = 4 * kPiece<W>;  // columns that a warp reads at once

// How a problem is distributed, and where its parts are in shared memory.
struct Plan {
  int spans;          // per warp
  int slice;          // floats of a row of x that a warp keeps, and of the space behind it that avoids bank conflicts
  int tiles;          // of the whole problem
  int tile_outputs;   // outputs per tile
  int x_at, sums_at;  // bytes
  int bytes;
};

template <class W>
Plan plan_of(const LinearForward& p, int rows, int depth) {
  constexpr int kGap = 16;
  Plan plan;
  const int columns = static_cast<int>(p.x.extent[1]);
  plan.spans = ((columns + kSpan<W> - 1) / kSpan<W> + kWarps - 1) / kWarps;
  plan.slice = plan.spans * kSpan<W> + kGap;
  plan.tile_outputs = p.swiglu ? kTileRows / 2 : kTileRows;
  plan.tiles = static_cast<int>((p.y.extent[1] + plan.tile_outputs - 1) / plan.tile_outputs);
  plan.x_at = depth * plan.spans * kThreads * 16;
  plan.sums_at = plan.x_at + kWarps * rows * plan.slice * static_cast<int>(sizeof(float));
  plan.bytes = plan.sums_at + 2 * depth * kWarps * rows * kTileRows * static_cast<int>(sizeof(float));
  return plan;
}

__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

// Brings memory to the L2 cache without waiting.
__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// Reads what a kernel before this one may have written.
__device__ __forceinline__ float4 read_fresh(const float* from) {
  return __ldcg(reinterpret_cast<const float4*>(from));
}

// Writes four columns of x to a warp's slice. With bfloat16 weights every x becomes the sum of two bfloat16
// numbers, a higher and a lower part; of every 32 columns the 32 higher parts lie first, then the 32 lower ones.
template <class W>
__device__ __forceinline__ void store_x(float* row, int column, const float4& x) {
  if constexpr (std::is_same_v<W, float>) {
    *reinterpret_cast<float4*>(row + column) = x;
  } else {
    const uint2 high{pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)};
    const uint2 low{pack_bf16(x.x - low_bf16(high.x), x.y - high_bf16(high.x)),
                    pack_bf16(x.z - low_bf16(high.y), x.w - high_bf16(high.y))};
    float* const to = row + column / 32 * 32 + column % 32 / 2;
    *reinterpret_cast<uint2*>(to) = high;
    *reinterpret_cast<uint2*>(to + 16) = low;
  }
}

// Sums of a tile: of a lane, after all spans, z[m, n] of its warp's columns.
template <class W, int kRows>
struct TileSums;

template <int kRows>
struct TileSums<bfloat16, kRows> {
  float even[4] = {}, odd[4] = {};  // two chains of products

  __device__ __forceinline__ void add(const uint4& w, const float* x, int slice, int lane) {
    const int row = lane / 4;
    uint4 high{}, low{};
    if (row < kRows) {
      const float* const from = x + row * slice + 4 * (lane % 4);
      high = *reinterpret_cast<const uint4*>(from);
      low = *reinterpret_cast<const uint4*>(from + 16);
    }
    // Rows 0 to 7 of the operand are the higher parts of x, rows 8 to 15 the lower ones.
    const std::uint32_t first[4] = {high.x, low.x, high.y, low.y}, second[4] = {high.z, low.z, high.w, low.w};
    mma_bf16(even, first, w.x, w.y);
    mma_bf16(odd, second, w.z, w.w);
  }
  __device__ __forceinline__ void store(float* sums, int lane) const {
    if (lane / 4 >= kRows) return;
    float* const to = sums + lane / 4 * kTileRows + 2 * (lane % 4);
    to[0] = even[0] + odd[0] + (even[2] + odd[2]);
    to[1] = even[1] + odd[1] + (even[3] + odd[3]);
  }
};

template <int kRows>
struct TileSums<float, kRows> {
  float sum[kRows] = {};

  __device__ __forceinline__ void add(const uint4& piece, const float* x, int slice, int lane) {
    const float w[4] = {__uint_as_float(piece.x), __uint_as_float(piece.y), __uint_as_float(piece.z),
                        __uint_as_float(piece.w)};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 v = *reinterpret_cast<const float4*>(x + r * slice + 4 * (lane % 4));
      sum[r] = fmaf(v.x, w[0], fmaf(v.y, w[1], fmaf(v.z, w[2], fmaf(v.w, w[3], sum[r]))));
    }
  }
  __device__ __forceinline__ void store(float* sums, int lane) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float all = sum[r] + __shfl_xor_sync(0xffffffffU, sum[r], 1);
      all += __shfl_xor_sync(0xffffffffU, all, 2);
      if (lane % 4 == 0) sums[r * kTileRows + lane / 4] = all;
    }
  }
};

// The copies of a lane's pieces of tiles, one committed group per tile.
template <class W>
struct Weights {
  const View<const W, 2>& weight;
  const Plan& plan;
  uint4* own;  // the lane's first piece in shared memory
  int column;  // the lane's first one
  int lane_row, outputs;

  __device__ __forceinline__ void fetch(int tile, int slot) const {
    if (tile < plan.tiles) {
      const int output = tile * plan.tile_outputs + lane_row % plan.tile_outputs;
      const int row = output + lane_row / plan.tile_outputs * outputs;  // with swiglu the upper lanes have z[N / 2 + n]
      const W* const from = weight.data + row * weight.stride[0] + column;
      const int columns = static_cast<int>(weight.extent[1]) - column;
      for (int s = 0; s < plan.spans; ++s) {
        const bool exists = output < outputs && s * kSpan<W> < columns;
        copy_async_16(shared_address(own + (slot * plan.spans + s) * kThreads),
                      exists ? from + s * kSpan<W> : weight.data, exists ? 16 : 0);
      }
    }
    copy_async_commit();
  }
};

// Reads a warp's slice of x, times the norm's weight, into shared memory, and writes the sums of its squares.
template <class W, int kRows>
__device__ __forceinline__ void stage_x(const LinearForward& p, const Plan& plan, int first_column, float* slices,
                                        float* squares, int lane) {
  const int columns = static_cast<int>(p.x.extent[1]), rows = static_cast<int>(p.x.extent[0]);
  float sum[kRows] = {};
  for (int c = 4 * lane; c < plan.spans * kSpan<W>; c += 128) {
    const bool exists = first_column + c < columns;
    float4 x[kRows], weight{1, 1, 1, 1};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r] = exists && r < rows ? read_fresh(p.x.at(r, first_column + c)) : float4{0, 0, 0, 0};
    }
    if (p.norm_weight && exists) weight = __ldg(reinterpret_cast<const float4*>(p.norm_weight.data + first_column + c));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] += x[r].x * x[r].x + x[r].y * x[r].y + (x[r].z * x[r].z + x[r].w * x[r].w);
      store_x<W>(slices + r * plan.slice, c,
                 {x[r].x * weight.x, x[r].y * weight.y, x[r].z * weight.z, x[r].w * weight.w});
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float all = sum_lanes(sum[r]);
    if (lane == 0) squares[r] = all;
  }
  __syncwarp();
}

// kRows: rows of x, or more. kDepth: tiles whose weights are on their way at once.
template <class W, int kRows, int kDepth>
__global__ void __launch_bounds__(kThreads)
    linear_kernel(const __grid_constant__ LinearForward p, const __grid_constant__ View<const W, 2> weight,
                  const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float squares[kWarps][kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = static_cast<int>(gridDim.x);
  const int outputs = static_cast<int>(p.y.extent[1]), rows = static_cast<int>(p.x.extent[0]);
  const int first_column = warp * plan.spans * kSpan<W>;
  uint4* const own = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  float* const slices = reinterpret_cast<float*>(shared + plan.x_at) + warp * kRows * plan.slice;
  float* const all_sums = reinterpret_cast<float*>(shared + plan.sums_at);
  const Weights<W> weights{weight, plan, own, first_column + lane % 4 * kPiece<W>, lane / 4, outputs};
#pragma unroll
  for (int i = 0; i < kDepth; ++i) weights.fetch(static_cast<int>(blockIdx.x) + i * step, i);
  if (p.norm_weight && 4 * lane < plan.spans * kSpan<W> && first_column + 4 * lane < weight.extent[1]) {
    prefetch(p.norm_weight.data + first_column + 4 * lane);
  }
  let_next_kernel_begin();
  wait_for_kernels();
  stage_x<W, kRows>(p, plan, first_column, slices, squares[warp], lane);

  const int per_row = p.swiglu ? kTileRows / 2 : kTileRows;  // plan.tile_outputs as one of two constants
  int buffer = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < plan.tiles; tile += kDepth * step, buffer ^= 1) {
    // The output of this thread of the tiles of this turn: row m, column n.
    constexpr int kOutputs = (kDepth * kRows * kTileRows + kThreads - 1) / kThreads;
    float* const sums = all_sums + buffer * kDepth * kWarps * kRows * kTileRows;
    const auto for_each_output = [&](auto&& f) {
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) {
        const int i = static_cast<int>(threadIdx.x) + j * kThreads, in_tile = i & (per_row - 1);
        const int row = p.swiglu ? i / (kTileRows / 2) : i / kTileRows, m = row % kRows, d = row / kRows;
        const int n = (tile + d * step) * per_row + in_tile;
        if (d < kDepth && m < rows && n < outputs) f(j, d, m, in_tile, n);
      }
    };
    float residual[kOutputs] = {};
    if (p.residual) for_each_output([&](int j, int, int m, int, int n) { residual[j] = __ldcg(p.residual.at(m, n)); });
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      copy_async_wait<kDepth - 1>();
      if (tile + d * step < plan.tiles) {
        TileSums<W, kRows> tile_sums;
        const uint4* const pieces = own + d * plan.spans * kThreads;
#pragma unroll 4
        for (int s = 0; s < plan.spans; ++s) {
          tile_sums.add(pieces[s * kThreads], slices + s * kSpan<W>, plan.slice, lane);
        }
        tile_sums.store(sums + (d * kWarps + warp) * kRows * kTileRows, lane);
      }
      weights.fetch(tile + (d + kDepth) * step, d);
    }
    __syncthreads();  // the sums of two turns are apart, so that one barrier per turn is enough
    for_each_output([&](int j, int d, int m, int in_tile, int n) {
      const auto sum_at = [&](int row) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += sums[((d * kWarps + w) * kRows + m) * kTileRows + row];
        return sum;
      };
      float r = 1;
      if (p.norm_weight) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) all += squares[w][m];
        r = rsqrtf(all / static_cast<float>(weight.extent[1]) + p.norm_eps);
      }
      float value = r * sum_at(in_tile);
      if (p.swiglu) value *= __fdividef(1.0F, 1.0F + expf(-value)) * (r * sum_at(per_row + in_tile));
      *p.y.at(m, n) = value + residual[j];
    });
  }
}

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

template <class W, int kRows, int kDepth>
void launch(const LinearForward& p, const View<const W, 2>& weight, int blocks, cudaStream_t stream) {
  const auto kernel = linear_kernel<W, kRows, kDepth>;
  const Plan plan = plan_of<W>(p, kRows, kDepth);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes), "cudaFuncSetAttribute");
  launch_early("linear", kernel, static_cast<unsigned>(blocks), kThreads, static_cast<std::size_t>(plan.bytes), stream,
               p, weight, plan);
}

// Takes as many tiles ahead as thread blocks have, and shared memory has room for.
template <class W, int kRows>
void launch(const LinearForward& p, const View<const W, 2>& weight, cudaStream_t stream) {
  const int tiles = plan_of<W>(p, kRows, 1).tiles, blocks = std::min(tiles, multiprocessors());
  const int per_block = (tiles + blocks - 1) / blocks;
  const auto fits = [&](int depth) { return plan_of<W>(p, kRows, depth).bytes <= kMostBytes; };
  if (per_block > 3 && fits(6)) return launch<W, kRows, 6>(p, weight, blocks, stream);
  if (per_block > 2 && fits(3)) return launch<W, kRows, 3>(p, weight, blocks, stream);
  if (per_block > 1 && fits(2)) return launch<W, kRows, 2>(p, weight, blocks, stream);
  launch<W, kRows, 1>(p, weight, blocks, stream);
}

}  // namespace

void linear(const LinearForward& p, cudaStream_t stream) {
  if (p.y.size() == 0) return;
  const std::int64_t rows = p.x.extent[0];
  if (p.weight) return rows == 1 ? launch<float, 1>(p, p.weight, stream) : launch<float, 4>(p, p.weight, stream);
  if (rows == 1) return launch<bfloat16, 1>(p, p.narrow_weight, stream);
  if (rows <= 4) return launch<bfloat16, 4>(p, p.narrow_weight, stream);
  launch<bfloat16, 8>(p, p.narrow_weight, stream);
}

std::string linear_refusal(const LinearForward& p) {
  if (!is_hopper()) return "it needs a Hopper GPU";
  if (p.byte_weight) return "it takes weights in float32 and bfloat16";
  const int most = p.weight ? kMostFloatRows : kMostRows;
  if (p.x.extent[0] > most) return "it takes at most " + std::to_string(most) + " rows";
  const bool aligned = has_aligned_rows(p.x) && (!p.norm_weight || has_aligned_rows(p.norm_weight)) &&
                       (p.weight ? has_aligned_rows(p.weight) : has_aligned_rows(p.narrow_weight));
  if (!aligned) return "it needs rows that are pieces of 16 bytes";
  const auto bytes = p.weight ? plan_of<float>(p, most, 1).bytes : plan_of<bfloat16>(p, most, 1).bytes;
  return bytes <= kMostBytes ? "" : "rows of " + std::to_string(p.x.extent[1]) + " columns exceed its shared memory";
}

}  // namespace efla::gpu
