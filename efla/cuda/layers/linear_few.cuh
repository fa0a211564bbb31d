// Parts of the kernels for the product of a few rows with a weight matrix: how a thread block's warps and lanes share a
// tile of the weight, x in shared memory, and the sums of a tile.
#pragma once

#include <type_traits>

#include "efla/cuda/common/exchange.cuh"
#include "efla/cuda/common/ptx.cuh"
#include "efla/rule/linear.h"

namespace efla::gpu {

inline constexpr int kWarps = 8, kThreads = 32 * kWarps, kTileRows = 8;
inline constexpr int kMostRows = 8;                     // of x
inline constexpr int kMostFloatRows = 4;                // with weights in float32
inline constexpr std::int64_t kMostBytes = 200 * 1024;  // of shared memory

template <class W>
inline constexpr int kPiece = 16 / sizeof(W);  // weights that a lane reads at once
template <class W>
inline constexpr int kSpan = 4 * kPiece<W>;  // columns that a warp reads at once

// How a problem is distributed, and where its parts are in shared memory.
struct FewPlan {
  int spans;          // per warp
  int slice;          // floats of a row of x that a warp keeps, and of the space behind it that avoids bank conflicts
  int tiles;          // of the whole problem
  int tile_outputs;   // outputs per tile
  int x_at, sums_at;  // bytes
  int bytes;
};

template <class W>
FewPlan few_plan_of(const LinearForward& p, int rows, int depth) {
  constexpr int kGap = 16;
  FewPlan plan;
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

// Writes four columns of x to a warp's slice. With bfloat16 weights every x becomes the sum of two bfloat16
// numbers, a higher and a lower part; of every 32 columns the 32 higher parts lie first, then the 32 lower ones.
template <class W>
__device__ __forceinline__ void store_x(float* row, int column, const float4& x) {
  if constexpr (std::is_same_v<W, float>) {
    *reinterpret_cast<float4*>(row + column) = x;
  } else {
    const uint2 high{pack<bfloat16>(x.x, x.y), pack<bfloat16>(x.z, x.w)};
    const uint2 low{pack<bfloat16>(x.x - low_of<bfloat16>(high.x), x.y - high_of<bfloat16>(high.x)),
                    pack<bfloat16>(x.z - low_of<bfloat16>(high.y), x.w - high_of<bfloat16>(high.y))};
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
    mma<bfloat16>(even, first, w.x, w.y);
    mma<bfloat16>(odd, second, w.z, w.w);
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

// Reads a warp's slice of x, times the norm's weight, into shared memory, and writes the sums of its squares. awaited:
// waits until x has been written (exchange.cuh).
template <class W, int kRows>
__device__ __forceinline__ void stage_x(const LinearForward& p, const FewPlan& plan, int first_column, float* slices,
                                        float* squares, int lane, bool awaited = false) {
  constexpr int kTurns = 4 / kRows > 0 ? 4 / kRows : 1;  // of 128 columns that are read before any is used
  const int columns = static_cast<int>(p.x.extent[1]), rows = static_cast<int>(p.x.extent[0]);
  const int end = min(plan.spans * kSpan<W>, columns - first_column);
  float sum[kRows] = {};
  for (int first = 4 * lane; first < plan.spans * kSpan<W>; first += kTurns * 128) {
    float4 x[kTurns][kRows], weight[kTurns];
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int c = first + t * 128;
      weight[t] = p.norm_weight && c < end
                      ? __ldg(reinterpret_cast<const float4*>(p.norm_weight.data + first_column + c))
                      : float4{1, 1, 1, 1};
    }
    bool complete;
    do {
      complete = true;
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const bool exists = first + t * 128 < end && r < rows;
          x[t][r] = exists ? read_places(p.x.at(r, first_column + first + t * 128)) : float4{0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) complete = complete && is_written(x[t][r]);
      }
    } while (awaited && !complete);
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int c = first + t * 128;
      if (c >= plan.spans * kSpan<W>) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 v = x[t][r], w = weight[t];
        sum[r] += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
        store_x<W>(slices + r * plan.slice, c, {v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w});
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float all = sum_lanes(sum[r]);
    if (lane == 0) squares[r] = all;
  }
  __syncwarp();
}

// Returns output `in_tile` of a tile for row m of x, without the residual. sums: of the tile, per warp; squares: of x,
// per warp; a tile has per_tile outputs, with swiglu half of its rows.
template <int kRows, int kSquares>
__device__ __forceinline__ float tile_output(const LinearForward& p, const float* sums,
                                             const float (&squares)[kWarps][kSquares], int m, int in_tile,
                                             int per_tile) {
  const auto sum_at = [&](int row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[(w * kRows + m) * kTileRows + row];
    return sum;
  };
  float r = 1;
  if (p.norm_weight) {
    float all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += squares[w][m];
    r = rsqrtf(all / static_cast<float>(p.x.extent[1]) + p.norm_eps);
  }
  const float value = r * sum_at(in_tile);
  if (!p.swiglu) return value;
  return value * (__fdividef(1.0F, 1.0F + expf(-value)) * (r * sum_at(per_tile + in_tile)));
}

}  // namespace efla::gpu
