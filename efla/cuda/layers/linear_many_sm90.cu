// The product of up to 64 rows with a weight matrix in bfloat16, on the tensor cores (linear.h).
//
// A cluster of thread blocks computes one or two tiles of 64 outputs; each block has a slice of the columns. A block
// fetches its slices of the weight before the kernels before it have ended, and then reads x, of which it makes two
// bfloat16 numbers each. Its two warpgroups multiply, one per tile, or with a single tile every other part of the
// slice. The sums of all blocks are added in a fixed order by the block that writes an output.
#include <algorithm>
#include <string>

#include "efla/cuda/common/cluster.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/wgmma.cuh"
#include "efla/cuda/layers/linear.h"

namespace efla::gpu {
namespace {

constexpr int kGroups = 2, kThreads = 128 * kGroups;  // warpgroups
constexpr int kSide = 64;                             // rows and columns of a tile
constexpr int kMostBlocks = 8, kMostChunks = 6;       // per cluster; of 64 columns per block
constexpr int kSumsStride = kSide + 4;                // floats between the sums of two rows of x
constexpr int kGroupSums = kSide * kSumsStride;       // floats of the sums of a warpgroup

// How a problem is distributed.
struct Plan {
  int tiles;    // of a cluster: 1 or 2; with swiglu one of z[N / 2 …] and one of z[… N / 2]
  int outputs;  // of y per cluster
  int clusters;
  int blocks;  // per cluster
  int chunks;  // of 64 columns per block, or fewer in the last block
  int bytes;   // of shared memory
};

struct Squares {
  float of_row[kSide];
};

constexpr int kAlignment = 1024;  // of tiles
constexpr int kSumBytes = kGroups * kGroupSums * static_cast<int>(sizeof(float));
constexpr int kSquareBytes = static_cast<int>(sizeof(Squares));

Plan plan_of(const LinearForward& p) {
  constexpr int kFew = 1024;  // outputs for which clusters of one tile each occupy most of a GPU
  const int outputs = static_cast<int>(p.y.extent[1]),
            all_chunks = static_cast<int>((p.x.extent[1] + kSide - 1) / kSide);
  Plan plan;
  plan.tiles = p.swiglu || outputs > kFew ? 2 : 1;
  plan.outputs = p.swiglu ? kSide : plan.tiles * kSide;
  plan.clusters = (outputs + plan.outputs - 1) / plan.outputs;
  plan.chunks = (all_chunks + kMostBlocks - 1) / kMostBlocks;
  plan.blocks = (all_chunks + plan.chunks - 1) / plan.chunks;
  plan.bytes = kAlignment + std::max(plan.chunks * (plan.tiles + 2) * kTileBytes, kSumBytes) + kSquareBytes;
  return plan;
}

// Starts the copies of the tiles of the weight in chunks [first, first + chunks).
__device__ __forceinline__ void fetch_weight(const LinearForward& p, const Plan& plan, int cluster, int first,
                                             int chunks, unsigned char* to) {
  const auto& weight = p.narrow_weight;
  const int outputs = static_cast<int>(p.y.extent[1]), columns = static_cast<int>(weight.extent[1]);
  const int piece = static_cast<int>(threadIdx.x) % 8;
  for (int r = static_cast<int>(threadIdx.x) / 8; r < plan.tiles * kSide; r += kThreads / 8) {
    const int tile = r / kSide, row = r % kSide, output = cluster * plan.outputs + (p.swiglu ? row : r);
    int column = first * kSide + piece * 8;
    const bfloat16* from = weight.data + (p.swiglu ? tile * outputs + output : output) * weight.stride[0] + column;
    std::uint32_t at = shared_address(to + tile * plan.chunks * kTileBytes + piece_offset(row, piece));
    for (int chunk = 0; chunk < chunks; ++chunk, column += kSide, from += kSide, at += kTileBytes) {
      const bool exists = output < outputs && column < columns;
      copy_async_16(at, exists ? from : weight.data, exists ? 16 : 0);
    }
  }
  copy_async_commit();
}

// Reads x in chunks [first, first + chunks), times the norm's weight, and writes two bfloat16 numbers whose sum it is
// to the tiles `high` and `low`.
__device__ __forceinline__ void stage_x(const LinearForward& p, const Plan& plan, int first, int chunks,
                                        unsigned char* high, unsigned char* low, Squares& squares) {
  const int columns = static_cast<int>(p.x.extent[1]), rows = static_cast<int>(p.x.extent[0]);
  const int piece = static_cast<int>(threadIdx.x) % 8;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int row = static_cast<int>(threadIdx.x) / 8 + half * kThreads / 8;
    float4 x[kMostChunks][2];
#pragma unroll
    for (int chunk = 0; chunk < kMostChunks; ++chunk) {  // all before any is used
      const int column = (first + chunk) * kSide + piece * 8;
      const bool exists = chunk < chunks && row < rows && column < columns;
      const auto* const from = reinterpret_cast<const float4*>(exists ? p.x.at(row, column) : p.x.data);
#pragma unroll
      for (int i = 0; i < 2; ++i) x[chunk][i] = exists ? __ldcg(from + i) : float4{0, 0, 0, 0};
    }
    float sum = 0;
#pragma unroll
    for (int chunk = 0; chunk < kMostChunks; ++chunk) {
      const int column = (first + chunk) * kSide + piece * 8;
      if (chunk >= chunks) continue;
      std::uint32_t upper[4], lower[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float4 v = x[chunk][i];
        sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
        if (p.norm_weight && column < columns) {
          const float4 w = __ldg(reinterpret_cast<const float4*>(p.norm_weight.data + column) + i);
          v = {v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w};
        }
        upper[2 * i] = pack_bf16(v.x, v.y);
        upper[2 * i + 1] = pack_bf16(v.z, v.w);
        lower[2 * i] = pack_bf16(v.x - low_bf16(upper[2 * i]), v.y - high_bf16(upper[2 * i]));
        lower[2 * i + 1] = pack_bf16(v.z - low_bf16(upper[2 * i + 1]), v.w - high_bf16(upper[2 * i + 1]));
      }
      const int at = chunk * kTileBytes + piece_offset(row, piece);
      *reinterpret_cast<uint4*>(high + at) = {upper[0], upper[1], upper[2], upper[3]};
      *reinterpret_cast<uint4*>(low + at) = {lower[0], lower[1], lower[2], lower[3]};
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
    if (piece == 0) squares.of_row[row] = sum;
  }
}

// Returns the sums of what is at the place of four floats in all blocks of the cluster, in the order of the blocks.
__device__ __forceinline__ float4 sum_of_cluster(const float* from, int blocks) {
  float4 sum{};
#pragma unroll
  for (int block = 0; block < kMostBlocks; ++block) {
    const float4 x = load_4_from_cluster(from, min(block, blocks - 1));
    if (block < blocks) sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    linear_many_kernel(const __grid_constant__ LinearForward p, const __grid_constant__ Plan plan) {
  extern __shared__ unsigned char unaligned[];
  Squares& squares = *reinterpret_cast<Squares*>(unaligned);
  unsigned char* const behind = unaligned + kSquareBytes;
  unsigned char* const weight = behind + (kAlignment - shared_address(behind) % kAlignment) % kAlignment;
  unsigned char* const high = weight + plan.tiles * plan.chunks * kTileBytes;
  unsigned char* const low = high + plan.chunks * kTileBytes;
  float* const sums = reinterpret_cast<float*>(weight);  // [group][row of x][output], after the products
  const int cluster = static_cast<int>(blockIdx.x) / plan.blocks, rank = static_cast<int>(blockIdx.x) % plan.blocks;
  const int columns = static_cast<int>(p.x.extent[1]), first = rank * plan.chunks;
  const int chunks = min(plan.chunks, (columns + kSide - 1) / kSide - first);
  fetch_weight(p, plan, cluster, first, chunks, weight);
  let_next_kernel_begin();
  wait_for_kernels();
  stage_x(p, plan, first, chunks, high, low, squares);
  copy_async_wait<0>();
  fence_for_products();
  __syncthreads();

  const int group = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  // A single tile is computed by both warpgroups, each with half of the columns of every chunk.
  const int tile = plan.tiles == 2 ? group : 0, first_step = plan.tiles == 2 ? 0 : 2 * group;
  const int steps = plan.tiles == 2 ? 4 : 2;
  const auto operand = [&](unsigned char* at) { return row_operand(shared_address(at)) + first_step * kRowStep; };
  std::uint64_t a = operand(weight + tile * plan.chunks * kTileBytes), x = operand(high), rest = operand(low);
  float d[32];
  products_fence();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    for (int k = 0; k < steps; ++k) {
      multiply_tiles(d, a + k * kRowStep, x + k * kRowStep, chunk + k > 0);
      multiply_tiles(d, a + k * kRowStep, rest + k * kRowStep, true);
    }
    a += kTileBytes >> 4;
    x += kTileBytes >> 4;
    rest += kTileBytes >> 4;
  }
  products_commit();
  products_wait<0>();
  __syncthreads();
  float* const own = sums + group * kGroupSums;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int m = i / 4 * 8 + lane % 4 * 2 + i % 2;
    own[m * kSumsStride + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4 + i / 2 % 2 * 8] = d[i];
  }
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();

  const int rows = static_cast<int>(p.x.extent[0]), outputs = static_cast<int>(p.y.extent[1]);
  const int fours = plan.outputs / 4;             // per row: a thread has four outputs at a time
  const bool both = plan.tiles == 1 || p.swiglu;  // an output needs the sums of both warpgroups
  for (int i = rank * kThreads + static_cast<int>(threadIdx.x); i < rows * fours; i += plan.blocks * kThreads) {
    const int m = i / fours, in_cluster = i % fours * 4, n = cluster * plan.outputs + in_cluster;
    if (n >= outputs) continue;
    const float* const from = sums + m * kSumsStride + in_cluster % kSide;
    float4 z = sum_of_cluster(from + (both ? 0 : in_cluster / kSide * kGroupSums), plan.blocks), w{};
    if (both) w = sum_of_cluster(from + kGroupSums, plan.blocks);
    if (plan.tiles == 1) z = {z.x + w.x, z.y + w.y, z.z + w.z, z.w + w.w};
    float r = 1;
    if (p.norm_weight) {
      float all = 0;
#pragma unroll
      for (int block = 0; block < kMostBlocks; ++block) {
        const float x = load_from_cluster(&squares.of_row[m], min(block, plan.blocks - 1));
        if (block < plan.blocks) all += x;
      }
      r = rsqrtf(all / static_cast<float>(columns) + p.norm_eps);
    }
    const float values[4] = {r * z.x, r * z.y, r * z.z, r * z.w}, gates[4] = {r * w.x, r * w.y, r * w.z, r * w.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (n + e >= outputs) continue;
      const float residual = p.residual ? __ldcg(p.residual.at(m, n + e)) : 0.0F;
      const float factor = p.swiglu ? __fdividef(1.0F, 1.0F + expf(-values[e])) * gates[e] : 1.0F;
      *p.y.at(m, n + e) = values[e] * factor + residual;
    }
  }
  arrive_at_cluster_barrier();  // others may still read this block's sums
  wait_at_cluster_barrier();
}

}  // namespace

void linear_many(const LinearForward& p, cudaStream_t stream) {
  const Plan plan = plan_of(p);
  check(cudaFuncSetAttribute(linear_many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes),
        "cudaFuncSetAttribute");
  launch_clusters_early("linear", linear_many_kernel, static_cast<unsigned>(plan.clusters * plan.blocks),
                        static_cast<unsigned>(plan.blocks), kThreads, static_cast<std::size_t>(plan.bytes), stream, p,
                        plan);
}

std::string linear_many_refusal(const LinearForward& p) {
  if (p.x.extent[0] > kSide) return "it takes at most " + std::to_string(kSide) + " rows";
  const Plan plan = plan_of(p);
  if (plan.chunks <= kMostChunks) return "";
  return "it takes weights of at most " + std::to_string(kMostChunks * kSide * kMostBlocks) + " columns";
}

}  // namespace efla::gpu
