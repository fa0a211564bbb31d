// What the warps of a thread block of the gradients on Hopper share: shared memory, the warp that copies, and products
// and sums over a warpgroup's registers. grads_sm90.cu has the equations and the work of the groups.
#pragma once

#include <cstddef>

#include "efla/cuda/chunk/chunk_bwd.h"
#include "efla/cuda/chunk/grads/grads.cuh"
#include "efla/cuda/chunk/prepare/prepare.cuh"
#include "efla/cuda/chunk/state.cuh"
#include "efla/cuda/chunk/sweep/walk_sm90.cuh"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/common/tile.cuh"
#include "efla/cuda/common/wgmma.cuh"

namespace efla::gpu {

// Parts of the operands, each with one stage of its own: dO, U and D (kOutputs); S (kBefore); dS' (kAfter); v
// (kValues).
enum Part { kOutputs, kBefore, kAfter, kValues, kParts };

// Warps of group 3 that compute S·dS'.
inline constexpr int kHelpers = 3;

// The vectors of a ChunkRecord, from b on.
struct RecordVectors {
  alignas(128) float b[kChunkTokens];
  float read[kChunkTokens], write[kChunkTokens], out[kChunkTokens];
  alignas(128) float decay;
};
static_assert(sizeof(RecordVectors) == sizeof(ChunkRecord) - offsetof(ChunkRecord, b));

// What the warpgroups tell each other about the tokens of a chunk and value head.
struct alignas(16) TokenSums {
  float prefix[kChunkTokens], to_key[kChunkTokens], from_key[kChunkTokens];  // log2 of γ_i, γ_i n_k,i and γ_i/n_k,i
  float key_factor[kChunkTokens], query_factor[kChunkTokens];                // n_k, n_q
  float state_key[kChunkTokens];                                             // k_i·(S D_i)
  float key_key[kChunkTokens];                                               // Σ_j H_ij k_i·k_j
  float read_q[kChunkTokens], read_k[kChunkTokens];                          // r_i = read_q[i] + read_k[i]
  float written[kChunkTokens];                                               // w_i
  float lambda_factor[kChunkTokens], lambda_unit[kChunkTokens];  // the gradient through λ is their product times k
  float lambda_slope[kChunkTokens], beta_slope[kChunkTokens], beta_unit[kChunkTokens];  // as in Gain (rule/step_size.h)
  float spanning[2 * kGroupWarps][kChunkTokens];  // Σ_{i≥t>j} M_ij over a warp's rows
  float states[kHelpers];                         // parts of S·dS', one per helper
};

// A chunk and query head. `rows` is 0 after the last item.
struct Item {
  std::int64_t slot;
  int i_b, i_q, start, rows;
};

// The shared memory of a thread block. Keys, queries, vectors and sums have two places, for the next item or step.
template <int kTiles, int kSlices>
struct GradsShared {
  alignas(1024) unsigned char dout[kSlices * kTileBytes], u[kSlices * kTileBytes], d[kSlices * kTileBytes];
  unsigned char before[kSlices * kTiles * kTileBytes], after[kSlices * kTiles * kTileBytes];  // S, dS'
  unsigned char v[kSlices * kTileBytes];
  unsigned char k[2][kTiles * kTileBytes], q[2][kTiles * kTileBytes];
  unsigned char w[kTileBytes], g[kTileBytes];
  RecordVectors vectors[2];
  TokenSums sums[2];
  Item item[2];  // item i has its keys and queries in k[i % 2] and q[i % 2]
  Ring<1> parts[kParts];
  Ring<2> vectors_ring, item_ring;
  std::uint64_t tail;
  StageBarriers<2> states_full;  // of `states` of TokenSums
};

// Ids of named barriers. grads_sm90.cu says what each group of warps computes.
enum Barrier {
  kVectorsBarrier = 1,  // group 2 tells group 0: the factors of tokens are written
  kTilesBarrier,        // groups 0 and 2 tell group 1: W and G are written
  kSumsBarrier,         // group 1 tells group 2: the sums over keys are written
  kLambdaBarrier,       // groups 1 and 2: the gradients through λ are written, and W and G may be overwritten
  kGatesBarrier,        // group 0 tells group 2: its terms of the gates are written
  kTokensBarrier        // within group 2
};

// Arrives at a named barrier of `threads` threads without waiting.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// What the warp that copies does for an item and for its value heads.
template <int kTiles, int kSlices, class E>
struct ItemCopies {
  static constexpr int kImage = kSlices * kTileBytes;
  const ChunkBackward<E>& c;
  const RowMaps& maps;
  const CUtensorMap& dout;
  int lane;
  GradsShared<kTiles, kSlices>& shared;
  unsigned step = 0, count = 0, tails = 0;  // counts of: value heads of items, items, waits for `tail`

  // Takes the next item, in the order in which the reverse sweep finishes chunks.
  __device__ __forceinline__ std::int64_t next_index() const {
    const unsigned index = lane == 0 ? atomicAdd(c.begun, 1U) : 0U;
    return static_cast<std::int64_t>(__shfl_sync(0xffffffffU, index, 0));
  }

  // Waits for rows if `wait` is set, and zeroes the rows after the sequence's end, which belong to another sequence.
  __device__ __forceinline__ void finish_tail(unsigned char* tiles, int bytes, int rows, bool wait) {
    if (wait) barrier_wait(&shared.tail, tails++ & 1U);
    for (int at = 0; at < bytes; at += kTileBytes) clear_rows(tiles + at, rows, lane, 32);
    fence_async_proxy();
    __syncwarp();
  }

  // Copies the keys and queries of an item, when the item before the last one is finished.
  __device__ __forceinline__ void load_keys(const Item& item) {
    const bool is_tail = item.rows < kChunkTokens;
    shared.item_ring.wait_free(count);
    std::uint64_t* full = is_tail ? &shared.tail : shared.item_ring.full.of(count);
    unsigned char *k = shared.k[count & 1U], *q = shared.q[count & 1U];
    if (lane == 0) {
      shared.item[count & 1U] = item;
      barrier_expect(full, 2 * kTiles * kTileBytes);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_tile(k + tile * kTileBytes, &maps.k, 64 * tile, item.i_q, item.start, item.i_b, full);
        load_tile(q + tile * kTileBytes, &maps.q, 64 * tile, item.i_q, item.start, item.i_b, full);
      }
    }
    __syncwarp();
    if (is_tail) {
      finish_tail(k, kTiles * kTileBytes, item.rows, true);
      finish_tail(q, kTiles * kTileBytes, item.rows, false);
      if (lane == 0) shared.item_ring.full.arrive(count);
    }
    ++count;
  }

  // Copies the operands of a value head of an item, in the order in which the previous value head releases the parts.
  __device__ __forceinline__ void load_head(const Item& item, int i_h) {
    const bool is_tail = item.rows < kChunkTokens;
    const std::int64_t slice = slice_index(c, item.slot, i_h, 0);
    const auto load_values = [&](unsigned char* to, const CUtensorMap& map, std::uint64_t* barrier) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
        load_tile(to + s * kTileBytes, &map, 64 * s, i_h, item.start, item.i_b, barrier);
    };
    if (lane == 0) {
      wait_for_count(&c.ready[item.slot * c.p.shape.value_heads + i_h], 2 * kSlices);
      RecordVectors& vectors = shared.vectors[step & 1U];
      load_bulk(&vectors, c.forward.records[item.slot * c.p.shape.value_heads + i_h].b, sizeof(vectors),
                shared.vectors_ring.start(step, sizeof(vectors)));
      load_bulk(shared.before, c.states + slice * kTiles * kTileBytes, kTiles * kImage,
                shared.parts[kBefore].start(step, kTiles * kImage));
      load_bulk(shared.after, c.dstates + slice * kTiles * kTileBytes, kTiles * kImage,
                shared.parts[kAfter].start(step, kTiles * kImage));
    }
    __syncwarp();
    shared.parts[kOutputs].wait_free(step);
    if (is_tail) {
      if (lane == 0) {
        barrier_expect(&shared.tail, kImage);
        load_values(shared.dout, dout, &shared.tail);
      }
      __syncwarp();
      finish_tail(shared.dout, kImage, item.rows, true);
    }
    if (lane == 0) {
      std::uint64_t* const outputs_full = shared.parts[kOutputs].full.of(step);
      barrier_expect(outputs_full, (is_tail ? 2 : 3) * kImage);
      if (!is_tail) load_values(shared.dout, dout, outputs_full);
      load_bulk(shared.u, c.writes + slice * kTileBytes, kImage, outputs_full);
      load_bulk(shared.d, c.dresiduals + slice * kTileBytes, kImage, outputs_full);
      load_values(shared.v, maps.v, shared.parts[kValues].start(step, kImage));
    }
    __syncwarp();
  }
};

// Runs the warp that takes items and copies their operands.
template <int kTiles, int kSlices, class E>
__device__ __forceinline__ void copy_items(const ChunkBackward<E>& c, const RowMaps& maps, const CUtensorMap& dout,
                                           int lane, GradsShared<kTiles, kSlices>& shared) {
  const int heads = static_cast<int>(c.p.shape.heads), group = static_cast<int>(c.p.shape.group());
  const std::int64_t items = c.forward.slots * heads;
  const std::int64_t sequences = c.forward.slots_per_sequence > 0 ? c.p.shape.batch : 1,
                     length = c.forward.slots / sequences;
  ItemCopies<kTiles, kSlices, E> copies{c, maps, dout, lane, shared};
#pragma unroll 1
  for (std::int64_t index = copies.next_index(); index < items; index = copies.next_index()) {
    const int i_q = static_cast<int>(index % heads);
    const std::int64_t turn = index / heads, slot = turn % sequences * length + length - 1 - turn / sequences;
    const ChunkAt at = chunk_at(c.forward, slot);
    if (at.rows == 0) continue;
    const Item item{slot, static_cast<int>(at.i_b), i_q, static_cast<int>(at.start), at.rows};
    copies.load_keys(item);
#pragma unroll 1
    for (int i = 0; i < group; ++i, ++copies.step) copies.load_head(item, i_q * group + i);
  }
  shared.item_ring.wait_free(copies.count);
  if (lane == 0) {
    shared.item[copies.count & 1U].rows = 0;
    shared.item_ring.full.arrive(copies.count);
  }
}

// Returns whether the gains depend on the keys.
__device__ __forceinline__ bool gain_depends_on_lambda(const DeltaRule& rule) {
  return rule.step.integrator != Integrator::euler;
}

// d = a bᵀ over rows of kTiles tiles.
template <class E, int kTiles>
__device__ __forceinline__ void multiply_rows_of(float (&d)[32], const unsigned char* a, const unsigned char* b) {
  const std::uint64_t of_a = row_operand(shared_address(a)), of_b = row_operand(shared_address(b));
#pragma unroll
  for (int step = 0; step < 4 * kTiles; ++step) {
    const int at = step / 4 * (kTileBytes >> 4) + step % 4 * kRowStep;
    multiply_tiles<E>(d, of_a + at, of_b + at, step > 0);
  }
}

// d = a b, with a [tokens, value columns] and b [value columns, keys].
template <class E, int kTiles, int kSlices>
__device__ __forceinline__ void multiply_images(float (&d)[32 * kTiles], const unsigned char* a,
                                                const unsigned char* b) {
  const std::uint64_t of_a = row_operand(shared_address(a)), of_b = column_operand(shared_address(b));
#pragma unroll
  for (int step = 0; step < 4 * kSlices; ++step) {
    multiply_tiles<E, false, true>(d, of_a + step / 4 * (kTileBytes >> 4) + step % 4 * kRowStep,
                                   of_b + step / 4 * (kTiles * kTileBytes >> 4) + step % 4 * kColumnStep, step > 0);
  }
}

// d += a b, or d += aᵀ b if kTransposed is set. a is 64 × 64, and b are rows of keys or queries.
template <class E, bool kTransposed, int kTiles>
__device__ __forceinline__ void add_product(float (&d)[32 * kTiles], const unsigned char* a, const unsigned char* b) {
  const std::uint64_t of_a = kTransposed ? column_operand(shared_address(a)) : row_operand(shared_address(a)),
                      of_b = column_operand(shared_address(b));
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    multiply_tiles<E, kTransposed, true>(d, of_a + step * (kTransposed ? kColumnStep : kRowStep),
                                         of_b + step * kColumnStep, true);
  }
}

// The two rows of a lane's accumulators, first = 16·warp + lane / 4 and first + 8, and operations on them.
template <class E>
struct RowsOfWarp {
  int first, lane;

  __device__ __forceinline__ RowsOfWarp(int warp, int lane) : first(16 * warp + lane / 4), lane(lane) {}

  // Returns the elements of a vector of tokens for both rows.
  __device__ __forceinline__ float2 of(const float* vector) const { return {vector[first], vector[first + 8]}; }
  // Writes the elements of a vector of tokens for both rows.
  __device__ __forceinline__ void put(float* vector, float x, float y) const {
    if (lane % 4 != 0) return;
    vector[first] = x;
    vector[first + 8] = y;
  }
  // Returns the elements of `tiles` at accumulators 2·pair and 2·pair + 1.
  __device__ __forceinline__ float2 pair_of(const unsigned char* tiles, int pair) const {
    const auto bits =
        *reinterpret_cast<const std::uint32_t*>(tiles + piece_offset(first + pair % 2 * 8, pair / 2) + lane % 4 * 4);
    return {low_of<E>(bits), high_of<E>(bits)};
  }
  // Returns, for both rows, the product of a row of x and a row of `tiles`, summed over keys.
  template <int kCount>
  __device__ __forceinline__ float2 dot(const float (&x)[kCount], const unsigned char* tiles) const {
    float2 sum{0, 0};
#pragma unroll
    for (int pair = 0; pair < kCount / 2; ++pair) {
      const float2 y = pair_of(tiles, pair);
      (pair % 2 == 0 ? sum.x : sum.y) += x[2 * pair] * y.x + x[2 * pair + 1] * y.y;
    }
    return {lane_sum<4>(sum.x), lane_sum<4>(sum.y)};
  }
  // x += factor · (unit · rows of `tiles`).
  template <int kCount>
  __device__ __forceinline__ void add(float (&x)[kCount], float2 factor, float2 unit,
                                      const unsigned char* tiles) const {
#pragma unroll
    for (int pair = 0; pair < kCount / 2; ++pair) {
      const float2 y = pair_of(tiles, pair);
      const float f = pair % 2 == 0 ? factor.x : factor.y, u = pair % 2 == 0 ? unit.x : unit.y;
      x[2 * pair] += f * (u * y.x);
      x[2 * pair + 1] += f * (u * y.y);
    }
  }
};

// Returns the product of row 16·warp + lane % 16 of x and of y, which are kTiles tiles each.
template <class E, int kTiles>
__device__ __forceinline__ float row_dots(std::uint32_t x, std::uint32_t y, int warp, int lane) {
  float products[8] = {};
#pragma unroll 2
  for (int step = 0; step < 4 * kTiles; ++step) {
    std::uint32_t of_x[4], of_y[4];
    load_matrices(of_x, block_address(x, 16 * warp, 2 * step, lane));
    load_matrices(of_y, block_address(y, 16 * warp, 2 * step, lane));
    mma<E>(products, of_x, of_y[0], of_y[2]);
    mma<E>(products + 4, of_x, of_y[1], of_y[3]);
  }
  return diagonal_of(products, lane);
}

// Zeroes what is not below the diagonal of a diagonal 16 × 16 block. x are its accumulators.
__device__ __forceinline__ void keep_below(float* x, int lane) {
  const int row = lane / 4, column = 2 * (lane % 4);
  const bool first = column < row, second = column + 1 < row;
  x[0] = first ? x[0] : 0.0F;
  x[1] = second ? x[1] : 0.0F;
  x[4] = x[5] = 0;
  x[6] = first ? x[6] : 0.0F;
  x[7] = second ? x[7] : 0.0F;
}

// Writes Σ_{i≥t>j} M_ij over the warp's 16 rows i to to[t] for every token t. Sums over j are followed by sums over i,
// so that terms that do not span t are never added. M is rounded to elements. Only blocks up to the diagonal are read,
// and of the block on the diagonal only what is below the diagonal of M. The sums over j are products of ones and the
// transposed M, so that a lane has one t.
template <class E>
__device__ __forceinline__ void spanning_sums(const float (&m)[32], int warp, int lane, float* to) {
  constexpr std::uint32_t kOne = from_state<E>(1).bits, kOnes = kOne | kOne << 16;
  const int row = lane / 4, column = 2 * (lane % 4);
  const std::uint32_t below = (column < row ? kOne : 0U) | (column + 1 < row ? kOne << 16 : 0U);
  const std::uint32_t up_to[4] = {below, kOnes, 0, below}, all[4] = {kOnes, kOnes, kOnes, kOnes};
  float before[8] = {}, sums[4][2] = {};  // before: sums over earlier blocks
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > warp) break;
    std::uint32_t x[4];
    to_operand<E>(x, m + 8 * block);
    float left[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) left[i] = before[i];
    mma<E>(left, up_to, x[0], x[2]);
    mma<E>(left + 4, up_to, x[1], x[3]);
    mma<E>(before, all, x[0], x[2]);
    mma<E>(before + 4, all, x[1], x[3]);
    if (block == warp) {  // rows before t do not span t
      left[0] = column >= row ? left[0] : 0.0F;
      left[1] = column + 1 >= row ? left[1] : 0.0F;
      left[2] = left[3] = 0;
      left[6] = column >= row ? left[6] : 0.0F;
      left[7] = column + 1 >= row ? left[7] : 0.0F;
    }
    sums[block][0] = left[0] + left[1] + (left[4] + left[5]);
    sums[block][1] = left[2] + left[3] + (left[6] + left[7]);
  }
  // Adds over four lanes. Each of them gets the sum of block lane % 4.
  const bool upper = (lane & 2) != 0, odd = (lane & 1) != 0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float mine[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mine[i] =
          (upper ? sums[i + 2][e] : sums[i][e]) + __shfl_xor_sync(0xffffffffU, upper ? sums[i][e] : sums[i + 2][e], 2);
    }
    to[16 * (lane % 4) + row + 8 * e] =
        (odd ? mine[1] : mine[0]) + __shfl_xor_sync(0xffffffffU, odd ? mine[0] : mine[1], 1);
  }
}

// Applies the backward of the L2 norm to a warp's 16 rows of a gradient, and stores them.
template <int kTiles, class E>
__device__ __forceinline__ void store_rows(float (&x)[32 * kTiles], bool l2norm, float2 factor,
                                           const unsigned char* tiles, const View<E, 4>& to, const Item& item, int warp,
                                           int lane) {
  const RowsOfWarp<E> rows(warp, lane);
  if (l2norm) {
    const float2 along = rows.dot(x, tiles);
    rows.add(x, float2{-factor.x * factor.x * along.x, -factor.y * factor.y * along.y}, float2{1, 1}, tiles);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = rows.first + 8 * r;
    E* at = to.at(item.i_b, item.start + row, item.i_q, 8 * (lane % 4));
#pragma unroll
    for (int piece = 0; piece < 8 * kTiles; piece += 4) {
      // Each of four lanes has a part of four pieces. They exchange the parts, so that each lane has one whole piece.
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* from = x + 4 * (piece + i) + 2 * r;
        words[i] = pack<E>(from[0], from[1]);
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = (lane & bit) != 0;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          std::uint32_t &low = words[bit == 1 ? 2 * pair : pair], &high = words[bit == 1 ? 2 * pair + 1 : pair + 2];
          const std::uint32_t other = __shfl_xor_sync(0xffffffffU, upper ? low : high, bit);
          low = upper ? other : low;
          high = upper ? high : other;
        }
      }
      if (row < item.rows && 8 * (piece + lane % 4) < to.extent[3]) {
        *reinterpret_cast<uint4*>(at + 8 * piece) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
  }
}

// How a warp waits for copies and releases their places. step counts value heads of items, count counts items.
template <int kTiles, int kSlices>
struct Follower {
  GradsShared<kTiles, kSlices>& shared;
  int lane;
  unsigned step = 0, count = 0;

  __device__ __forceinline__ const Item& next_item() {
    shared.item_ring.wait_full(count);
    return shared.item[count & 1U];
  }
  __device__ __forceinline__ void finish_item() {
    release(&shared.item_ring.free.at[count & 1U]);
    ++count;
  }
  __device__ __forceinline__ void wait(Part part) { shared.parts[part].wait_full(step); }
  __device__ __forceinline__ const RecordVectors& wait_for_vectors() {
    shared.vectors_ring.wait_full(step);
    return shared.vectors[step & 1U];
  }
  __device__ __forceinline__ void release_vectors() { release(shared.vectors_ring.free.of(step)); }
  __device__ __forceinline__ void release(Part part) { release(shared.parts[part].free.of(step)); }
  __device__ __forceinline__ void release(std::uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }
};

}  // namespace efla::gpu
