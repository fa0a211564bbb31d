// The product of up to 8 rows with a weight matrix, whose time is the reading of the weight (linear.h).
// docs/design/2026-11-cuda-decode.md explains the choices.
//
// A tile is 8 rows of the weight. A thread block has a few tiles, whose rows are copied to shared memory in bulk, while
// earlier kernels still run. All 8 warps compute the same tiles, each with a slice of the columns. They add their sums
// in shared memory, always in the same order.
//
// A decode step is a sequence of such products, each of which waits for the previous one. So a block does little
// between the end of the previous kernel and its own end, and it lets the next kernel begin at once, so that the
// weights of several products are copied at the same time. A block reads the parameters of the problem before it waits,
// because the first read of a parameter comes from memory.
#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/layers/linear.h"

namespace efla::gpu {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kTileRows = 8;
constexpr int kMostRows = 8;                     // rows of x
constexpr int kMostFloatRows = 4;                // rows of x with a float32 weight
constexpr std::int64_t kMostBytes = 200 * 1024;  // of shared memory

constexpr int kSpanBytes = 64;  // of a row of the weight that a warp reads at once
constexpr int kGap = 64;        // bytes before every other row of the weight, against bank conflicts
template <class W>
constexpr int kSpan = kSpanBytes / sizeof(W);  // columns

// A problem and how it is distributed over thread blocks.
template <class W>
struct Product {
  const float *x, *norm_weight, *residual;  // norm_weight and residual may be null
  float* y;
  const W* weight;
  std::int64_t x_step, residual_step, y_step, weight_step;  // from row to row
  float norm_eps, inverse_columns;
  int rows, columns, outputs;
  int tile_outputs = 0;  // outputs per tile: with swiglu, half of its rows
  int spans = 0;         // per warp
  int slice = 0;         // floats from row to row of a warp's slice of x, with padding against bank conflicts
  int tiles = 0;         // of the whole problem
  int block_tiles = 0;   // per thread block
  int norm_at = 0, x_at = 0, sums_at = 0;  // bytes in shared memory
};

// Returns where row `row` of a block's tiles lies in shared memory.
__host__ __device__ __forceinline__ int row_at(int row, int spans) {
  return row * spans * kWarps * kSpanBytes + (row + 1) / 2 * kGap;
}

// Returns the sum over the lanes of a warp.
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

// Starts the copies of a block's rows of the weight. Run by one warp. Columns after the last column become zeros. Rows
// after the last row stay uninitialised, and their sums are not written.
template <class W>
__device__ __forceinline__ void fetch_weight(const Product<W>& p, int first_tile, int tiles, unsigned char* to,
                                             std::uint64_t* arrived, int lane) {
  const int bytes = p.columns * static_cast<int>(sizeof(W)), padded = p.spans * kWarps * kSpanBytes;
  for (int row = lane; row < tiles * kTileRows; row += 32) {
    const int in_tile = row % kTileRows;
    const bool second = in_tile >= p.tile_outputs;  // with swiglu the row of z[N / 2 + n]
    const int output = (first_tile + row / kTileRows) * p.tile_outputs + in_tile - (second ? p.tile_outputs : 0);
    if (output >= p.outputs) continue;
    load_bulk(to + row_at(row, p.spans), p.weight + (output + (second ? p.outputs : 0)) * p.weight_step, bytes,
              arrived);
  }
  for (int i = lane, pieces = (padded - bytes) / 16; i < tiles * kTileRows * pieces; i += 32) {
    *reinterpret_cast<uint4*>(to + row_at(i / pieces, p.spans) + bytes + i % pieces * 16) = {0, 0, 0, 0};
  }
}

// Writes four columns of x to a warp's slice. With bfloat16 weights every x becomes the sum of two bfloat16 numbers,
// high and low. Of every 32 columns the 32 high numbers come first, then the 32 low numbers.
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

// Copies a warp's slice of x, times the norm's weight (`norm`, in shared memory), to shared memory, and writes the sums
// of the squares of x.
template <class W, int kRows>
__device__ __forceinline__ void stage_x(const Product<W>& p, int first_column, const float* norm, float* slices,
                                        float* squares, int lane) {
  constexpr int kTurns = 4 / kRows > 0 ? 4 / kRows : 1;  // groups of 128 columns that are read before any is used
  const int width = p.spans * kSpan<W>, end = min(width, p.columns - first_column);
  float sum[kRows] = {};
  for (int first = 4 * lane; first < width; first += kTurns * 128) {
    float4 x[kTurns][kRows];
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int c = first + t * 128;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float* const from = p.x + r * p.x_step + first_column + c;
        x[t][r] = c < end && r < p.rows ? __ldcg(reinterpret_cast<const float4*>(from)) : float4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int c = first + t * 128;
      if (c >= width) continue;
      const bool weighs = p.norm_weight != nullptr && c < end;  // `norm` is not written beyond the columns
      const float4 w = weighs ? *reinterpret_cast<const float4*>(norm + c) : float4{1, 1, 1, 1};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 v = x[t][r];
        sum[r] += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
        store_x<W>(slices + r * p.slice, c, {v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w});
      }
    }
  }
  __syncwarp();
  if (p.norm_weight == nullptr) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float all = sum_lanes(sum[r]);
    if (lane == 0) squares[r] = all;
  }
}

// The lane's sums of kTiles tiles: after all spans, parts of z[m, n] over its warp's columns.
template <class W, int kRows, int kTiles>
struct TileSums;

template <int kRows, int kTiles>
struct TileSums<bfloat16, kRows, kTiles> {
  float even[kTiles][4] = {}, odd[kTiles][4] = {};  // two chains of products

  // Adds the products of a span. `w` is the lane's piece of the first tile, and the next tile is `step` bytes further.
  // `x` is the warp's slice, with `slice` floats per row.
  __device__ __forceinline__ void add(const unsigned char* w, int step, const float* x, int slice, int lane) {
    uint4 weight[kTiles], high{}, low{};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) weight[t] = *reinterpret_cast<const uint4*>(w + t * step);
    if (lane / 4 < kRows) {
      const float* const from = x + lane / 4 * slice + 4 * (lane % 4);
      high = *reinterpret_cast<const uint4*>(from);
      low = *reinterpret_cast<const uint4*>(from + 16);
    }
    // Rows 0 to 7 of the operand are the high numbers of x, rows 8 to 15 the low numbers.
    const std::uint32_t first[4] = {high.x, low.x, high.y, low.y}, second[4] = {high.z, low.z, high.w, low.w};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      mma<bfloat16>(even[t], first, weight[t].x, weight[t].y);
      mma<bfloat16>(odd[t], second, weight[t].z, weight[t].w);
    }
  }
  __device__ __forceinline__ void store(float* sums, int lane) const {
    if (lane / 4 >= kRows) return;
    float* to = sums + lane / 4 * kTileRows + 2 * (lane % 4);
#pragma unroll
    for (int t = 0; t < kTiles; ++t, to += kWarps * kRows * kTileRows) {
      to[0] = even[t][0] + odd[t][0] + (even[t][2] + odd[t][2]);
      to[1] = even[t][1] + odd[t][1] + (even[t][3] + odd[t][3]);
    }
  }
};

template <int kRows, int kTiles>
struct TileSums<float, kRows, kTiles> {
  float sum[kTiles][kRows] = {};

  __device__ __forceinline__ void add(const unsigned char* w, int step, const float* x, int slice, int lane) {
    float4 weight[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) weight[t] = *reinterpret_cast<const float4*>(w + t * step);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 v = *reinterpret_cast<const float4*>(x + r * slice + 4 * (lane % 4));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        sum[t][r] =
            fmaf(v.x, weight[t].x, fmaf(v.y, weight[t].y, fmaf(v.z, weight[t].z, fmaf(v.w, weight[t].w, sum[t][r]))));
      }
    }
  }
  __device__ __forceinline__ void store(float* sums, int lane) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float all = sum[t][r] + __shfl_xor_sync(0xffffffffU, sum[t][r], 1);
        all += __shfl_xor_sync(0xffffffffU, all, 2);
        if (lane % 4 == 0) sums[(t * kWarps * kRows + r) * kTileRows + lane / 4] = all;
      }
    }
  }
};

// Computes the tiles of a thread block. kRows is at least the number of rows of x. kTiles: tiles that a warp computes
// at a time; the tiles of a block are a multiple of kTiles.
template <class W, int kRows, int kTiles>
__global__ void __launch_bounds__(kThreads, 2) linear_kernel(const __grid_constant__ Product<W> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float squares[kWarps][kRows];
  __shared__ std::uint64_t arrived;
  let_next_kernel_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_tile = static_cast<int>(blockIdx.x) * p.block_tiles, tiles = min(p.block_tiles, p.tiles - first_tile);
  float* const slices = reinterpret_cast<float*>(shared + p.x_at) + warp * kRows * p.slice;
  float* const sums = reinterpret_cast<float*>(shared + p.sums_at);
  if (warp == 0) {
    if (lane == 0) {
      barrier_init(&arrived, 1);
      fence_async_proxy();
      const int outputs = min(tiles * p.tile_outputs, p.outputs - first_tile * p.tile_outputs);
      barrier_expect(&arrived, outputs * (kTileRows / p.tile_outputs) * p.columns * static_cast<int>(sizeof(W)));
    }
    __syncwarp();
    fetch_weight(p, first_tile, tiles, shared, &arrived, lane);
  }
  const int first_column = warp * p.spans * kSpan<W>;
  float* const norm = reinterpret_cast<float*>(shared + p.norm_at) + first_column;
  if (p.norm_weight != nullptr) {
    for (int c = 4 * lane; c < min(p.spans * kSpan<W>, p.columns - first_column); c += 128) {
      *reinterpret_cast<float4*>(norm + c) = __ldg(reinterpret_cast<const float4*>(p.norm_weight + first_column + c));
    }
  }
  // The output of this thread: row m of x, column n of y.
  const bool swiglu = p.tile_outputs < kTileRows;
  const int i = static_cast<int>(threadIdx.x), in_tile = i & (p.tile_outputs - 1), row = swiglu ? i / 4 : i / 8;
  const int m = row % kRows, d = row / kRows, n = (first_tile + d) * p.tile_outputs + in_tile;
  const bool writes = d < tiles && m < p.rows && n < p.outputs;
  float* const y = p.y + m * p.y_step + n;
  const float* const residual_place = writes && p.residual != nullptr ? p.residual + m * p.residual_step + n : nullptr;
  const unsigned char* const pieces = shared + row_at(lane / 4, p.spans) + warp * p.spans * kSpanBytes + lane % 4 * 16;
  const int tile_bytes = row_at(kTileRows, p.spans);
  __syncthreads();
  wait_for_kernels();
  const float residual = residual_place != nullptr ? __ldcg(residual_place) : 0.0F;
  stage_x<W, kRows>(p, first_column, norm, slices, squares[warp], lane);
  barrier_wait(&arrived, 0);
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile += kTiles) {
    TileSums<W, kRows, kTiles> tile_sums;
    const unsigned char* const of_tile = pieces + tile * tile_bytes;
#pragma unroll 2
    for (int s = 0; s < p.spans; ++s) {
      tile_sums.add(of_tile + s * kSpanBytes, tile_bytes, slices + s * kSpan<W>, p.slice, lane);
    }
    tile_sums.store(sums + (tile * kWarps + warp) * kRows * kTileRows, lane);
  }
  __syncthreads();
  if (!writes) return;
  const float* const of_tile = sums + (d * kWarps * kRows + m) * kTileRows;
  const auto sum_at = [&](int in_row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_tile[w * kRows * kTileRows + in_row];
    return sum;
  };
  float r = 1;
  if (p.norm_weight != nullptr) {
    float all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += squares[w][m];
    r = rsqrtf(fmaf(all, p.inverse_columns, p.norm_eps));
  }
  float value = r * sum_at(in_tile);
  if (swiglu) value *= __fdividef(1.0F, 1.0F + __expf(-value)) * (r * sum_at(p.tile_outputs + in_tile));
  *y = value + residual;
}

// Returns how the problem is distributed over about `blocks` thread blocks, one per multiprocessor, and the bytes of
// shared memory of each. There are more blocks, with fewer tiles each, if a block would have more than kMostWeights
// bytes of weights or more outputs than threads. The kernel has registers for most_rows rows.
template <class W>
std::pair<Product<W>, int> product_of(const LinearForward& p, const View<const W, 2>& weight, int most_rows,
                                      int blocks) {
  const int most_outputs = kThreads / (most_rows * kTileRows);  // tiles for whose outputs there are threads
  constexpr int kFloat = sizeof(float);
  Product<W> product{p.x.data,
                     p.norm_weight.data,
                     p.residual.data,
                     p.y.data,
                     weight.data,
                     p.x.stride[0],
                     p.residual.stride[0],
                     p.y.stride[0],
                     weight.stride[0],
                     p.norm_eps,
                     1.0F / static_cast<float>(p.x.extent[1]),
                     static_cast<int>(p.x.extent[0]),
                     static_cast<int>(p.x.extent[1]),
                     static_cast<int>(p.y.extent[1])};
  product.tile_outputs = p.swiglu ? kTileRows / 2 : kTileRows;
  product.spans = (product.columns + kSpan<W> * kWarps - 1) / (kSpan<W> * kWarps);
  product.slice = product.spans * kSpan<W> + 16;
  product.tiles = (product.outputs + product.tile_outputs - 1) / product.tile_outputs;
  const int tile = row_at(kTileRows, product.spans);
  product.block_tiles = std::min((product.tiles + blocks - 1) / blocks, most_outputs);
  if (product.block_tiles * tile > kMostWeights) product.block_tiles = std::max(1, kDividedWeights / tile);
  if (product.block_tiles > 4 && product.block_tiles % 3 != 0) product.block_tiles = product.block_tiles / 4 * 4;
  product.norm_at = row_at(product.block_tiles * kTileRows, product.spans);
  product.x_at = product.norm_at + (p.norm_weight ? product.spans * kSpan<W> * kWarps * kFloat : 0);
  product.sums_at = product.x_at + kWarps * most_rows * product.slice * kFloat;
  return {product, product.sums_at + product.block_tiles * kWarps * most_rows * kTileRows * kFloat};
}

template <class W, int kRows, int kTiles>
void launch(const Product<W>& product, int bytes, cudaStream_t stream) {
  const auto kernel = linear_kernel<W, kRows, kTiles>;
  reserve_shared_memory(kernel, bytes);
  launch_early("linear", kernel, static_cast<unsigned>((product.tiles + product.block_tiles - 1) / product.block_tiles),
               kThreads, static_cast<std::size_t>(bytes), stream, product);
}

template <class W, int kRows>
void launch(const LinearForward& p, const View<const W, 2>& weight, cudaStream_t stream) {
  const auto [product, bytes] = product_of(p, weight, kRows, multiprocessors());
  if (product.block_tiles % 4 == 0) return launch<W, kRows, 4>(product, bytes, stream);
  if (product.block_tiles % 3 == 0) return launch<W, kRows, 3>(product, bytes, stream);
  if (product.block_tiles % 2 == 0) return launch<W, kRows, 2>(product, bytes, stream);
  launch<W, kRows, 1>(product, bytes, stream);
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
  const std::int64_t rows = p.x.extent[0], most = p.weight ? kMostFloatRows : kMostRows;
  if (rows > most) return "it takes at most " + std::to_string(most) + " rows";
  const int registers = rows == 1 ? 1 : rows <= 4 ? 4 : 8;  // rows for which the kernel has registers
  const int blocks = 1 << 30;                               // more than there are tiles, so that each has one tile
  const int bytes = p.weight ? product_of(p, p.weight, registers, blocks).second
                             : product_of(p, p.narrow_weight, registers, blocks).second;
  return bytes <= kMostBytes ? "" : "rows of " + std::to_string(p.x.extent[1]) + " columns exceed its shared memory";
}

}  // namespace efla::gpu
