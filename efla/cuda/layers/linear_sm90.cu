// The product of a few rows with a weight matrix, bound by reading the weight (linear.h).
//
// A tile is 8 rows of the weight. The 8 warps of a thread block compute the same tiles, each with a slice of the
// columns, and add their sums in shared memory, always in the same order. A lane has row lane / 4 of a tile and every
// fourth piece of 16 bytes of the warp's slice, as the operand of the tensor cores wants it. It copies its pieces to
// its own part of shared memory, several tiles ahead and the first ones before the kernels before it have ended: no
// thread waits for another before the sums of its block.
#include <algorithm>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/prefetch.cuh"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/layers/linear.h"
#include "efla/cuda/layers/linear_few.cuh"

namespace efla::gpu {
namespace {

// The copies of a lane's pieces of tiles, one committed group per tile.
template <class W>
struct Weights {
  const View<const W, 2>& weight;
  const FewPlan& plan;
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

// kRows: rows of x, or more. kDepth: tiles whose weights are on their way at once.
template <class W, int kRows, int kDepth>
__global__ void __launch_bounds__(kThreads)
    linear_kernel(const __grid_constant__ LinearForward p, const __grid_constant__ View<const W, 2> weight,
                  const __grid_constant__ FewPlan plan) {
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
      const float* const of_tile = sums + d * kWarps * kRows * kTileRows;
      *p.y.at(m, n) = tile_output<kRows>(p, of_tile, squares, m, in_tile, per_row) + residual[j];
    });
  }
}

template <class W, int kRows, int kDepth>
void launch(const LinearForward& p, const View<const W, 2>& weight, int blocks, cudaStream_t stream) {
  const auto kernel = linear_kernel<W, kRows, kDepth>;
  const FewPlan plan = few_plan_of<W>(p, kRows, kDepth);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes), "cudaFuncSetAttribute");
  launch_early("linear", kernel, static_cast<unsigned>(blocks), kThreads, static_cast<std::size_t>(plan.bytes), stream,
               p, weight, plan);
}

// Takes as many tiles ahead as thread blocks have, and shared memory has room for.
template <class W, int kRows>
void launch(const LinearForward& p, const View<const W, 2>& weight, cudaStream_t stream) {
  const int tiles = few_plan_of<W>(p, kRows, 1).tiles, blocks = std::min(tiles, multiprocessors());
  const int per_block = (tiles + blocks - 1) / blocks;
  const auto fits = [&](int depth) { return few_plan_of<W>(p, kRows, depth).bytes <= kMostBytes; };
  if (per_block > 3 && fits(6)) return launch<W, kRows, 6>(p, weight, blocks, stream);
  if (per_block > 2 && fits(3)) return launch<W, kRows, 3>(p, weight, blocks, stream);
  if (per_block > 1 && fits(2)) return launch<W, kRows, 2>(p, weight, blocks, stream);
  launch<W, kRows, 1>(p, weight, blocks, stream);
}

}  // namespace

void linear_few(const LinearForward& p, cudaStream_t stream) {
  const std::int64_t rows = p.x.extent[0];
  if (p.weight) return rows == 1 ? launch<float, 1>(p, p.weight, stream) : launch<float, 4>(p, p.weight, stream);
  if (rows == 1) return launch<bfloat16, 1>(p, p.narrow_weight, stream);
  if (rows <= 4) return launch<bfloat16, 4>(p, p.narrow_weight, stream);
  launch<bfloat16, 8>(p, p.narrow_weight, stream);
}

std::string linear_few_refusal(const LinearForward& p) {
  const int most = p.weight ? kMostFloatRows : kMostRows;
  if (p.x.extent[0] > most) return "it takes at most " + std::to_string(most) + " rows";
  const auto bytes = p.weight ? few_plan_of<float>(p, most, 1).bytes : few_plan_of<bfloat16>(p, most, 1).bytes;
  return bytes <= kMostBytes ? "" : "rows of " + std::to_string(p.x.extent[1]) + " columns exceed its shared memory";
}

}  // namespace efla::gpu
