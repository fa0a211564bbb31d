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

// Computes the blocks of K Kᵀ and Q Kᵀ of this warp from tiles of 64 · kTiles columns.
template <int kTiles>
__device__ __forceinline__ void block_products(std::uint32_t k_tile, std::uint32_t q_tile, int warp, int lane,
                                               BlockProducts& products) {
#pragma unroll
  for (auto& block : products) {
#pragma unroll
    for (float& x : block) x = 0;
  }
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
  }
}

// Half of the sum of the squares of a row; the thread beside has the other half.
template <int kTiles>
__device__ __forceinline__ float half_row_squares(const unsigned char* tiles, int row, int half) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    const uint4 piece = *reinterpret_cast<const uint4*>(tiles + piece_offset(row, half * 4 * kTiles + i));
    const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (const std::uint32_t w : words) sum += low_bf16(w) * low_bf16(w) + high_bf16(w) * high_bf16(w);
  }
  return sum;
}

// Computes λ and the factors of the L2 norm of every token.
template <int kTiles>
__device__ __forceinline__ void row_norms(const unsigned char* k_tiles, const unsigned char* q_tiles, bool l2norm,
                                          int thread, PrepareScratch& scratch) {
  const int row = thread / 2;
  const auto epsilon = static_cast<float>(kL2NormEpsilon);
  float k = half_row_squares<kTiles>(k_tiles, row, thread % 2);
  k += __shfl_xor_sync(0xffffffffU, k, 1);
  float k_factor = 1, q_factor = 1;
  if (l2norm) {
    float q = half_row_squares<kTiles>(q_tiles, row, thread % 2);
    q += __shfl_xor_sync(0xffffffffU, q, 1);
    k_factor = 1 / sqrtf(k + epsilon);
    q_factor = 1 / sqrtf(q + epsilon);
  }
  if (thread % 2 == 0) {
    scratch.lambda[row] = k * k_factor * k_factor;
    scratch.key_factor[row] = k_factor;
    scratch.query_factor[row] = q_factor;
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
#pragma unroll
  for (int b = 0; b < 5; ++b) {
    const BlockPlace at(warp, b);
#pragma unroll
    for (int half = 0; half < 4; ++half) {  // pairs of neighbouring columns
      const int row = 16 * at.row + lane / 4 + 8 * (half % 2),
                column = 16 * at.column + 2 * (lane % 4) + 8 * (half / 2);
      const float row_factor = at.of_keys ? scratch.row[row] : scale * scratch.query_factor[row];
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = row_factor * scratch.key_factor[column + e] * products[b][2 * half + e];
        if (gated) x *= exp2_fast(scratch.prefix[row] - scratch.prefix[column + e]);
        pair[e] = column + e < row || (!at.of_keys && column + e == row) ? x : 0.0F;
      }
      if (at.of_keys) {
        scratch.transposed[column][row] = pair[0];
        scratch.transposed[column + 1][row] = pair[1];
      } else {
        *reinterpret_cast<std::uint32_t*>(record.p + piece_offset(row, column / 8) + column % 8 * 2) =
            pack_bf16(pair[0], pair[1]);
      }
    }
  }
}

__device__ __forceinline__ void write_t(ChunkRecord& record, int row, int column, float x) {
  *reinterpret_cast<bfloat16*>(record.t + piece_offset(row, column / 8) +
                               column % 8 * 2) = {static_cast<std::uint16_t>(pack_bf16(x, 0.0F))};
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
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      scratch.transposed[first + column][first + i] = x[i];
      write_t(record, first + i, first + column, x[i]);
    }
  }
}

// A 16 × 16 operand of mma in two bfloat16 parts, of which the second is what the first rounds off.
struct SplitOperand {
  std::uint32_t high[4], low[4];
  __device__ __forceinline__ void set(int i, float x, float y) {
    high[i] = pack_bf16(x, y);
    low[i] = pack_bf16(x - low_bf16(high[i]), y - high_bf16(high[i]));
  }
};

// d += a bᵀ, where element (column, row) of b is matrix[first + row][second + column] of the scratch; to about float32.
__device__ __forceinline__ void add_product(float (&d)[8], const SplitOperand& a, const PrepareScratch& scratch,
                                            int first, int second, int lane) {
  SplitOperand b;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + 2 * (lane % 4) + 8 * (i % 2), column = second + lane / 4 + 8 * (i / 2);
    b.set(i, scratch.transposed[row][column], scratch.transposed[row + 1][column]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mma_bf16(d + 4 * half, a.high, b.high[2 * half], b.high[2 * half + 1]);
    mma_bf16(d + 4 * half, a.low, b.high[2 * half], b.high[2 * half + 1]);
    mma_bf16(d + 4 * half, a.high, b.low[2 * half], b.low[2 * half + 1]);
  }
}

// Computes the blocks of T below the diagonal, T_ij = −T_ii Σ_{j≤k<i} A_ik T_kj, one block column j = 3 − w per warp.
// What is multiplied are the transposes, so that an accumulator is the next product's operand.
__device__ __forceinline__ void invert_below(int warp, int lane, const PrepareScratch& scratch, ChunkRecord& record) {
  const int j = 3 - warp;
  SplitOperand column[3];  // T_kjᵀ of k = j, j + 1, j + 2
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = *reinterpret_cast<const float2*>(
        &scratch.transposed[16 * j + lane / 4 + 8 * (i % 2)][16 * j + 2 * (lane % 4) + 8 * (i / 2)]);
    column[0].set(i, pair.x, pair.y);
  }
#pragma unroll
  for (int step = 1; step < 4; ++step) {
    const int i_block = j + step;
    if (i_block > 3) return;
    float sum[8] = {}, block[8] = {};
#pragma unroll
    for (int k = 0; k < step; ++k) add_product(sum, column[k], scratch, 16 * (j + k), 16 * i_block, lane);
    SplitOperand sums;
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.set(i, -sum[2 * i], -sum[2 * i + 1]);
    add_product(block, sums, scratch, 16 * i_block, 16 * i_block, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (step < 3) column[step < 3 ? step : 0].set(i, block[2 * i], block[2 * i + 1]);
      const int row = 16 * i_block + 2 * (lane % 4) + 8 * (i / 2), at = 16 * j + lane / 4 + 8 * (i % 2);
      write_t(record, row, at, block[2 * i]);
      write_t(record, row + 1, at, block[2 * i + 1]);
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
