// The product of up to 64 rows with a weight matrix in bfloat16, on the tensor cores (linear.h).
// docs/design/2026-11-cuda-decode.md explains the choices.
//
// A cluster of thread blocks computes a tile of y for all rows, and each block has a slice of the columns of x. A block
// copies its slice of the weight before the previous kernels have ended, and then x through a ring of pieces of 32
// columns. Each of its two warpgroups multiplies half of each band of 64 columns. A thread makes two bfloat16 numbers
// of every x that it has as an operand of the tensor cores. Then the blocks of the cluster send each other sums, and
// every block adds the sums of some rows in a fixed order.
#include <algorithm>
#include <iterator>
#include <string>

#include "efla/cuda/common/cluster.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/common/wgmma.cuh"
#include "efla/cuda/layers/linear.h"

namespace efla::gpu {
namespace {

constexpr int kGroups = 2, kThreads = 128 * kGroups;  // warpgroups
constexpr int kRows = 64, kBand = 64;                 // most rows of x; columns of a band of the weight and of x
constexpr int kMostBlocks = 8, kMostBands = 8;        // blocks per cluster; bands per block
// kPiece: columns of a piece of x in the ring.
constexpr int kPiece = 32, kPieceBytes = kRows * kPiece * static_cast<int>(sizeof(float));

// How a problem is distributed.
struct Plan {
  int tile;     // rows of the weight per cluster; with swiglu the first half for z[n], the second for z[N / 2 + n]
  int outputs;  // columns of y per cluster
  int clusters;
  int blocks;    // per cluster
  int bands;     // per block, or fewer in the last block
  int rows;      // rows of y that a block writes, or fewer
  int ring_at;   // byte of the ring in shared memory, later of the sums of other blocks
  int norm_at;   // byte of the norm's weight in shared memory
  int bytes;     // of shared memory
  bool aligned;  // whether y and the residual are read and written in pieces of 16 bytes
};

constexpr int kAlignment = 1024;  // of tiles, in bytes

constexpr int kDepth = 4;  // pieces of x in the ring

// The floats of the sums of a row, and their bytes.
template <int kTile>
constexpr int kRowFloats = kTile + 8;
constexpr int row_bytes(int tile) { return (tile + 8) * static_cast<int>(sizeof(float)); }

// Returns how to distribute a problem.
Plan plan_of(const LinearForward& p) {
  const int outputs = static_cast<int>(p.outputs()), rows = static_cast<int>(p.x.extent[0]),
            all_bands = static_cast<int>((p.x.extent[1] + kBand - 1) / kBand);
  Plan plan;
  plan.tile = outputs <= kFewOutputs ? 64 : 128;
  plan.outputs = p.swiglu ? plan.tile / 2 : plan.tile;
  plan.clusters = (static_cast<int>(p.y.extent[1]) + plan.outputs - 1) / plan.outputs;
  const int most_blocks = plan.tile == 64 || all_bands > kWideBands ? kMostBlocks : kMostBlocks / 2;
  plan.bands = (all_bands + most_blocks - 1) / most_blocks;
  plan.blocks = (all_bands + plan.bands - 1) / plan.bands;
  plan.rows = (rows + plan.blocks - 1) / plan.blocks;
  plan.ring_at =
      std::max(plan.bands * plan.tile * kBand * static_cast<int>(sizeof(bfloat16)), kRows * row_bytes(plan.tile));
  plan.norm_at = plan.ring_at + std::max(kDepth * kPieceBytes, (plan.blocks - 1) * plan.rows * row_bytes(plan.tile));
  plan.bytes = kAlignment + plan.norm_at + plan.bands * kBand * static_cast<int>(sizeof(float));
  plan.aligned = has_aligned_rows(p.y) && (!p.residual || has_aligned_rows(p.residual));
  return plan;
}

// Starts the copies of the block's slice of the weight: kTile rows of 64 columns per band. Commits them.
template <int kTile>
__device__ __forceinline__ void fetch_weight(const LinearForward& p, const Plan& plan, int cluster, int first,
                                             unsigned char* to) {
  const auto& weight = p.narrow_weight;
  const int outputs = static_cast<int>(p.y.extent[1]), columns = static_cast<int>(weight.extent[1]);
  const int piece = static_cast<int>(threadIdx.x) % 8;
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x) / 8; r < kTile; r += kThreads / 8) {
    const int half = p.swiglu ? r / (kTile / 2) : 0, output = cluster * plan.outputs + r - half * (kTile / 2);
    int column = first * kBand + piece * 8;
    const bfloat16* from = weight.data + (half * outputs + output) * weight.stride[0] + column;
    std::uint32_t at = shared_address(to + piece_offset(r, piece));
    for (int band = 0; band < plan.bands; ++band, column += kBand, from += kBand, at += kTile * 128) {
      const bool exists = output < outputs && column < columns;
      copy_async_16(at, exists ? from : weight.data, exists ? 16 : 0);
    }
  }
  copy_async_commit();
}

// Returns the byte offset in the ring of four columns of a row of a piece of x. They change places within a row, so
// that a warp reads pairs of floats of eight rows without bank conflicts.
__device__ __forceinline__ int ring_offset(int row, int four) { return row * kPiece * 4 + ((four ^ row % 4 * 2) << 4); }

// Starts the copies of pieces of x, 16 bytes of two rows per thread. What does not exist becomes zeros.
class XCopies {
 public:
  __device__ XCopies(const LinearForward& p, int first, unsigned char* ring)
      : column_(first * kBand + static_cast<int>(threadIdx.x) % 8 * 4),
        columns_(static_cast<int>(p.x.extent[1])),
        row_(static_cast<int>(threadIdx.x) / 8),
        rows_(static_cast<int>(p.x.extent[0])),
        from_(p.x.data + row_ * p.x.stride[0] + column_),
        step_(p.x.stride[0] * kRowStep),
        nowhere_(p.x.data),
        to_(shared_address(ring) + ring_offset(row_, static_cast<int>(threadIdx.x) % 8)) {}

  // Starts the copy of piece `piece` of the block to place `slot` of the ring, if `piece` is below `pieces`.
  __device__ __forceinline__ void fetch(int piece, int pieces, int slot) const {
    if (piece < pieces) {
      const bool in_row = column_ + piece * kPiece < columns_;
#pragma unroll
      for (int i = 0; i < kRows / kRowStep; ++i) {
        const bool exists = in_row && row_ + i * kRowStep < rows_;
        copy_async_16(to_ + slot * kPieceBytes + i * kRowStep * kPiece * 4,
                      exists ? from_ + i * step_ + piece * kPiece : nowhere_, exists ? 16 : 0);
      }
    }
  }

 private:
  static constexpr int kRowStep = kThreads / 8;
  int column_, columns_, row_, rows_;
  const float* from_;
  std::int64_t step_;
  const float* nowhere_;
  std::uint32_t to_;
};

// The products that a warpgroup computes.
template <int kTile>
struct Products {
  float d[kTile / 2];                                       // as accumulators of wgmma
  std::uint32_t high[kPiece / 16][4], low[kPiece / 16][4];  // operands made of a piece of x
  float squares[2] = {};                                    // sums of x² in the thread's two rows

  // Converts a piece of x times the norm's weight to operands.
  __device__ __forceinline__ void convert(const unsigned char* x, const float* norm) {
    const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    const int pair = static_cast<int>(threadIdx.x) % 4;
    const unsigned char* const own = x + pair % 2 * 8;
#pragma unroll
    for (int k = 0; k < kPiece / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // i % 2: row `row` or row + 8; i / 2: columns, or 8 columns further
        const int four = k * 4 + i / 2 * 2 + pair / 2;
        const float2 v = *reinterpret_cast<const float2*>(own + i % 2 * 8 * kPiece * 4 + ring_offset(row, four));
        const float2 w = *reinterpret_cast<const float2*>(norm + k * 16 + i / 2 * 8 + pair * 2);
        squares[i % 2] = fmaf(v.x, v.x, fmaf(v.y, v.y, squares[i % 2]));
        const float a = v.x * w.x, b = v.y * w.y;
        high[k][i] = pack<bfloat16>(a, b);
        low[k][i] = pack<bfloat16>(a - low_of<bfloat16>(high[k][i]), b - high_of<bfloat16>(high[k][i]));
      }
    }
  }

  // Starts the products of the operands with a band of the weight (`outputs`, a descriptor), and adds them if `add` is
  // set.
  __device__ __forceinline__ void multiply(std::uint64_t outputs, bool add) {
    products_fence();
#pragma unroll
    for (int k = 0; k < kPiece / 16; ++k) {
      multiply_step(high[k], outputs + k * kRowStep, add || k > 0);
      multiply_step(low[k], outputs + k * kRowStep, true);
    }
    products_commit();
  }

  // Writes the products of both warpgroups, added, and the sums of squares of each to `sums`, which Outputs describes.
  // All threads of the block take part.
  __device__ __forceinline__ void put_sums(float* sums, int group) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
    float* const own = sums + row * kRowFloats<kTile>;
    const auto for_each_pair = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(std::size(d)); i += 2) {
        const int column = i / 4 * 8 + lane % 4 * 2;
        f(*reinterpret_cast<float2*>(own + i / 2 % 2 * 8 * kRowFloats<kTile> + column), d[i], d[i + 1]);
      }
    };
    if (group == 1) for_each_pair([](float2& to, float a, float b) { to = {a, b}; });
    __syncthreads();
    if (group == 0) for_each_pair([](float2& to, float a, float b) { to = {a + to.x, b + to.y}; });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = squares[i];
#pragma unroll
      for (int offset = 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
      if (lane % 4 == 0) own[i * 8 * kRowFloats<kTile> + kTile + group] = sum;
    }
  }

 private:
  __device__ __forceinline__ void multiply_step(const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
    if constexpr (kTile == 64) multiply_64<bfloat16, false>(d, a, b, add);
    if constexpr (kTile == 128) multiply_128<bfloat16, false>(d, a, b, add);
  }
};

// The rows of y that a block writes, from the sums of all blocks of its cluster.
template <int kTile>
class Outputs {
 public:
  // `sums` are this block's sums, [row of x][output of the tile], followed by two sums of squares of the row.
  // `received` are the sums of the other blocks for this block's rows, one block after another.
  __device__ Outputs(const LinearForward& p, const Plan& plan, int cluster, int rank, const float* sums,
                     const float* received)
      : p_(p),
        plan_(plan),
        first_output_(cluster * plan.outputs),
        first_row_(rank * plan.rows),
        rows_(min(plan.rows, static_cast<int>(p.x.extent[0]) - first_row_)),
        rank_(rank),
        own_(sums + first_row_ * kRowFloats<kTile>),
        received_(received) {}

  // Returns four numbers of the residual, or zeros, for item i of the block, which is four outputs of a row.
  __device__ __forceinline__ float4 residual(int i) const {
    const int row = row_of(i), n = first_output_ + (i - row * (plan_.outputs / 4)) * 4;
    const int outputs = static_cast<int>(p_.y.extent[1]);
    if (!p_.residual || row >= rows_ || n >= outputs) return {0, 0, 0, 0};
    const float* const from = p_.residual.at(first_row_ + row, n);
    if (plan_.aligned) return __ldcg(reinterpret_cast<const float4*>(from));
    float r[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) r[e] = n + e < outputs ? __ldcg(p_.residual.at(first_row_ + row, n + e)) : 0.0F;
    return {r[0], r[1], r[2], r[3]};
  }

  // Writes the outputs. `residual` is the residual of the thread's first item.
  __device__ __forceinline__ void write(float4 residual) const {
    const int outputs = static_cast<int>(p_.y.extent[1]), fours = plan_.outputs / 4;
    for (int i = static_cast<int>(threadIdx.x); i < rows_ * fours; i += kThreads) {
      const int row = row_of(i), in_tile = (i - row * fours) * 4, n = first_output_ + in_tile;
      const float4 added = residual;
      residual = this->residual(i + kThreads);
      if (n >= outputs) continue;
      float z[4] = {}, up[4] = {}, squares = 0;
      const float* other = received_ + row * kRowFloats<kTile>;
#pragma unroll 1  // because fetching unrolled code would decide the time of code that runs once
      for (int block = 0; block < plan_.blocks; ++block) {
        const float* const from = block == rank_ ? own_ + row * kRowFloats<kTile> : other;
        if (block != rank_) other += plan_.rows * kRowFloats<kTile>;
        add(z, from + in_tile);
        if (p_.swiglu) add(up, from + kTile / 2 + in_tile);
        squares += from[kTile] + from[kTile + 1];
      }
      const float r = p_.norm_weight ? rsqrtf(squares / static_cast<float>(p_.x.extent[1]) + p_.norm_eps) : 1.0F;
      const float addends[4] = {added.x, added.y, added.z, added.w};
      float y[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        y[e] = r * z[e];
        if (p_.swiglu) y[e] *= __fdividef(1.0F, 1.0F + expf(-y[e])) * (r * up[e]);
        y[e] += addends[e];
      }
      float* const to = p_.y.at(first_row_ + row, n);
      if (plan_.aligned) {
        *reinterpret_cast<float4*>(to) = {y[0], y[1], y[2], y[3]};
        continue;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (n + e < outputs) *p_.y.at(first_row_ + row, n + e) = y[e];
      }
    }
  }

  __device__ __forceinline__ int rows() const { return rows_; }

 private:
  __device__ __forceinline__ int row_of(int i) const { return p_.swiglu ? i / (kTile / 8) : i / (kTile / 4); }
  __device__ __forceinline__ static void add(float (&sum)[4], const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
  }

  const LinearForward& p_;
  const Plan& plan_;
  int first_output_, first_row_, rows_, rank_;
  const float *own_, *received_;
};

template <int kTile>
__global__ void __launch_bounds__(kThreads, 2)
    linear_many_kernel(const __grid_constant__ LinearForward p, const __grid_constant__ Plan plan) {
  extern __shared__ unsigned char unaligned[];
  __shared__ std::uint64_t arrived;  // counts the sums of the other blocks
  unsigned char* const weight = unaligned + (kAlignment - shared_address(unaligned) % kAlignment) % kAlignment;
  unsigned char* const ring = weight + plan.ring_at;
  float* const norm = reinterpret_cast<float*>(weight + plan.norm_at);
  const int cluster = static_cast<int>(blockIdx.x) / plan.blocks, rank = static_cast<int>(blockIdx.x) % plan.blocks;
  const int columns = static_cast<int>(p.x.extent[1]), first = rank * plan.bands,
            thread = static_cast<int>(threadIdx.x);
  const int bands = min(plan.bands, (columns + kBand - 1) / kBand - first);
  float* const sums = reinterpret_cast<float*>(weight);  // after the products
  const Outputs<kTile> outputs(p, plan, cluster, rank, sums, reinterpret_cast<const float*>(ring));
  fetch_weight<kTile>(p, plan, cluster, first, weight);
  let_next_kernel_begin();
  if (thread == 0) {
    barrier_init(&arrived, 1);
    announce_barriers();
    barrier_expect(&arrived, (plan.blocks - 1) * max(outputs.rows(), 0) * row_bytes(kTile));
  }
  for (int i = thread; i < bands * kBand; i += kThreads) {
    norm[i] = p.norm_weight && first * kBand + i < columns ? __ldg(p.norm_weight.data + first * kBand + i) : 1.0F;
  }
  wait_for_kernels();

  constexpr int kPieces = kBand / kPiece;  // of a band
  const XCopies x(p, first, ring);
  const int group = thread / 128;
  Products<kTile> products;
  constexpr int kAhead = kDepth / kPieces;  // bands
  const auto fetch = [&](int band) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      x.fetch(band * kPieces + i, kPieces * bands, band % kAhead * kPieces + i);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int band = 0; band < kAhead; ++band) fetch(band);
  const std::uint64_t own_weight = row_operand(shared_address(weight)) + group * (kPiece / 16) * kRowStep;
  for (int band = 0; band < bands; ++band) {
    copy_async_wait<kAhead - 1>();
    if (band == 0) fence_async_proxy();  // of the weight
    __syncthreads();                     // the band has arrived
    products_wait<0>();
    products.convert(ring + (band % kAhead * kPieces + group) * kPieceBytes, norm + (band * kPieces + group) * kPiece);
    __syncthreads();  // its place is free
    products.multiply(own_weight + band * (kTile * 128 >> 4), band > 0);
    fetch(band + kAhead);
  }
  const float4 residual = outputs.residual(thread);
  products_wait<0>();
  fence_async_proxy();
  __syncthreads();
  arrive_at_cluster_barrier();  // the ring may be written
  products.put_sums(sums, group);
  fence_async_proxy();
  __syncthreads();
  wait_at_cluster_barrier();
  if (thread < plan.blocks && thread != rank) {
    const int from = thread * plan.rows, rows = min(plan.rows, static_cast<int>(p.x.extent[0]) - from);
    unsigned char* const to = ring + (rank - (rank > thread)) * plan.rows * row_bytes(kTile);
    if (rows > 0) send_to_block(to, sums + from * kRowFloats<kTile>, rows * row_bytes(kTile), &arrived, thread);
  }
  barrier_wait(&arrived, 0);
  arrive_at_cluster_barrier();  // the sums of the other blocks have been read
  outputs.write(residual);
  wait_at_cluster_barrier();
}

template <int kTile>
void launch(const LinearForward& p, const Plan& plan, cudaStream_t stream) {
  const auto kernel = linear_many_kernel<kTile>;
  reserve_shared_memory(kernel, plan.bytes);
  launch_clusters_early("linear", kernel, static_cast<unsigned>(plan.clusters * plan.blocks),
                        static_cast<unsigned>(plan.blocks), kThreads, static_cast<std::size_t>(plan.bytes), stream, p,
                        plan);
}

}  // namespace

void linear_many(const LinearForward& p, cudaStream_t stream) {
  const Plan plan = plan_of(p);
  if (plan.tile == 64) return launch<64>(p, plan, stream);
  launch<128>(p, plan, stream);
}

std::string linear_many_refusal(const LinearForward& p) {
  if (p.x.extent[0] > kRows) return "it takes at most " + std::to_string(kRows) + " rows";
  if (p.x.extent[1] <= kMostBands * kBand * kMostBlocks) return "";
  return "it takes weights of at most " + std::to_string(kMostBands * kBand * kMostBlocks) + " columns";
}

}  // namespace efla::gpu
