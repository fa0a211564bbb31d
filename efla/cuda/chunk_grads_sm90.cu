// The gradients of the inputs of the chunkwise form on Hopper GPUs, in the notation of chunk_grads.cu. Thread blocks
// stay on the chip and go from chunk to chunk. With the factors of the L2 norm inside,
//
//   W_ij = scale n_q,i n_k,j Γ_ij dO_i·U_j  for i ≥ j,    H_ij = n_k,i n_k,j Γ_ij D_i·U_j  for i > j,   G = −a∘H −
//   (a∘H)ᵀ n_q dq̂ = out∘(dO Sᵀ) + W k,    n_k dk̂ = write∘(U dS'ᵀ) − read∘(D Sᵀ) + Wᵀ q + G k da_i = −γ_i n_k,i k_i·(S
//   D_i) − Σ_j H_ij k_i·k_j
//
// A warpgroup each computes the gradient of q with W, the gradient of k, and G with everything of a token or a value.
// Another warp copies ahead. What has value columns is used first and is free again when half of a chunk's work is
// left, so that the next chunk's copies run under that half; keys and queries, which are used until its end, have two
// places.
#include <algorithm>
#include <cstddef>

#include "efla/cuda/chunk_bwd.h"
#include "efla/cuda/error.h"
#include "efla/cuda/launch.h"
#include "efla/cuda/prepare.cuh"
#include "efla/cuda/state.cuh"
#include "efla/cuda/sweep_sm90.cuh"
#include "efla/cuda/tensor_map.h"
#include "efla/cuda/tile.cuh"
#include "efla/cuda/wgmma.cuh"

namespace efla::gpu {
namespace {

constexpr int kThreads = 4 * kGroupThreads;

// What is copied together and used up together: dO, U and D; S; dS'; v.
enum Part { kOutputs, kBefore, kAfter, kValues, kParts };

// The vectors of a ChunkRecord.
struct RecordVectors {
  alignas(128) float b[kChunkTokens];
  float read[kChunkTokens], write[kChunkTokens], out[kChunkTokens];
  alignas(128) float decay;
};
static_assert(sizeof(RecordVectors) == sizeof(ChunkRecord) - offsetof(ChunkRecord, b));

// What the warpgroups tell each other about the tokens of a chunk and value head.
struct TokenSums {
  float prefix[kChunkTokens], key_factor[kChunkTokens], query_factor[kChunkTokens];  // log2 γ_i, n_k, n_q
  float db[kChunkTokens];
  float state_key[kChunkTokens];                                 // k_i·(S D_i)
  float key_key[kChunkTokens];                                   // Σ_j H_ij k_i·k_j
  float read_q[kChunkTokens], read_k[kChunkTokens];              // the terms of token i that read S
  float written[kChunkTokens];                                   // the term of token i's write that S' has
  float lambda_factor[kChunkTokens], lambda_unit[kChunkTokens];  // the gradient through λ: their product times k
  float lambda_slope[kChunkTokens], beta_slope[kChunkTokens], beta_unit[kChunkTokens];  // Gain
  float spanning[2 * kGroupWarps][kChunkTokens];  // Σ_{i≥t>j} M_ij over a warp's rows
  float states[kGroupWarps];                      // parts of S·dS'
};

// A chunk and query head; rows is 0 after the last one.
struct Item {
  std::int64_t slot;
  int i_b, i_q, start, rows;
};

template <int kTiles, int kSlices>
struct GradsShared {
  alignas(1024) unsigned char dout[kSlices * kTileBytes], u[kSlices * kTileBytes], d[kSlices * kTileBytes];
  unsigned char before[kSlices * kTiles * kTileBytes], after[kSlices * kTiles * kTileBytes];  // S, dS'
  unsigned char v[kSlices * kTileBytes];
  unsigned char k[2][kTiles * kTileBytes], q[2][kTiles * kTileBytes];
  unsigned char w[kTileBytes], g[kTileBytes];
  RecordVectors vectors[2];
  TokenSums sums[2];
  Item item[2];  // with its k and q
  std::uint64_t full[kParts], free[kParts], vectors_full[2], vectors_free[2], item_full[2], item_free[2], tail;
};

// Ids of named barriers, with the warpgroups that arrive and those that wait.
enum Barrier {
  kVectorsBarrier = 1,  // tokens' factors are there: group 2 to group 0
  kTilesBarrier,        // W and G are there: groups 0 and 2 to group 1
  kSumsBarrier,         // what the key group knows of tokens is there: group 1 to group 2
  kLambdaBarrier,       // groups 1 and 2: the gradients through λ are there, and W and G may be overwritten
  kGatesBarrier,        // what the query group knows of gates is there: group 0 to group 2
  kTokensBarrier        // within group 2
};

__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The warp that copies.
template <int kTiles, int kSlices>
__device__ __forceinline__ void copy_items(const ChunkBackward& c, const RowMaps& maps, const CUtensorMap& dout,
                                           int lane, GradsShared<kTiles, kSlices>& shared) {
  constexpr int kImage = kSlices * kTileBytes;
  const int heads = static_cast<int>(c.p.shape.heads), group = static_cast<int>(c.p.shape.group());
  const std::int64_t items = c.forward.slots * heads;
  unsigned step = 0, count = 0, tails = 0;  // chunks and value heads, items, copies of chunks that are not full
  const auto wait_free = [&](Part part) { barrier_wait(&shared.free[part], (step & 1U) ^ 1U); };
  // Waits for rows; those after the sequence's end, which are another sequence's, become zeros.
  const auto finish_tail = [&](unsigned char* tiles, int bytes, int rows, bool wait) {
    if (wait) barrier_wait(&shared.tail, tails++ & 1U);
    for (int at = 0; at < bytes; at += kTileBytes) clear_rows(tiles + at, rows, lane, 32);
    fence_for_products();
    __syncwarp();
  };
  // Waits until the item before the last is done with.
  const auto next_place = [&] { barrier_wait(&shared.item_free[count & 1U], (count / 2 & 1U) ^ 1U); };
  // The next item in the order in which the reverse sweep finishes chunks.
  const auto next_index = [&] {
    const unsigned index = lane == 0 ? atomicAdd(c.begun, 1U) : 0U;
    return static_cast<std::int64_t>(__shfl_sync(0xffffffffU, index, 0));
  };
  const std::int64_t sequences = c.forward.slots_per_sequence > 0 ? c.p.shape.batch : 1,
                     length = c.forward.slots / sequences;
#pragma unroll 1
  for (std::int64_t index = next_index(); index < items; index = next_index()) {
    const int i_q = static_cast<int>(index % heads);
    const std::int64_t turn = index / heads, slot = turn % sequences * length + length - 1 - turn / sequences;
    const ChunkAt at = chunk_at(c.forward, slot);
    if (at.rows == 0) continue;
    const int i_b = static_cast<int>(at.i_b), start = static_cast<int>(at.start);
    const bool is_tail = at.rows < kChunkTokens;
    next_place();
    std::uint64_t* full = is_tail ? &shared.tail : &shared.item_full[count & 1U];
    unsigned char *k = shared.k[count & 1U], *q = shared.q[count & 1U];
    if (lane == 0) {
      shared.item[count & 1U] = {slot, i_b, i_q, start, at.rows};
      barrier_expect(full, 2 * kTiles * kTileBytes);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_tile(k + tile * kTileBytes, &maps.k, 64 * tile, i_q, start, i_b, full);
        load_tile(q + tile * kTileBytes, &maps.q, 64 * tile, i_q, start, i_b, full);
      }
    }
    __syncwarp();
    if (is_tail) {
      finish_tail(k, kTiles * kTileBytes, at.rows, true);
      finish_tail(q, kTiles * kTileBytes, at.rows, false);
      if (lane == 0) barrier_arrive(&shared.item_full[count & 1U]);
    }
    ++count;
#pragma unroll 1
    for (int i = 0; i < group; ++i, ++step) {
      const int i_h = i_q * group + i;
      const std::int64_t slice = slice_index(c, slot, i_h, 0);
      const auto load_values = [&](unsigned char* to, const CUtensorMap& map, std::uint64_t* barrier) {
#pragma unroll
        for (int s = 0; s < kSlices; ++s) load_tile(to + s * kTileBytes, &map, 64 * s, i_h, start, i_b, barrier);
      };
      wait_free(kOutputs);
      if (is_tail) {
        if (lane == 0) {
          barrier_expect(&shared.tail, kImage);
          load_values(shared.dout, dout, &shared.tail);
        }
        __syncwarp();
        finish_tail(shared.dout, kImage, at.rows, true);
      }
      if (lane == 0) {
        wait_for_count(&c.ready[slot * c.p.shape.value_heads + i_h], 2 * kSlices);
        barrier_expect(&shared.full[kOutputs], (is_tail ? 2 : 3) * kImage);
        if (!is_tail) load_values(shared.dout, dout, &shared.full[kOutputs]);
        load_bulk(shared.u, c.writes + slice * kTileBytes, kImage, &shared.full[kOutputs]);
        load_bulk(shared.d, c.dresiduals + slice * kTileBytes, kImage, &shared.full[kOutputs]);
        RecordVectors& vectors = shared.vectors[step & 1U];
        barrier_wait(&shared.vectors_free[step & 1U], (step / 2 & 1U) ^ 1U);
        barrier_expect(&shared.vectors_full[step & 1U], sizeof(vectors));
        load_bulk(&vectors, c.forward.records[slot * c.p.shape.value_heads + i_h].b, sizeof(vectors),
                  &shared.vectors_full[step & 1U]);
        wait_free(kBefore);
        barrier_expect(&shared.full[kBefore], kTiles * kImage);
        load_bulk(shared.before, c.states + slice * kTiles * kTileBytes, kTiles * kImage, &shared.full[kBefore]);
        wait_free(kAfter);
        barrier_expect(&shared.full[kAfter], kTiles * kImage);
        load_bulk(shared.after, c.dstates + slice * kTiles * kTileBytes, kTiles * kImage, &shared.full[kAfter]);
        wait_free(kValues);
        barrier_expect(&shared.full[kValues], kImage);
        load_values(shared.v, maps.v, &shared.full[kValues]);
      }
      __syncwarp();
    }
  }
  next_place();
  if (lane == 0) {
    shared.item[count & 1U].rows = 0;
    barrier_arrive(&shared.item_full[count & 1U]);
  }
}

// d = a bᵀ over rows of kTiles tiles.
template <int kTiles>
__device__ __forceinline__ void multiply_rows_of(float (&d)[32], const unsigned char* a, const unsigned char* b) {
  const std::uint64_t of_a = row_operand(shared_address(a)), of_b = row_operand(shared_address(b));
#pragma unroll
  for (int step = 0; step < 4 * kTiles; ++step) {
    const int at = step / 4 * (kTileBytes >> 4) + step % 4 * kRowStep;
    multiply_tiles(d, of_a + at, of_b + at, step > 0);
  }
}

// d = a b, with a tokens by value columns and b value columns by keys.
template <int kTiles, int kSlices>
__device__ __forceinline__ void multiply_images(float (&d)[32 * kTiles], const unsigned char* a,
                                                const unsigned char* b) {
  const std::uint64_t of_a = row_operand(shared_address(a)), of_b = column_operand(shared_address(b));
#pragma unroll
  for (int step = 0; step < 4 * kSlices; ++step) {
    multiply_tiles<false, true>(d, of_a + step / 4 * (kTileBytes >> 4) + step % 4 * kRowStep,
                                of_b + step / 4 * (kTiles * kTileBytes >> 4) + step % 4 * kColumnStep, step > 0);
  }
}

// d += a b or, where kTransposed is set, aᵀ b, with a of 64 × 64 and b the rows of keys or queries.
template <bool kTransposed, int kTiles>
__device__ __forceinline__ void add_product(float (&d)[32 * kTiles], const unsigned char* a, const unsigned char* b) {
  const std::uint64_t of_a = kTransposed ? column_operand(shared_address(a)) : row_operand(shared_address(a)),
                      of_b = column_operand(shared_address(b));
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    multiply_tiles<kTransposed, true>(d, of_a + step * (kTransposed ? kColumnStep : kRowStep),
                                      of_b + step * kColumnStep, true);
  }
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

// The rows of a warp's accumulators.
struct RowsOfWarp {
  int first, lane;  // row lane / 4

  __device__ __forceinline__ RowsOfWarp(int warp, int lane) : first(16 * warp + lane / 4), lane(lane) {}

  // Returns elements lane/4 and lane/4 + 8 of a vector of tokens.
  __device__ __forceinline__ float2 of(const float* vector) const { return {vector[first], vector[first + 8]}; }
  __device__ __forceinline__ void put(float* vector, float x, float y) const {
    if (lane % 4 != 0) return;
    vector[first] = x;
    vector[first + 8] = y;
  }
  // The pair of a row of `tiles` that accumulators 2·pair and 2·pair + 1 belong to.
  __device__ __forceinline__ float2 pair_of(const unsigned char* tiles, int pair) const {
    const auto bits =
        *reinterpret_cast<const std::uint32_t*>(tiles + piece_offset(first + pair % 2 * 8, pair / 2) + lane % 4 * 4);
    return {low_bf16(bits), high_bf16(bits)};
  }
  // Returns Σ over the keys of a row of x and a row of `tiles`.
  template <int kCount>
  __device__ __forceinline__ float2 dot(const float (&x)[kCount], const unsigned char* tiles) const {
    float2 sum{0, 0};
#pragma unroll
    for (int pair = 0; pair < kCount / 2; ++pair) {
      const float2 y = pair_of(tiles, pair);
      (pair % 2 == 0 ? sum.x : sum.y) += x[2 * pair] * y.x + x[2 * pair + 1] * y.y;
    }
    return {quad_sum(sum.x), quad_sum(sum.y)};
  }
  // x += factor · rows of `tiles`.
  template <int kCount>
  __device__ __forceinline__ void add(float (&x)[kCount], float2 factor, const unsigned char* tiles) const {
#pragma unroll
    for (int pair = 0; pair < kCount / 2; ++pair) {
      const float2 y = pair_of(tiles, pair);
      const float f = pair % 2 == 0 ? factor.x : factor.y;
      x[2 * pair] += f * y.x;
      x[2 * pair + 1] += f * y.y;
    }
  }
};

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&x)[kCount], float2 factor) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
}

// Writes Σ_{i≥t>j} M_ij over the warp's 16 rows i for every token t; sums of sums, so that terms that do not span t are
// not in them. M has zeros above the diagonal.
__device__ __forceinline__ void spanning_sums(const float (&m)[32], int warp, int lane, float* to) {
  const int first = 16 * warp + lane / 4;
  float before[2] = {};
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    float sums[2] = {};
    if (piece <= 2 * warp + 1) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float x = m[4 * piece + 2 * r], y = m[4 * piece + 2 * r + 1];
        float up_to = x + y;
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
          const float below = __shfl_up_sync(0xffffffffU, up_to, offset, 4);
          up_to += lane % 4 >= offset ? below : 0.0F;
        }
        const float total = __shfl_sync(0xffffffffU, up_to, 3, 4);
        const float others = __shfl_up_sync(0xffffffffU, up_to, 1, 4);
        const float left = before[r] + (lane % 4 == 0 ? 0.0F : others);
        const int row = first + 8 * r, column = 8 * piece + 2 * (lane % 4);
        sums[0] += row >= column ? left : 0.0F;
        sums[1] += row >= column + 1 ? left + x : 0.0F;
        before[r] += total;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) sums[e] += __shfl_xor_sync(0xffffffffU, sums[e], offset);
      }
    }
    if (lane < 4) *reinterpret_cast<float2*>(to + 8 * piece + 2 * lane) = float2{sums[0], sums[1]};
  }
}

// Applies the L2 norm to a warp's 16 rows of a gradient, and stores them.
template <int kTiles>
__device__ __forceinline__ void store_rows(float (&x)[32 * kTiles], bool l2norm, float2 factor,
                                           const unsigned char* tiles, const View<bfloat16, 4>& to, const Item& item,
                                           int warp, int lane) {
  const RowsOfWarp rows(warp, lane);
  if (l2norm) {
    const float2 along = rows.dot(x, tiles);
    rows.add(x, float2{-factor.x * factor.x * along.x, -factor.y * factor.y * along.y}, tiles);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = rows.first + 8 * r;
    bfloat16* at = to.at(item.i_b, item.start + row, item.i_q, 8 * (lane % 4));
#pragma unroll
    for (int piece = 0; piece < 8 * kTiles; piece += 4) {
      // Four lanes have the rows' parts of four pieces; afterwards each has one piece.
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* from = x + 4 * (piece + i) + 2 * r;
        words[i] = pack_bf16(from[0], from[1]);
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

// How a warp follows the copies.
template <int kTiles, int kSlices>
struct Follower {
  GradsShared<kTiles, kSlices>& shared;
  int lane;
  unsigned step = 0, count = 0;

  __device__ __forceinline__ const Item& next_item() {
    barrier_wait(&shared.item_full[count & 1U], count / 2 & 1U);
    return shared.item[count & 1U];
  }
  __device__ __forceinline__ void finish_item() {
    release(&shared.item_free[count & 1U]);
    ++count;
  }
  __device__ __forceinline__ void wait(Part part) { barrier_wait(&shared.full[part], step & 1U); }
  __device__ __forceinline__ const RecordVectors& wait_for_vectors() {
    barrier_wait(&shared.vectors_full[step & 1U], step / 2 & 1U);
    return shared.vectors[step & 1U];
  }
  __device__ __forceinline__ void release_vectors() { release(&shared.vectors_free[step & 1U]); }
  __device__ __forceinline__ void release(Part part) { release(&shared.free[part]); }
  __device__ __forceinline__ void release(std::uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }
};

// The warpgroup of the gradient of q, which also computes W.
template <int kTiles, int kSlices>
__device__ __forceinline__ void query_gradients(const ChunkBackward& c, int thread,
                                                GradsShared<kTiles, kSlices>& shared) {
  const int warp = warp_of(thread), lane = thread % 32;
  const RowsOfWarp rows(warp, lane);
  const bool gated = c.p.rule.decay == Decay::scalar, l2norm = c.p.rule.qk_l2norm;
  const int group = static_cast<int>(c.p.shape.group());
  Follower<kTiles, kSlices> follow{shared, lane};
  float dq[32 * kTiles];
  for (;; follow.finish_item()) {
    const Item& item = follow.next_item();
    if (item.rows == 0) return;
    const unsigned char *k = shared.k[follow.count & 1U], *q = shared.q[follow.count & 1U];
    float2 factor{1, 1};
#pragma unroll
    for (float& x : dq) x = 0;
#pragma unroll 1
    for (int i = 0; i < group; ++i, ++follow.step) {
      TokenSums& sums = shared.sums[follow.step & 1U];
      {
        float of_head[32 * kTiles];
        leave_undefined(of_head);
        follow.wait(kOutputs);
        follow.wait(kBefore);
        products_fence();
        multiply_images<kTiles, kSlices>(of_head, shared.dout, shared.before);
        products_commit();
        const float2 out = rows.of(follow.wait_for_vectors().out);
        products_wait<0>();
        follow.release(kBefore);
        follow.release_vectors();
        scale_rows(of_head, out);
        if (gated) {
          const float2 read = rows.dot(of_head, q);
          rows.put(sums.read_q, read.x, read.y);
        }
#pragma unroll
        for (int j = 0; j < 32 * kTiles; ++j) dq[j] += of_head[j];
      }
      float w[32], products[32];
      leave_undefined(w);
      leave_undefined(products);
      products_fence();
      multiply_rows_of<kSlices>(w, shared.dout, shared.u);
      multiply_rows_of<kTiles>(products, q, k);
      products_commit();
      if (l2norm && i == 0) {
        const float squares = query_squares<kTiles>(shared_address(q), warp, lane);
        if (lane < 16) sums.query_factor[16 * warp + lane] = rsqrtf(squares + static_cast<float>(kL2NormEpsilon));
        __syncwarp();
        factor = rows.of(sums.query_factor);
      }
      products_wait<0>();
      follow.release(kOutputs);
      named_barrier(kVectorsBarrier, 2 * kGroupThreads);
      const float2 prefix = rows.of(sums.prefix);
      std::uint32_t operand[4][4];
#pragma unroll
      for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int j = 8 * block; j < 8 * block + 8; j += 2) {
          const int column = 16 * block + j / 4 % 2 * 8 + 2 * (lane % 4), row = rows.first + j / 2 % 2 * 8;
          const float2 columns = *reinterpret_cast<const float2*>(sums.prefix + column);
          const float2 n_k = *reinterpret_cast<const float2*>(sums.key_factor + column);
          const float before = j / 2 % 2 == 0 ? prefix.x : prefix.y;
          const float n_q = c.forward.scale * (j / 2 % 2 == 0 ? factor.x : factor.y);
          w[j] = column <= row ? w[j] * (n_q * n_k.x * exp2_fast(before - columns.x)) : 0.0F;
          w[j + 1] = column + 1 <= row ? w[j + 1] * (n_q * n_k.y * exp2_fast(before - columns.y)) : 0.0F;
          products[j] *= w[j];
          products[j + 1] *= w[j + 1];
        }
        to_operand(operand[block], w + 8 * block);
        if (block <= warp) write_block(shared.w, 16 * warp, 2 * block, operand[block], lane);
      }
      fence_for_products();
      named_arrive(kTilesBarrier, 3 * kGroupThreads);
      products_fence();
      update_state<kTiles>(dq, operand, shared_address(k));
      products_commit();
      if (gated) {
        spanning_sums(products, warp, lane, sums.spanning[warp]);
        named_arrive(kGatesBarrier, 2 * kGroupThreads);
      }
      products_wait<0>();
    }
    store_rows<kTiles>(dq, l2norm, factor, q, c.p.dq, item, warp, lane);
  }
}

// The warpgroup of the gradient of k.
template <int kTiles, int kSlices>
__device__ __forceinline__ void key_gradients(const ChunkBackward& c, int thread,
                                              GradsShared<kTiles, kSlices>& shared) {
  const int warp = warp_of(thread), lane = thread % 32;
  const RowsOfWarp rows(warp, lane);
  const int group = static_cast<int>(c.p.shape.group());
  Follower<kTiles, kSlices> follow{shared, lane};
  float dk[32 * kTiles];
  for (;; follow.finish_item()) {
    const Item& item = follow.next_item();
    if (item.rows == 0) return;
    const unsigned char *k = shared.k[follow.count & 1U], *q = shared.q[follow.count & 1U];
    float2 factor{1, 1};
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll 1
    for (int i = 0; i < group; ++i, ++follow.step) {
      TokenSums& sums = shared.sums[follow.step & 1U];
      float x[32 * kTiles];
      leave_undefined(x);
      follow.wait(kOutputs);
      follow.wait(kBefore);
      products_fence();
      multiply_images<kTiles, kSlices>(x, shared.d, shared.before);
      products_commit();
      const RecordVectors& vectors = follow.wait_for_vectors();
      const float2 read = rows.of(vectors.read), write = rows.of(vectors.write);
      products_wait<0>();
      follow.release(kBefore);
      follow.release_vectors();
      const float2 state_key = rows.dot(x, k);
      rows.put(sums.state_key, state_key.x, state_key.y);
      rows.put(sums.read_k, -read.x * state_key.x, -read.y * state_key.y);
#pragma unroll
      for (int j = 0; j < 32 * kTiles; ++j) dk[j] -= (j / 2 % 2 == 0 ? read.x : read.y) * x[j];
      follow.wait(kAfter);
      products_fence();
      multiply_images<kTiles, kSlices>(x, shared.u, shared.after);
      products_commit();
      products_wait<0>();
      follow.release(kAfter);
      follow.release(kOutputs);
      const float2 key = rows.dot(x, k);
      rows.put(sums.written, write.x * key.x, write.y * key.y);
      named_arrive(kSumsBarrier, 2 * kGroupThreads);
#pragma unroll
      for (int j = 0; j < 32 * kTiles; ++j) dk[j] += (j / 2 % 2 == 0 ? write.x : write.y) * x[j];
      named_barrier(kTilesBarrier, 3 * kGroupThreads);
      products_fence();
      add_product<false, kTiles>(dk, shared.g, k);
      add_product<true, kTiles>(dk, shared.w, q);
      products_commit();
      products_wait<0>();
      named_barrier(kLambdaBarrier, 2 * kGroupThreads);
      const float2 lambda = rows.of(sums.lambda_factor), unit = rows.of(sums.lambda_unit);
#pragma unroll
      for (int pair = 0; pair < 16 * kTiles; ++pair) {
        const float2 of_k = rows.pair_of(k, pair);
        const float l = pair % 2 == 0 ? lambda.x : lambda.y, n = pair % 2 == 0 ? unit.x : unit.y;
        dk[2 * pair] += l * (n * of_k.x);
        dk[2 * pair + 1] += l * (n * of_k.y);
      }
      factor = rows.of(sums.key_factor);
    }
    store_rows<kTiles>(dk, c.p.rule.qk_l2norm, factor, k, c.p.dk, item, warp, lane);
  }
}

// Writes dv and the sums db of all tokens; a thread has a piece of 16 bytes of 4 rows.
template <int kTiles, int kSlices>
__device__ __forceinline__ void value_gradients(const ChunkBackward& c, const Item& item, int i_h, int thread,
                                                const GradsShared<kTiles, kSlices>& shared, const float* gains,
                                                float* db) {
  const int piece = thread % 8;
  const auto dot = [](std::uint32_t x, std::uint32_t y) {
    return low_bf16(x) * low_bf16(y) + high_bf16(x) * high_bf16(y);
  };
#pragma unroll 1
  for (int pass = 0; pass < 4; ++pass) {
    const int row = thread / 8 + 16 * pass;
    const float b = gains[row];
    const auto scaled = [&](std::uint32_t x) { return pack_bf16(b * low_bf16(x), b * high_bf16(x)); };
    float sum = 0;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int at = slice * kTileBytes + piece_offset(row, piece), column = 64 * slice + 8 * piece;
      const uint4 v = *reinterpret_cast<const uint4*>(shared.v + at),
                  d = *reinterpret_cast<const uint4*>(shared.d + at);
      sum += dot(v.x, d.x) + dot(v.y, d.y) + dot(v.z, d.z) + dot(v.w, d.w);
      if (row < item.rows && column < c.p.shape.value_dim) {
        *reinterpret_cast<uint4*>(c.p.dv.at(item.i_b, item.start + row, i_h, column)) =
            uint4{scaled(d.x), scaled(d.y), scaled(d.z), scaled(d.w)};
      }
    }
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
    if (piece == 0) db[row] = sum;
  }
}

// The thread's part of the sum over all elements of two states.
template <int kBytes>
__device__ __forceinline__ float state_product(const unsigned char* x, const unsigned char* y, int thread) {
  float sum = 0;
#pragma unroll 2
  for (int at = 16 * thread; at < kBytes; at += 16 * kGroupThreads) {
    const uint4 a = *reinterpret_cast<const uint4*>(x + at), b = *reinterpret_cast<const uint4*>(y + at);
    const std::uint32_t of_a[4] = {a.x, a.y, a.z, a.w}, of_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum += low_bf16(of_a[i]) * low_bf16(of_b[i]) + high_bf16(of_a[i]) * high_bf16(of_b[i]);
    }
  }
  return sum;
}

// Writes a warp's block row of G and the transposed blocks; x are the accumulators of −a∘H.
__device__ __forceinline__ void write_symmetric(const float (&x)[32], unsigned char* tile, int warp, int lane) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > warp) break;
    std::uint32_t packed[4];
    to_operand(packed, x + 8 * block);
    if (block < warp) {
      write_block_transposed(tile, 16 * block, 2 * warp, packed, lane);
    } else {  // one of both triangles of a diagonal 8 × 8 matrix is zero
      packed[2] = transpose_matrix(packed[1]);
      packed[0] |= transpose_matrix(packed[0]);
      packed[3] |= transpose_matrix(packed[3]);
    }
    write_block(tile, 16 * warp, 2 * block, packed, lane);
  }
}

// Adds up what spans each token and writes the gradients of the gates; run by one warp, two tokens per lane.
__device__ __forceinline__ void write_gates(const ChunkBackward& c, const Item& item, int i_h, float decay, int lane,
                                            const TokenSums& sums) {
  float read[2], written[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    read[e] = sums.read_q[2 * lane + e] + sums.read_k[2 * lane + e];
    written[e] = sums.written[2 * lane + e];
  }
  float after = read[0] + read[1], before = written[0] + written[1];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float above = __shfl_down_sync(0xffffffffU, after, offset),
                below = __shfl_up_sync(0xffffffffU, before, offset);
    after += lane < 32 - offset ? above : 0.0F;
    before += lane >= offset ? below : 0.0F;
  }
  after = __shfl_down_sync(0xffffffffU, after, 1);
  before = __shfl_up_sync(0xffffffffU, before, 1);
  after = lane == 31 ? 0.0F : after;
  before = lane == 0 ? 0.0F : before;
  const float z = decay * (sums.states[0] + sums.states[1] + sums.states[2] + sums.states[3]);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    float sum = z + (after + read[1] + (e == 0 ? read[0] : 0.0F)) + (before + (e == 1 ? written[0] : 0.0F));
#pragma unroll
    for (int w = 0; w < 2 * kGroupWarps; ++w) sum += sums.spanning[w][t];
    if (t < item.rows) c.p.dg(item.i_b, item.start + t, i_h, 0) = sum;
  }
}

// The warpgroup of G, of the gradients of values, β and gates, and of the factors of tokens.
template <int kTiles, int kSlices>
__device__ __forceinline__ void token_gradients(const ChunkBackward& c, int thread,
                                                GradsShared<kTiles, kSlices>& shared) {
  const int warp = warp_of(thread);
  const DeltaForward<bfloat16>& p = c.forward.p;
  const bool gated = p.rule.decay == Decay::scalar;
  const int group = static_cast<int>(p.shape.group());
  const auto erase_scale = static_cast<float>(p.rule.step.erase_scale),
             write_scale = static_cast<float>(p.rule.step.write_scale);
  Follower<kTiles, kSlices> follow{shared, thread % 32};
  for (;; follow.finish_item()) {
    const Item& item = follow.next_item();
    if (item.rows == 0) return;
    const unsigned char* k = shared.k[follow.count & 1U];
#pragma unroll 1
    for (int i = 0; i < group; ++i, ++follow.step) {
      const int i_h = item.i_q * group + i, lane = opaque(thread % 32), t = 16 * warp + lane % 16;
      const RowsOfWarp rows(warp, lane);
      TokenSums& sums = shared.sums[follow.step & 1U];
      const TokenPair pair = read_tokens(p, p.beta.at(item.i_b, item.start, i_h),
                                         gated ? p.g.at(item.i_b, item.start, i_h) : nullptr, 0, item.rows, lane);
      float lambda = query_squares<kTiles>(shared_address(k), warp, lane), n_k = 1;
      if (p.rule.qk_l2norm) {
        n_k = rsqrtf(lambda + static_cast<float>(kL2NormEpsilon));
        lambda *= n_k * n_k;
      }
      const Token token = token_of(pair, gated, warp, lane);
      const Gain<float> of_token = gain(p.rule.step, token.beta, lambda);
      if (lane < 16) {
        sums.prefix[t] = token.prefix;
        sums.key_factor[t] = n_k;
        sums.lambda_factor[t] = erase_scale * of_token.alpha;  // until the gradient through λ is known
        sums.lambda_unit[t] = of_token.lambda_unit * n_k;
        sums.lambda_slope[t] = 2 * of_token.lambda_slope;
        sums.beta_slope[t] = of_token.beta_slope;
        sums.beta_unit[t] = of_token.beta_unit;
      }
      named_barrier(kTokensBarrier, kGroupThreads);
      named_arrive(kVectorsBarrier, 2 * kGroupThreads);
      float h[32], products[32];
      leave_undefined(h);
      leave_undefined(products);
      follow.wait(kOutputs);
      products_fence();
      multiply_rows_of<kSlices>(h, shared.d, shared.u);
      multiply_rows_of<kTiles>(products, k, k);
      products_commit();
      follow.wait(kBefore);
      follow.wait(kAfter);
      if (gated) {
        float z = state_product<kSlices * kTiles * kTileBytes>(shared.before, shared.after, 32 * warp + lane);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) z += __shfl_xor_sync(0xffffffffU, z, offset);
        if (lane == 0) sums.states[warp] = z;
      }
      follow.release(kBefore);
      follow.release(kAfter);
      const RecordVectors& vectors = follow.wait_for_vectors();
      const float decay = vectors.decay;
      follow.wait(kValues);
      value_gradients(c, item, i_h, 32 * warp + lane, shared, vectors.b, sums.db);
      follow.release(kValues);
      follow.release_vectors();
      products_wait<0>();
      follow.release(kOutputs);
      const float2 prefix = rows.of(sums.prefix), factor = rows.of(sums.key_factor), a = rows.of(sums.lambda_factor);
      float2 key_key{0, 0};
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        const int column = j / 8 * 16 + j / 4 % 2 * 8 + 2 * (lane % 4), row = rows.first + j / 2 % 2 * 8;
        const float2 columns = *reinterpret_cast<const float2*>(sums.prefix + column);
        const float2 n = *reinterpret_cast<const float2*>(sums.key_factor + column);
        const float before = j / 2 % 2 == 0 ? prefix.x : prefix.y, n_row = j / 2 % 2 == 0 ? factor.x : factor.y;
        const float of_row = j / 2 % 2 == 0 ? a.x : a.y;
        const float x = column < row ? h[j] * (n_row * n.x * exp2_fast(before - columns.x)) : 0.0F;
        const float y = column + 1 < row ? h[j + 1] * (n_row * n.y * exp2_fast(before - columns.y)) : 0.0F;
        (j / 2 % 2 == 0 ? key_key.x : key_key.y) += x * products[j] + y * products[j + 1];
        h[j] = x == 0 ? 0.0F : -of_row * x;  // no negative zeros
        h[j + 1] = y == 0 ? 0.0F : -of_row * y;
        products[j] *= h[j];
        products[j + 1] *= h[j + 1];
      }
      rows.put(sums.key_key, quad_sum(key_key.x), quad_sum(key_key.y));
      write_symmetric(h, shared.g, warp, lane);
      fence_for_products();
      named_arrive(kTilesBarrier, 3 * kGroupThreads);
      named_barrier(kSumsBarrier, 2 * kGroupThreads);
      if (lane < 16) {
        const float da = -(exp2_fast(sums.prefix[t]) * sums.key_factor[t] * sums.state_key[t] + sums.key_key[t]),
                    dalpha = erase_scale * da + write_scale * sums.db[t], unit = sums.beta_unit[t];
        sums.lambda_factor[t] = dalpha * sums.lambda_slope[t] * sums.lambda_unit[t];
        if (t < item.rows) {
          c.p.dbeta(item.i_b, item.start + t, i_h) = to_bfloat16(dalpha * unit * sums.beta_slope[t] * unit);
        }
      }
      named_barrier(kLambdaBarrier, 2 * kGroupThreads);
      if (!gated) continue;
      spanning_sums(products, warp, lane, sums.spanning[kGroupWarps + warp]);
      named_barrier(kTokensBarrier, kGroupThreads);
      named_barrier(kGatesBarrier, 2 * kGroupThreads);
      if (warp == 0) write_gates(c, item, i_h, decay, lane, sums);
    }
  }
}

template <int kTiles, int kSlices>
__global__ void __launch_bounds__(kThreads, 1)
    grads_kernel(const __grid_constant__ ChunkBackward c, const __grid_constant__ RowMaps maps,
                 const __grid_constant__ CUtensorMap dout) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<GradsShared<kTiles, kSlices>*>(memory);
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  if (threadIdx.x == 0) {
    constexpr int kUsers[kParts] = {12, 12, 8, 4};  // warps that use a part
    for (int part = 0; part < kParts; ++part) {
      barrier_init(&shared.full[part], 1);
      barrier_init(&shared.free[part], kUsers[part]);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.item_full[i], 1);
      barrier_init(&shared.item_free[i], 3 * kGroupWarps);
      barrier_init(&shared.vectors_full[i], 1);
      barrier_init(&shared.vectors_free[i], 3 * kGroupWarps);
    }
    barrier_init(&shared.tail, 1);
  }
  for (int at = threadIdx.x; at < kTileBytes / 16; at += kThreads) reinterpret_cast<uint4*>(shared.w)[at] = uint4{};
  fence_for_products();
  __syncthreads();
  // Together no more than the 4 · 128 registers per lane that the block was started with.
  if (group == 0) {
    take_registers<176>();
    query_gradients(c, thread, shared);
  } else if (group == 1) {
    take_registers<168>();
    key_gradients(c, thread, shared);
  } else if (group == 2) {
    give_registers<120>();
    token_gradients(c, thread, shared);
  } else {
    give_registers<48>();
    if (thread < 32) copy_items(c, maps, dout, thread, shared);
  }
  wait_for_kernels();  // their inputs are there, but what comes next is to find them ended
}

template <int kTiles, int kSlices>
void launch(const ChunkBackward& c, const RowMaps& maps, const CUtensorMap& dout, cudaStream_t stream) {
  constexpr int kBytes = sizeof(GradsShared<kTiles, kSlices>);
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = grads_kernel<kTiles, kSlices>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  int device = 0, multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const std::int64_t items = c.forward.slots * c.p.shape.heads;
  launch_early("chunk_bwd, grads", kernel, static_cast<unsigned>(std::min<std::int64_t>(items, multiprocessors)),
               kThreads, kBytes, stream, c, maps, dout);
}

}  // namespace

bool grads_sm90_take(const ChunkBackward& c) { return c.slices <= 2 && c.dq_rows && c.dk_rows; }

void launch_grads_sm90(const ChunkBackward& c, const RowMaps& maps, const CUtensorMap& dout, cudaStream_t stream) {
  if (c.p.shape.key_dim <= 64) {
    return c.slices == 1 ? launch<1, 1>(c, maps, dout, stream) : launch<1, 2>(c, maps, dout, stream);
  }
  return c.slices == 1 ? launch<2, 1>(c, maps, dout, stream) : launch<2, 2>(c, maps, dout, stream);
}

}  // namespace efla::gpu
