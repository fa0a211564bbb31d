// What a chunk brings to the sweep (ChunkRecord), computed by 128 threads from its keys and queries in shared memory.
//
// Matrices of 64 × 64 are cut in 16 × 16 blocks, of which only those on and below the diagonal are computed. Warp w has
// block row w of K Kᵀ and block row 3 − w of Q Kᵀ, five blocks together.
#pragma once

#include "efla/cuda/tile.cuh"
#include "efla/rule/step_size.h"

namespace efla::gpu {

inline constexpr int kPrepareThreads = 128;

struct PrepareScratch {
  // Aᵀ below the diagonal blocks, which become those of Tᵀ: the element (row, column) of A is transposed[column][row].
  float transposed[kChunkTokens][kChunkTokens + 4];
  float lambda[kChunkTokens], key_factor[kChunkTokens],
      query_factor[kChunkTokens];  // Σk², and the factors of the L2 norm
  float row[kChunkTokens];         // a_i n_k,i
  float prefix[kChunkTokens];      // log2 γ_i
};

// The five blocks of a warp: of block b, the elements that a thread owns of the accumulators of mma.
using BlockProducts = float[5][8];

// The block row and block column of block b of warp w; of K Kᵀ where of_keys is set, of Q Kᵀ otherwise.
struct BlockPlace {
  bool of_keys;
  int row, column;
  __device__ BlockPlace(int w, int b) : of_keys(b <= w), row(b <= w ? w : 3 - w), column(b <= w ? b : b - w - 1) {}
};

// Computes the blocks of K Kᵀ and Q Kᵀ of this warp from tiles of 64 · kTiles columns, and from the diagonals of K Kᵀ
// and Q Qᵀ λ and the factors of the L2 norm of every token.
template <int kTiles>
__device__ __forceinline__ void block_products(std::uint32_t k_tile, std::uint32_t q_tile, bool l2norm, int warp,
                                               int lane, BlockProducts& products, PrepareScratch& scratch) {
#pragma unroll
  for (auto& block : products) {
#pragma unroll
    for (float& x : block) x = 0;
  }
  float squares[8] = {};
#pragma unroll
  for (int step = 0; step < 4 * kTiles; ++step) {
    std::uint32_t keys[4], queries[4];
    load_matrices(keys, block_address(k_tile, 16 * warp, 2 * step, lane));
    load_matrices(queries, block_address(q_tile, 16 * (3 - warp), 2 * step, lane));
#pragma unroll
    for (int b = 0; b < 5; ++b) {
      const BlockPlace at(warp, b);
      std::uint32_t columns[4];
      load_matrices(columns, block_address(k_tile, 16 * at.column, 2 * step, lane));
      if (at.of_keys) {
        mma_bf16(products[b], keys, columns[0], columns[2]);
        mma_bf16(products[b] + 4, keys, columns[1], columns[3]);
      } else {
        mma_bf16(products[b], queries, columns[0], columns[2]);
        mma_bf16(products[b] + 4, queries, columns[1], columns[3]);
      }
    }
    if (l2norm) {
      mma_bf16(squares, queries, queries[0], queries[2]);
      mma_bf16(squares + 4, queries, queries[1], queries[3]);
    }
  }
  // Of a diagonal block the lane with 2 (lane % 4) + e = lane / 4 owns the elements lane / 4 and lane / 4 + 8 of the
  // diagonal.
  if (lane % 4 != lane / 8) return;
  const int e = lane / 4 % 2;
  const auto epsilon = static_cast<float>(kL2NormEpsilon);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float k = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (b == warp) k = e == 0 ? products[b][6 * half] : products[b][6 * half + 1];
    }
    const float q = e == 0 ? squares[6 * half] : squares[6 * half + 1];
    const int row = 16 * warp + lane / 4 + 8 * half;
    const float k_factor = l2norm ? 1 / sqrtf(k + epsilon) : 1.0F;
    scratch.lambda[row] = k * k_factor * k_factor;
    scratch.key_factor[row] = k_factor;
    scratch.query_factor[16 * (3 - warp) + lane / 4 + 8 * half] = l2norm ? 1 / sqrtf(q + epsilon) : 1.0F;
  }
}

// Decays below e^kMinDecay are zero in float32 whatever their exponent; a smaller one would cost the others digits.
inline constexpr float kMinDecay = -120.0F;

// β and g of two neighbouring tokens, 2·lane and the next; tokens that do not exist change nothing.
struct TokenPair {
  float beta[2], g[2];
};

__device__ __forceinline__ TokenPair read_tokens(const DeltaForward<bfloat16>& p, const ChunkAt& at, std::int64_t i_h,
                                                 int lane) {
  TokenPair pair{};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (2 * lane + e >= at.rows) continue;
    pair.beta[e] = to_float(p.beta(at.i_b, at.start + 2 * lane + e, i_h));
    if (p.g) {
      const float g = p.g(at.i_b, at.start + 2 * lane + e, i_h, 0);
      pair.g[e] = (g < kMinDecay ? kMinDecay : g) * 1.44269504F;  // to base 2; NaN stays
    }
  }
  return pair;
}

// Computes the gains and decays of all tokens; run by one warp.
__device__ __forceinline__ void token_vectors(const DeltaRule& rule, float scale, const TokenPair& pair, int lane,
                                              PrepareScratch& scratch, ChunkRecord& record) {
  float before = pair.g[0] + pair.g[1], after = before;  // sums over the lanes up to this one, and from it on
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float below = __shfl_up_sync(0xffffffffU, before, offset),
                above = __shfl_down_sync(0xffffffffU, after, offset);
    before += lane >= offset ? below : 0.0F;
    after += lane < 32 - offset ? above : 0.0F;
  }
  const float total = __shfl_sync(0xffffffffU, before, 31);
  before = __shfl_up_sync(0xffffffffU, before, 1);
  after = __shfl_down_sync(0xffffffffU, after, 1);
  before = lane == 0 ? 0.0F : before;
  after = lane == 31 ? 0.0F : after;
  const float prefix[2] = {before + pair.g[0], before + pair.g[0] + pair.g[1]}, suffix[2] = {after + pair.g[1], after};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    const float alpha = gain_alpha(rule.step, pair.beta[e], scratch.lambda[t]);
    const float a = static_cast<float>(rule.step.erase_scale) * alpha, n_k = scratch.key_factor[t];
    const float decay = exp2f(prefix[e]);
    scratch.row[t] = a * n_k;
    scratch.prefix[t] = prefix[e];
    record.b[t] = static_cast<float>(rule.step.write_scale) * alpha;
    record.read[t] = a * decay * n_k;
    record.write[t] = n_k * exp2f(suffix[e]);
    record.out[t] = scale * decay * scratch.query_factor[t];
  }
  if (lane == 0) record.decay = exp2f(total);
}

// Zeros the blocks above the diagonal of T and P.
__device__ __forceinline__ void clear_upper_blocks(ChunkRecord& record, int thread) {
#pragma unroll
  for (int i = 0; i < kTileBytes / 16 / kPrepareThreads; ++i) {
    const int row = (thread + i * kPrepareThreads) / 8, piece = thread % 8;
    if (piece / 2 > row / 16) {
      *reinterpret_cast<uint4*>(record.t + piece_offset(row, piece)) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(record.p + piece_offset(row, piece)) = uint4{0, 0, 0, 0};
    }
  }
}

// Writes A, transposed, to the scratch and P to the record.
__device__ __forceinline__ void write_blocks(const BlockProducts& products, bool gated, float scale, int warp, int lane,
                                             PrepareScratch& scratch, ChunkRecord& record) {
  float factor[2][2], prefix[2][2];  // of rows lane / 4 and lane / 4 + 8 of the queries' block row, then the keys'
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = 16 * (3 - warp) + lane / 4 + 8 * r, key = 16 * warp + lane / 4 + 8 * r;
    factor[0][r] = scale * scratch.query_factor[query];
    factor[1][r] = scratch.row[key];
    prefix[0][r] = scratch.prefix[query];
    prefix[1][r] = scratch.prefix[key];
  }
#pragma unroll
  for (int b = 0; b < 5; ++b) {
    const BlockPlace at(warp, b);
    const bool diagonal = at.row == at.column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = 16 * at.column + 8 * half + 2 * (lane % 4);
      const float2 key = *reinterpret_cast<const float2*>(&scratch.key_factor[column]);
      const float2 before = *reinterpret_cast<const float2*>(&scratch.prefix[column]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = 16 * at.row + lane / 4 + 8 * r;
        const float row_factor = at.of_keys ? factor[1][r] : factor[0][r];
        float x = row_factor * key.x * products[b][4 * half + 2 * r],
              y = row_factor * key.y * products[b][4 * half + 2 * r + 1];
        if (gated) {
          const float row_prefix = at.of_keys ? prefix[1][r] : prefix[0][r];
          x *= exp2_fast(row_prefix - before.x);
          y *= exp2_fast(row_prefix - before.y);
        }
        if (diagonal) {
          x = column < row || (!at.of_keys && column == row) ? x : 0.0F;
          y = column + 1 < row || (!at.of_keys && column + 1 == row) ? y : 0.0F;
        }
        if (at.of_keys) {
          scratch.transposed[column][row] = x;
          scratch.transposed[column + 1][row] = y;
        } else {
          *reinterpret_cast<std::uint32_t*>(record.p + piece_offset(row, column / 8) + column % 8 * 2) =
              pack_bf16(x, y);
        }
      }
    }
  }
}

// Inverts diagonal block w of I + A by forward substitution, one column per lane (twice, by both halves of the warp).
__device__ __forceinline__ void invert_diagonal(int warp, int lane, PrepareScratch& scratch, ChunkRecord& record) {
  const int first = 16 * warp, column = lane % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
  for (int k = 0; k < 15; ++k) {
#pragma unroll
    for (int quad = (k + 1) / 4; quad < 4; ++quad) {
      const float4 a = *reinterpret_cast<const float4*>(&scratch.transposed[first + k][first + 4 * quad]);
      const float row[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * quad + i > k) x[4 * quad + i] -= row[i] * x[k];
      }
    }
  }
  __syncwarp();
  // The first half of the warp writes rows 0 to 7, the second rows 8 to 15.
  const bool second = lane >= 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = second ? x[i + 8] : x[i];
  const int row = first + (second ? 8 : 0);
  auto* to = reinterpret_cast<float4*>(&scratch.transposed[first + column][row]);
  to[0] = float4{x[0], x[1], x[2], x[3]};
  to[1] = float4{x[4], x[5], x[6], x[7]};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    *reinterpret_cast<bfloat16*>(record.t + piece_offset(row + i, (first + column) / 8) +
                                 column % 8 * 2) = {static_cast<std::uint16_t>(pack_bf16(x[i], 0.0F))};
  }
}

// d += a bᵀ, where element (column, row) of b is matrix[first + row][second + column] of the scratch, and a are the
// accumulators of a 16 × 16 block in TF32.
__device__ __forceinline__ void add_product(float (&d)[8], const std::uint32_t (&a)[8], const PrepareScratch& scratch,
                                            int first, int second, int lane) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const std::uint32_t operand[4] = {a[4 * step], a[4 * step + 2], a[4 * step + 1], a[4 * step + 3]};
    const int row = first + 8 * step + 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = second + 8 * half + lane / 4;
      mma_tf32(d + 4 * half, operand, to_tf32(scratch.transposed[row][column]),
               to_tf32(scratch.transposed[row + 1][column]));
    }
  }
}

// Computes the blocks of T below the diagonal, T_ij = −T_ii Σ_{j≤k<i} A_ik T_kj, one block column j = 3 − w per warp.
// What is multiplied are the transposes, so that an accumulator is the next product's operand. TF32 is enough, because
// T is rounded to bfloat16.
__device__ __forceinline__ void invert_below(int warp, int lane, const PrepareScratch& scratch, ChunkRecord& record) {
  const int j = 3 - warp;
  std::uint32_t column[3][8];  // T_kjᵀ of k = j, j + 1, j + 2
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = *reinterpret_cast<const float2*>(
        &scratch.transposed[16 * j + lane / 4 + 8 * (i % 2)][16 * j + 2 * (lane % 4) + 8 * (i / 2)]);
    column[0][2 * i] = to_tf32(pair.x);
    column[0][2 * i + 1] = to_tf32(pair.y);
  }
#pragma unroll
  for (int step = 1; step < 4; ++step) {
    const int i_block = j + step;
    if (i_block > 3) return;
    float sum[8] = {}, block[8] = {};
#pragma unroll
    for (int k = 0; k < step; ++k) add_product(sum, column[k], scratch, 16 * (j + k), 16 * i_block, lane);
    std::uint32_t sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = to_tf32(-sum[i]);
    add_product(block, sums, scratch, 16 * i_block, 16 * i_block, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (step < 3) {
        column[step < 3 ? step : 0][2 * i] = to_tf32(block[2 * i]);
        column[step < 3 ? step : 0][2 * i + 1] = to_tf32(block[2 * i + 1]);
      }
      write_transposed(record.t, 16 * i_block + 8 * (i / 2), 2 * j + i % 2, pack_bf16(block[2 * i], block[2 * i + 1]),
                       lane);
    }
  }
}

// Fills T, P and the vectors of a record from the products and norms of the chunk's keys and queries, and β and g of
// one value head, which warp 0 has read. `sync` is a barrier of the 128 threads. Ends without a barrier.
template <class Sync>
__device__ __forceinline__ void fill_record(const BlockProducts& products, const DeltaRule& rule, float scale,
                                            const TokenPair& tokens, int thread, PrepareScratch& scratch,
                                            ChunkRecord& record, Sync&& sync) {
  const int warp = thread / 32, lane = thread % 32;
  if (warp == 0) token_vectors(rule, scale, tokens, lane, scratch, record);
  sync();
  write_blocks(products, rule.decay == Decay::scalar, scale, warp, lane, scratch, record);
  __syncwarp();
  invert_diagonal(warp, lane, scratch, record);
  sync();
  invert_below(warp, lane, scratch, record);
}

}  // namespace efla::gpu
