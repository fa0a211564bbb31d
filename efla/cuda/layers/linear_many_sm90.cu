// The product of up to 64 rows with a weight matrix in bfloat16, on the tensor cores (linear.h).
//
// A cluster of thread blocks computes a tile of y for all rows; each block has a slice of the columns. A block fetches
// its slice of the weight before the kernels before it have ended, and then reads x, of which it makes two bfloat16
// numbers each, chunk by chunk. Its two warpgroups multiply, each for half of the outputs of the tile. The sums of all
// blocks are added in a fixed order by the block that writes an output.
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
constexpr int kRows = 64, kChunk = 64;                // rows of x; columns of a chunk
constexpr int kMostBlocks = 8, kMostChunks = 6;       // per cluster; per block
constexpr int kStages = 2;                            // of chunks of x in shared memory
constexpr int kStageBytes = 2 * kTileBytes;           // two bfloat16 numbers for an x
constexpr int kThreadRows = kRows / (kThreads / 16);  // of a chunk; 16 threads have the columns of a row

// How a problem is distributed.
struct Plan {
  int tile;     // rows of the weight per cluster; with swiglu half of them of z[N / 2 …], half of z[… N / 2]
  int outputs;  // of y per cluster
  int clusters;
  int blocks;    // per cluster
  int chunks;    // per block, or fewer in the last block
  int bytes;     // of shared memory
  bool aligned;  // whether y and the residual are read and written in pieces of 16 bytes
};

constexpr int kAlignment = 1024;  // of tiles

constexpr int row_bytes(int tile) { return (tile + 8) * static_cast<int>(sizeof(float)); }  // of the sums of a row

Plan plan_of(const LinearForward& p) {
  constexpr int kFew = 1024, kMost = 4096, kWide = 6144;  // outputs that clusters of one size compute at once
  constexpr int kWideChunks = 16;                         // for which clusters of four blocks have shared memory
  const int outputs = static_cast<int>(p.outputs()),
            all_chunks = static_cast<int>((p.x.extent[1] + kChunk - 1) / kChunk);
  Plan plan;
  plan.tile = outputs <= kFew ? 64 : outputs <= kMost || outputs > kWide ? 128 : 192;
  plan.outputs = p.swiglu ? plan.tile / 2 : plan.tile;
  plan.clusters = (static_cast<int>(p.y.extent[1]) + plan.outputs - 1) / plan.outputs;
  const int most_blocks = plan.tile == 64 || all_chunks > kWideChunks ? kMostBlocks : kMostBlocks / 2;
  plan.chunks = (all_chunks + most_blocks - 1) / most_blocks;
  plan.blocks = (all_chunks + plan.chunks - 1) / plan.chunks;
  plan.bytes = kAlignment + plan.chunks * plan.tile * kChunk * static_cast<int>(sizeof(bfloat16)) +
               kStages * kStageBytes + (plan.chunks * kChunk + kRows) * static_cast<int>(sizeof(float));
  plan.aligned = has_aligned_rows(p.y) && (!p.residual || has_aligned_rows(p.residual));
  return plan;
}

// Starts the copies of the slice of the weight: per chunk kTile rows of 64 columns.
template <int kTile>
__device__ __forceinline__ void fetch_weight(const LinearForward& p, const Plan& plan, int cluster, int first,
                                             unsigned char* to) {
  const auto& weight = p.narrow_weight;
  const int outputs = static_cast<int>(p.y.extent[1]), columns = static_cast<int>(weight.extent[1]);
  const int piece = static_cast<int>(threadIdx.x) % 8;
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x) / 8; r < kTile; r += kThreads / 8) {
    const int half = p.swiglu ? r / (kTile / 2) : 0, output = cluster * plan.outputs + r - half * (kTile / 2);
    int column = first * kChunk + piece * 8;
    const bfloat16* from = weight.data + (half * outputs + output) * weight.stride[0] + column;
    std::uint32_t at = shared_address(to + piece_offset(r, piece));
    for (int chunk = 0; chunk < plan.chunks; ++chunk, column += kChunk, from += kChunk, at += kTile * 128) {
      const bool exists = output < outputs && column < columns;
      copy_async_16(at, exists ? from : weight.data, exists ? 16 : 0);
    }
  }
  copy_async_commit();
}

// A thread's part of x: four neighbouring columns per chunk of kThreadRows rows.
class XPart {
 public:
  __device__ XPart(const LinearForward& p, int first)
      : column_(first * kChunk + static_cast<int>(threadIdx.x) % 16 * 4),
        columns_(static_cast<int>(p.x.extent[1])),
        row_(static_cast<int>(threadIdx.x) / 16),
        rows_(static_cast<int>(p.x.extent[0])),
        from_(p.x.data + row_ * p.x.stride[0] + column_),
        step_(p.x.stride[0] * (kThreads / 16)),
        nowhere_(p.x.data) {}

  // Reads chunk `chunk` of the block.
  __device__ __forceinline__ void read(int chunk, float4 (&x)[kThreadRows]) const {
    const bool in_row = column_ + chunk * kChunk < columns_;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const bool exists = in_row && row_ + i * (kThreads / 16) < rows_;
      const float* const from = exists ? from_ + i * step_ + chunk * kChunk : nowhere_;
      x[i] = __ldcg(reinterpret_cast<const float4*>(from));
      if (!exists) x[i] = {0, 0, 0, 0};
    }
  }

  // Writes x times the norm's weight as two bfloat16 numbers, whose sum it is, to the tiles at `to`.
  __device__ __forceinline__ void stage(const float4 (&x)[kThreadRows], const float4& weight, unsigned char* to) {
    const int piece = static_cast<int>(threadIdx.x) % 16 / 2;
    unsigned char* const own = to + piece_offset(row_, piece) + static_cast<int>(threadIdx.x) % 2 * 8;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      squares_[i] += x[i].x * x[i].x + x[i].y * x[i].y + (x[i].z * x[i].z + x[i].w * x[i].w);
      const float4 v{x[i].x * weight.x, x[i].y * weight.y, x[i].z * weight.z, x[i].w * weight.w};
      const std::uint32_t a = pack_bf16(v.x, v.y), b = pack_bf16(v.z, v.w);
      const std::uint32_t c = pack_bf16(v.x - low_bf16(a), v.y - high_bf16(a));
      const std::uint32_t d = pack_bf16(v.z - low_bf16(b), v.w - high_bf16(b));
      *reinterpret_cast<uint2*>(own + i * (kThreads / 16) * 128) = {a, b};
      *reinterpret_cast<uint2*>(own + i * (kThreads / 16) * 128 + kTileBytes) = {c, d};
    }
  }

  // Writes the sums of the squares of the rows.
  __device__ __forceinline__ void write_squares(float* squares) const {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float sum = squares_[i];
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
      if (threadIdx.x % 16 == 0) squares[row_ + i * (kThreads / 16)] = sum;
    }
  }

 private:
  int column_, columns_, row_, rows_;
  const float* from_;
  std::int64_t step_;
  const float* nowhere_;
  float squares_[kThreadRows] = {};
};

// Adds chunk `chunk` of the products to d: all rows, and the outputs of a warpgroup.
template <int kTile>
__device__ __forceinline__ void multiply_chunk(float (&d)[kTile / 4], const unsigned char* x,
                                               const unsigned char* weight, bool add) {
  const std::uint64_t high = row_operand(shared_address(x)), low = high + (kTileBytes >> 4);
  const std::uint64_t outputs = row_operand(shared_address(weight));
  products_fence();
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    multiply_tiles(d, high + k * kRowStep, outputs + k * kRowStep, add || k > 0);
    multiply_tiles(d, low + k * kRowStep, outputs + k * kRowStep, true);
  }
  products_commit();
}

// Returns the sums of what is at the place of four floats in all blocks of the cluster, in the order of the blocks.
__device__ __forceinline__ float4 sum_of_cluster(const float* from, int blocks) {
  float4 x[kMostBlocks];
#pragma unroll
  for (int block = 0; block < kMostBlocks; ++block) x[block] = load_4_from_cluster(from, block, block < blocks);
  float4 sum = x[0];
#pragma unroll
  for (int block = 1; block < kMostBlocks; ++block) {
    sum = {sum.x + x[block].x, sum.y + x[block].y, sum.z + x[block].z, sum.w + x[block].w};
  }
  return sum;
}

// Writes the outputs of the cluster of which this block has every blocks-th row: four per thread at a time.
template <int kTile>
__device__ __forceinline__ void write_outputs(const LinearForward& p, const Plan& plan, int cluster, int rank,
                                              const float* sums, const float* squares) {
  const int rows = static_cast<int>(p.x.extent[0]), outputs = static_cast<int>(p.y.extent[1]);
  const int fours = plan.outputs / 4;  // per row
  for (int i = static_cast<int>(threadIdx.x);; i += kThreads) {
    const int m = i / fours * plan.blocks + rank, in_cluster = i % fours * 4, n = cluster * plan.outputs + in_cluster;
    if (m >= rows) break;
    if (n >= outputs) continue;
    float residual[4] = {};
    if (p.residual && plan.aligned) {
      const float4 r = __ldcg(reinterpret_cast<const float4*>(p.residual.at(m, n)));
      residual[0] = r.x, residual[1] = r.y, residual[2] = r.z, residual[3] = r.w;
    } else if (p.residual) {
#pragma unroll
      for (int e = 0; e < 4; ++e) residual[e] = n + e < outputs ? __ldcg(p.residual.at(m, n + e)) : 0.0F;
    }
    const float* const from = sums + m * (row_bytes(kTile) / 4) + in_cluster;
    const float4 z = sum_of_cluster(from, plan.blocks);
    float4 w{};
    if (p.swiglu) w = sum_of_cluster(from + kTile / 2, plan.blocks);
    float r = 1;
    if (p.norm_weight) {
      float all = 0;
#pragma unroll
      for (int block = 0; block < kMostBlocks; ++block) {
        all += load_from_cluster(&squares[m], block, block < plan.blocks);
      }
      r = rsqrtf(all / static_cast<float>(p.x.extent[1]) + p.norm_eps);
    }
    float y[4] = {r * z.x, r * z.y, r * z.z, r * z.w};
    const float gates[4] = {r * w.x, r * w.y, r * w.z, r * w.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (p.swiglu) y[e] *= __fdividef(1.0F, 1.0F + expf(-y[e])) * gates[e];
      y[e] += residual[e];
    }
    if (plan.aligned) {
      *reinterpret_cast<float4*>(p.y.at(m, n)) = {y[0], y[1], y[2], y[3]};
      continue;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (n + e < outputs) *p.y.at(m, n + e) = y[e];
    }
  }
}

// kAhead: chunks of x that are read before the first is used.
template <int kTile, int kAhead>
__global__ void __launch_bounds__(kThreads, 2)
    linear_many_kernel(const __grid_constant__ LinearForward p, const __grid_constant__ Plan plan) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* const weight = unaligned + (kAlignment - shared_address(unaligned) % kAlignment) % kAlignment;
  unsigned char* const stages = weight + plan.chunks * kTile * 128;
  float* const norm = reinterpret_cast<float*>(stages + kStages * kStageBytes);
  float* const squares = norm + plan.chunks * kChunk;
  float* const sums = reinterpret_cast<float*>(weight);  // [row of x][output of the tile], after the products
  const int cluster = static_cast<int>(blockIdx.x) / plan.blocks, rank = static_cast<int>(blockIdx.x) % plan.blocks;
  const int columns = static_cast<int>(p.x.extent[1]), first = rank * plan.chunks;
  const int chunks = min(plan.chunks, (columns + kChunk - 1) / kChunk - first);
  fetch_weight<kTile>(p, plan, cluster, first, weight);
  let_next_kernel_begin();
  for (int i = static_cast<int>(threadIdx.x); i < chunks * kChunk; i += kThreads) {
    norm[i] = p.norm_weight && first * kChunk + i < columns ? __ldg(p.norm_weight.data + first * kChunk + i) : 1.0F;
  }
  __syncthreads();
  wait_for_kernels();

  XPart part(p, first);
  float4 x[kAhead][kThreadRows];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < chunks) part.read(i, x[i]);
  }
  const int group = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned char* const own_weight = weight + group * (kTile / 2) * 128;
  float d[kTile / 4];
  for (int base = 0; base < chunks; base += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = base + i;
      if (chunk >= chunks) continue;
      unsigned char* const stage = stages + chunk % kStages * kStageBytes;
      const float4 factor = *reinterpret_cast<const float4*>(norm + chunk * kChunk + threadIdx.x % 16 * 4);
      part.stage(x[i], factor, stage);
      if (chunk + kAhead < chunks) part.read(chunk + kAhead, x[i]);
      if (chunk == 0) copy_async_wait<0>();
      fence_for_products();
      products_wait<0>();
      __syncthreads();  // the chunk has been written, and the stage of the next one is free
      multiply_chunk<kTile>(d, stage, own_weight + chunk * kTile * 128, chunk > 0);
    }
  }
  if (p.norm_weight) part.write_squares(squares);
  products_wait<0>();
  __syncthreads();
  float* const own = sums + (threadIdx.x % 128 / 32 * 16 + lane / 4) * (row_bytes(kTile) / 4) + group * (kTile / 2);
#pragma unroll
  for (int i = 0; i < kTile / 4; i += 2) {
    const int column = i / 4 * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(own + i / 2 % 2 * 8 * (row_bytes(kTile) / 4) + column) = {d[i], d[i + 1]};
  }
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
  write_outputs<kTile>(p, plan, cluster, rank, sums, squares);
  arrive_at_cluster_barrier();  // others may still read this block's sums
  wait_at_cluster_barrier();
}

template <int kTile, int kAhead>
void launch(const LinearForward& p, const Plan& plan, cudaStream_t stream) {
  const auto kernel = linear_many_kernel<kTile, kAhead>;
  reserve_shared_memory(kernel, plan.bytes);
  launch_clusters_early("linear", kernel, static_cast<unsigned>(plan.clusters * plan.blocks),
                        static_cast<unsigned>(plan.blocks), kThreads, static_cast<std::size_t>(plan.bytes), stream, p,
                        plan);
}

}  // namespace

void linear_many(const LinearForward& p, cudaStream_t stream) {
  const Plan plan = plan_of(p);
  if (plan.tile == 64) return launch<64, 4>(p, plan, stream);
  if (plan.tile == 128) return launch<128, 3>(p, plan, stream);
  launch<192, 2>(p, plan, stream);
}

std::string linear_many_refusal(const LinearForward& p) {
  if (p.x.extent[0] > kRows) return "it takes at most " + std::to_string(kRows) + " rows";
  if (p.x.extent[1] <= kMostChunks * kChunk * kMostBlocks) return "";
  return "it takes weights of at most " + std::to_string(kMostChunks * kChunk * kMostBlocks) + " columns";
}

}  // namespace efla::gpu
