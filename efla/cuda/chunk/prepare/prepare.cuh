// The work of `prepare`: computes a ChunkRecord from keys and queries in shared memory, with 128 threads.
//
// Matrices of 64 × 64 are divided into 16 × 16 blocks. Only the blocks on and below the diagonal are used. Warp w
// computes block row w of K Kᵀ and of Q Kᵀ, w + 1 blocks each. It inverts diagonal block w of I + A and computes block
// column w of T below the diagonal, 3 − w blocks. A, T, P and the vectors are defined at ChunkRecord (chunk.h).
#pragma once

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/tile.cuh"
#include "efla/cuda/common/wgmma.cuh"
#include "efla/rule/step_size.h"

namespace efla::gpu {

inline constexpr int kPrepareThreads = 128;

// Shared memory of the 128 threads.
struct PrepareScratch {
  // −A below the diagonal blocks. A diagonal block is −A first, and the transposed inverse of I + A later. The padding
  // of a row avoids bank conflicts of float2 reads.
  float matrix[kChunkTokens][kChunkTokens + 8];
  float key_factor[kChunkTokens], query_factor[kChunkTokens];  // n_k and scale n_q
  float row[kChunkTokens];                                     // −a_i n_k,i
  float prefix[kChunkTokens];                                  // log2 γ_i
};

// The accumulators of a block row of K Kᵀ or Q Kᵀ, of mma or wgmma: element 8·b + 4·h + 2·r + e of block column b is
// row lane/4 + 8·r, column 8·h + 2 (lane % 4) + e.
using BlockProducts = float[32];

// Returns the number of the warp, as a value that the compiler knows to be equal in all lanes.
__device__ __forceinline__ int warp_of(int thread) { return __shfl_sync(0xffffffffU, thread / 32, 0); }

// Multiplies block row `warp` of `rows` by key blocks b and b + 1, with mma. `rows` and `keys` are shared addresses of
// tiles; `blocks` gets 16 accumulators.
template <class E, int kTiles>
__device__ __forceinline__ void multiply_blocks(std::uint32_t rows, std::uint32_t keys, int b, int warp, int lane,
                                                float* blocks) {
#pragma unroll
  for (int i = 0; i < 16; ++i) blocks[i] = 0;
#pragma unroll 2
  for (int step = 0; step < 4 * kTiles; ++step) {
    std::uint32_t row[4], columns[2][4];
    load_matrices(row, block_address(rows, 16 * warp, 2 * step, lane));
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices(columns[i], block_address(keys, 16 * (b + i), 2 * step, lane));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mma<E>(blocks + 8 * i, row, columns[i][0], columns[i][2]);
      mma<E>(blocks + 8 * i + 4, row, columns[i][1], columns[i][3]);
    }
  }
}

// Starts the products of block row `warp` of `rows` with all keys. Both are kTiles tiles. On Hopper the products are
// asynchronous, and the caller has called leave_undefined for `products` before.
template <class E, int kTiles>
__device__ __forceinline__ void start_products(std::uint32_t rows, std::uint32_t keys, int warp, int lane,
                                               BlockProducts& products) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const std::uint64_t a = row_operand(rows), b = row_operand(keys);
  products_fence();
#pragma unroll
  for (int step = 0; step < 4 * kTiles; ++step) {
    const int at = step / 4 * (kTileBytes >> 4) + step % 4 * kRowStep;
    multiply_tiles<E>(products, a + at, b + at, step > 0);
  }
  products_commit();
#else
#pragma unroll
  for (int b = 0; b < 4; b += 2) {
    if (b <= warp) multiply_blocks<E, kTiles>(rows, keys, b, warp, lane, products + 8 * b);
  }
#endif
}

// Waits for all products that this warp started. `products` must not be read before.
template <int kCount>
__device__ __forceinline__ void finish_products(float (&products)[kCount]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  products_wait<0>();
#pragma unroll
  for (float& x : products) asm volatile("" : "+f"(x));
#endif
}

// Returns element lane % 16 of the diagonal of a 16 × 16 block, whose accumulators are `block`.
__device__ __forceinline__ float diagonal_of(const float* block, int lane) {
  const bool odd = lane / 4 % 2 == 1;  // e for which 2 (lane % 4) + e = lane / 4
  const float low = odd ? block[1] : block[0], high = odd ? block[7] : block[6];
  const int from = 4 * (lane % 8) + lane % 8 / 2;
  const float first = __shfl_sync(0xffffffffU, low, from), second = __shfl_sync(0xffffffffU, high, from);
  return lane % 16 < 8 ? first : second;
}

// Returns the sum of those elements of the diagonal of a 16 × 16 block that this lane has. `block` are its
// accumulators.
__device__ __forceinline__ float diagonal_part(const float* block, int lane) {
  const int column = lane / 4 - 2 * (lane % 4);  // of the diagonal, counted from the lane's first column
  const float even = block[0] + block[6], odd = block[1] + block[7];
  return column == 0 ? even : column == 1 ? odd : 0.0F;
}

// Returns Σq² of query 16·warp + lane % 16.
template <class E, int kTiles>
__device__ __forceinline__ float query_squares(std::uint32_t q_tile, int warp, int lane) {
  float squares[8] = {};
#pragma unroll 2
  for (int step = 0; step < 4 * kTiles; ++step) {
    std::uint32_t queries[4];
    load_matrices(queries, block_address(q_tile, 16 * warp, 2 * step, lane));
    mma<E>(squares, queries, queries[0], queries[2]);
    mma<E>(squares + 4, queries, queries[1], queries[3]);
  }
  return diagonal_of(squares, lane);
}

// The least log decay that is used. e^kMinDecay is 0 in float32, and larger sums of g would cost other decays digits.
inline constexpr float kMinDecay = -120.0F;

// β and g of tokens 2·lane and 2·lane + 1, zeros for tokens that do not exist. They stay in the types of memory until
// they are used, so that a read does not wait.
template <class E>
struct TokenPair {
  E beta[2];
  float g[2];
};

// Returns the lane's pair of the 64 tokens from t on, of the tokens [t, end). `beta` and `g` point to token 0 of the
// head; g may be null.
template <class E>
__device__ __forceinline__ TokenPair<E> read_tokens(const DeltaForward<E>& p, const E* beta, const float* g, int t,
                                                    int end, int lane) {
  TokenPair<E> pair{};
  t += 2 * lane;
  beta += t * p.beta.stride[1];
  if (t < end) pair.beta[0] = *beta;
  if (t + 1 < end) pair.beta[1] = beta[p.beta.stride[1]];
  if (!g) return pair;
  g += t * p.g.stride[1];
  if (t < end) pair.g[0] = *g;
  if (t + 1 < end) pair.g[1] = g[p.g.stride[1]];
  return pair;
}

// β of a token, and log2 of decays: from the chunk's start to the token (log2 γ_i), from the token to the chunk's end
// (log2 γ_C/γ_i), and over the chunk (log2 γ_C).
struct Token {
  float beta, prefix, suffix, total;
};

// Computes both tokens of a lane. All lanes of the warp take part.
template <class E>
__device__ __forceinline__ void scan_tokens(const TokenPair<E>& pair, bool gated, int lane, Token (&tokens)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) tokens[e] = {to_float(pair.beta[e]), 0, 0, 0};
  if (!gated) return;
  float g[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) g[e] = (pair.g[e] < kMinDecay ? kMinDecay : pair.g[e]) * 1.44269504F;  // NaN stays
  float before = g[0] + g[1], after = before;  // sums over lanes 0 to lane, and lane to 31
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float below = __shfl_up_sync(0xffffffffU, before, offset),
                above = __shfl_down_sync(0xffffffffU, after, offset);
    before += lane >= offset ? below : 0.0F;
    after += lane < 32 - offset ? above : 0.0F;
  }
  tokens[0].total = tokens[1].total = __shfl_sync(0xffffffffU, before, 31);
  before = __shfl_up_sync(0xffffffffU, before, 1);
  after = __shfl_down_sync(0xffffffffU, after, 1);
  before = lane == 0 ? 0.0F : before;
  after = lane == 31 ? 0.0F : after;
  tokens[0].prefix = before + g[0];
  tokens[1].prefix = before + g[0] + g[1];
  tokens[0].suffix = after + g[1];
  tokens[1].suffix = after;
}

// Writes the tokens of a chunk to shared memory. Run by one warp, whose lanes have two tokens each.
template <class E>
__device__ __forceinline__ void share_tokens(const TokenPair<E>& pair, bool gated, int lane,
                                             Token (&shared)[kChunkTokens]) {
  Token tokens[2];
  scan_tokens(pair, gated, lane, tokens);
#pragma unroll
  for (int e = 0; e < 2; ++e) shared[2 * lane + e] = tokens[e];
}

// Returns token 16·warp + lane % 16 of the chunk, of which every warp has all pairs.
template <class E>
__device__ __forceinline__ Token token_of(const TokenPair<E>& pair, bool gated, int warp, int lane) {
  const int from = 8 * warp + lane % 16 / 2;
  const auto mine = [&](float even, float odd) {
    const float first = __shfl_sync(0xffffffffU, even, from), second = __shfl_sync(0xffffffffU, odd, from);
    return lane % 2 == 0 ? first : second;
  };
  Token tokens[2];
  scan_tokens(pair, gated, lane, tokens);
  const float beta = mine(tokens[0].beta, tokens[1].beta);
  if (!gated) return {beta, 0, 0, 0};
  return {beta, mine(tokens[0].prefix, tokens[1].prefix), mine(tokens[0].suffix, tokens[1].suffix), tokens[0].total};
}

// Returns Σk² of key 16·warp + lane % 16, which is on the diagonal of the warp's block row of K Kᵀ.
__device__ __forceinline__ float key_squares(const BlockProducts& keys, int warp, int lane) {
  float squares = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b == warp) squares = diagonal_of(keys + 8 * b, lane);
  }
  return squares;
}

// Writes b, read, write and γ_C of the warp's 16 tokens to the record, and −a n_k, log2 γ and n_k to the scratch.
// `lambda` is Σk² of the lane's token, before the L2 norm.
__device__ __forceinline__ void key_vectors(const DeltaRule& rule, const Token& token, float lambda, int warp, int lane,
                                            PrepareScratch& scratch, ChunkRecord& record) {
  float n_k = 1;
  if (rule.qk_l2norm) {
    n_k = rsqrtf(lambda + static_cast<float>(kL2NormEpsilon));
    lambda *= n_k * n_k;
  }
  const float alpha = gain_alpha(rule.step, token.beta, lambda);
  const float a = static_cast<float>(rule.step.erase_scale) * alpha * n_k;
  const float erased = static_cast<float>(rule.step.erase_scale) * alpha * lambda;  // 1 minus the key's eigenvalue
  const bool bounded = __all_sync(0xffffffffU, erased >= 0 && erased <= 2);
  if (lane >= 16) return;
  const int t = 16 * warp + lane;
  if (lane == 0) record.growth[warp] = bounded ? 1.0F : __int_as_float(0x7f800000);
  scratch.row[t] = -a;
  scratch.prefix[t] = token.prefix;
  scratch.key_factor[t] = n_k;
  record.b[t] = static_cast<float>(rule.step.write_scale) * alpha;
  record.read[t] = a * exp2_fast(token.prefix);
  record.write[t] = n_k * exp2_fast(token.suffix);
  if (t == 0) record.decay = exp2_fast(token.total);
}

// Writes `out` of the warp's 16 tokens to the record and scale n_q to the scratch. `squares` is Σq² of the lane's token
// (query_squares).
__device__ __forceinline__ void query_vectors(const DeltaRule& rule, float scale, const Token& token, float squares,
                                              int warp, int lane, PrepareScratch& scratch, ChunkRecord& record) {
  const float n_q = rule.qk_l2norm ? scale * rsqrtf(squares + static_cast<float>(kL2NormEpsilon)) : scale;
  if (lane >= 16) return;
  scratch.query_factor[16 * warp + lane] = n_q;
  record.out[16 * warp + lane] = n_q * exp2_fast(token.prefix);
}

// Zeroes the blocks of T and P above the diagonal.
__device__ __forceinline__ void clear_upper_blocks(ChunkRecord& record, int thread) {
#pragma unroll
  for (int i = 0; i < kTileBytes / 16 / kPrepareThreads; ++i) {
    const int row = (thread + i * kPrepareThreads) / 8, piece = thread % 8;
    if (piece / 2 > i) {  // rows of pass i are block row i
      *reinterpret_cast<uint4*>(record.t + piece_offset(row, piece)) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(record.p + piece_offset(row, piece)) = uint4{0, 0, 0, 0};
    }
  }
}

// The factors of rows lane / 4 and lane / 4 + 8 of a warp's block row. `below`, for blocks below the diagonal, includes
// the decay from the last token before the block row; `diagonal` does not. `prefix` is log2 γ of the rows, and `before`
// log2 γ of the last token before the block row. Without a gate all decays are 1.
struct RowFactors {
  float below[2], diagonal[2], prefix[2], before;

  __device__ __forceinline__ RowFactors(const float* factors, const PrepareScratch& scratch, int warp, int lane)
      : before(warp > 0 ? scratch.prefix[16 * warp - 1] : 0.0F) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * warp + lane / 4 + 8 * r;
      prefix[r] = scratch.prefix[row];
      diagonal[r] = factors[row];
      below[r] = factors[row] * exp2_fast(prefix[r] - before);
    }
  }
};

// Writes to x a 16 × 16 block of products times the factors of its rows and columns and times Γ.
//
// Below the diagonal Γ_ij is the decay from the last token before the block row to i, times the decay from j to that
// token. Neither exceeds 1. A block on the diagonal has no such token, and Γ_ij is computed for every element.
__device__ __forceinline__ void scale_block(float (&x)[8], const float* block, const RowFactors& rows,
                                            const float* columns, const float* prefixes, bool diagonal, int lane) {
  float factors[4];
  float2 decays[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int column = 8 * h + 2 * (lane % 4);
    const float2 factor = *reinterpret_cast<const float2*>(columns + column);
    decays[h] = *reinterpret_cast<const float2*>(prefixes + column);
    factors[2 * h] = factor.x;
    factors[2 * h + 1] = factor.y;
  }
  if (!diagonal) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factors[2 * h] *= exp2_fast(rows.before - decays[h].x);
      factors[2 * h + 1] *= exp2_fast(rows.before - decays[h].y);
    }
  }
  const float low = diagonal ? rows.diagonal[0] : rows.below[0], high = diagonal ? rows.diagonal[1] : rows.below[1];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = block[i] * ((i / 2 % 2 == 0 ? low : high) * factors[i / 4 * 2 + i % 2]);
  if (diagonal) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 decay = decays[i / 4];
      x[i] *= exp2_fast(rows.prefix[i / 2 % 2] - (i % 2 == 0 ? decay.x : decay.y));
    }
  }
}

// Returns x for a product by mma_tf32, which drops the bits that TF32 does not have. For float16 x is rounded instead,
// because TF32 has as many bits as float16, so that dropped bits would matter as much as float16's rounding.
template <class E>
__device__ __forceinline__ float to_tf32(float x) {
  return std::is_same_v<E, float16> ? round_to_tf32(x) : x;
}

// Writes the warp's block row of −A to the scratch.
template <class E>
__device__ __forceinline__ void write_keys(const BlockProducts& products, int warp, int lane, PrepareScratch& scratch) {
  const RowFactors rows(scratch.row, scratch, warp, lane);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b > warp) break;
    float x[8];
    const bool diagonal = b == warp;
    scale_block(x, products + 8 * b, rows, scratch.key_factor + 16 * b, scratch.prefix + 16 * b, diagonal, lane);
    if (!diagonal) {  // a block on the diagonal stays in float32, because it is inverted in float32
#pragma unroll
      for (float& e : x) e = to_tf32<E>(e);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<float2*>(
          &scratch.matrix[16 * warp + lane / 4 + 8 * (i % 2)][16 * b + 8 * (i / 2) + 2 * (lane % 4)]) =
          float2{x[2 * i], x[2 * i + 1]};
    }
  }
}

// Writes the warp's block row of P to the record. blocks_of(b, blocks) gives block columns b and b + 1 of Q Kᵀ.
template <class E, class F>
__device__ __forceinline__ void write_queries(F&& blocks_of, int warp, int lane, const PrepareScratch& scratch,
                                              ChunkRecord& record) {
#pragma unroll
  for (int pair = 0; pair < 4; pair += 2) {
    if (pair > warp) break;
    float blocks[16];
    blocks_of(pair, blocks);
    const RowFactors rows(scratch.query_factor, scratch, warp, lane);
#pragma unroll
    for (int b = pair; b < pair + 2; ++b) {
      if (b > warp) break;
      float x[8];
      const bool diagonal = b == warp;
      scale_block(x, blocks + 8 * (b - pair), rows, scratch.key_factor + 16 * b, scratch.prefix + 16 * b, diagonal,
                  lane);
      if (diagonal) {
        const int row = lane / 4, column = 2 * (lane % 4);
#pragma unroll
        for (int i : {0, 6}) {
          x[i] = column <= row ? x[i] : 0.0F;
          x[i + 1] = column < row ? x[i + 1] : 0.0F;
        }
        x[4] = x[5] = 0;
      }
      write_block(record.p, 16 * warp, 2 * b,
                  {pack<E>(x[0], x[1]), pack<E>(x[2], x[3]), pack<E>(x[4], x[5]), pack<E>(x[6], x[7])}, lane);
    }
  }
}

// Inverts diagonal block `warp` of I + A and leaves the transposed inverse in the scratch. The block has two 8 × 8
// blocks on its diagonal. They are inverted by forward substitution, one column per lane; both halves of the warp
// compute the same. The 8 × 8 block below them is minus the product of the second inverse, the block itself and the
// first inverse; each half of the warp computes four rows.
__device__ __forceinline__ void invert_diagonal(int warp, int lane, PrepareScratch& scratch) {
  const int half = lane / 16, column = lane % 8, first = 16 * warp, second = first + 8;
  const bool below = lane / 8 % 2 == 1;  // whether this lane has a column of the second inverse
  const int own = below ? second : first;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = one_if_equal(i, column);
#pragma unroll
    for (int quad = 0; 4 * quad < i; ++quad) {
      const float4 a = *reinterpret_cast<const float4*>(&scratch.matrix[own + i][own + 4 * quad]);
      const float row[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (4 * quad + k < i) x[i] += row[k] * x[4 * quad + k];
      }
    }
  }
  float y[8], z[4] = {};  // y: rows from 4·half on of −A times the first inverse, later all 8 rows
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] = 0;
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const float4 a = *reinterpret_cast<const float4*>(&scratch.matrix[second + 4 * half + i][first + 4 * quad]);
      y[i] += a.x * x[4 * quad] + a.y * x[4 * quad + 1] + a.z * x[4 * quad + 2] + a.w * x[4 * quad + 3];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other = __shfl_xor_sync(0xffffffffU, y[i], 16);
    y[i + 4] = half == 0 ? other : y[i];
    y[i] = half == 0 ? y[i] : other;
  }
  __syncwarp();
  const auto write = [&](int row, int column, const float* values) {
    *reinterpret_cast<float4*>(&scratch.matrix[row][column]) = float4{values[0], values[1], values[2], values[3]};
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = half == 0 ? x[i] : x[i + 4];
  write(own + column, own + 4 * half, x);
  __syncwarp();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float4 t = *reinterpret_cast<const float4*>(&scratch.matrix[second + k][second + 4 * half]);
    z[0] += t.x * y[k];
    z[1] += t.y * y[k];
    z[2] += t.z * y[k];
    z[3] += t.w * y[k];
  }
#pragma unroll
  for (float& e : z) e = below ? 0.0F : e;
  write(own + column, (below ? first : second) + 4 * half, z);
}

// The accumulators of a 16 × 16 block as first operand of mma_tf32.
struct Tf32Block {
  std::uint32_t x[8];

  __device__ __forceinline__ void set(int i, float value) { x[i] = __float_as_uint(value); }
};

// d = a bᵀ, plus d if kAdd is set. b is the 16 × 16 block of the scratch's matrix at (row, column). kTransposed: the
// matrix holds bᵀ there.
template <class E, bool kAdd, bool kTransposed>
__device__ __forceinline__ void multiply_tf32(float (&d)[8], const Tf32Block& a, const PrepareScratch& scratch, int row,
                                              int column, int lane) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const std::uint32_t operand[4] = {a.x[4 * step], a.x[4 * step + 2], a.x[4 * step + 1], a.x[4 * step + 3]};
    const int common = 8 * step + 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int other = 8 * half + lane / 4;
      float2 b;
      if constexpr (kTransposed) {
        b = {to_tf32<E>(scratch.matrix[row + common][column + other]),
             to_tf32<E>(scratch.matrix[row + common + 1][column + other])};
      } else {
        b = *reinterpret_cast<const float2*>(&scratch.matrix[row + other][column + common]);
      }
      mma_tf32(d + 4 * half, operand, kAdd || step > 0, __float_as_uint(b.x), __float_as_uint(b.y));
    }
  }
}

// Computes block column j of T, T_ij = T_ii Σ_{j≤k<i} (−A_ik) T_kj for block rows i > j, and writes it to the record.
// The products are of transposed blocks, so that the accumulators of one product are an operand of the next. TF32
// suffices, because T is rounded to E.
template <class E>
__device__ __forceinline__ void invert_below(int j, int lane, const PrepareScratch& scratch, ChunkRecord& record) {
  Tf32Block column[3];  // T_kjᵀ of k = j, j + 1, j + 2
  const auto write = [&](int i_block, const float* x) {
    write_block_transposed(record.t, 16 * i_block, 2 * j,
                           {pack<E>(x[0], x[1]), pack<E>(x[2], x[3]), pack<E>(x[4], x[5]), pack<E>(x[6], x[7])}, lane);
  };
  float block[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = *reinterpret_cast<const float2*>(
        &scratch.matrix[16 * j + lane / 4 + 8 * (i % 2)][16 * j + 2 * (lane % 4) + 8 * (i / 2)]);
    block[2 * i] = to_tf32<E>(pair.x);
    block[2 * i + 1] = to_tf32<E>(pair.y);
  }
  write(j, block);
#pragma unroll
  for (int i = 0; i < 8; ++i) column[0].set(i, block[i]);
#pragma unroll
  for (int step = 1; step < 4; ++step) {
    const int i_block = j + step;
    if (i_block > 3) break;
    float sum[8];
    multiply_tf32<E, false, false>(sum, column[0], scratch, 16 * i_block, 16 * j, lane);
#pragma unroll
    for (int k = 1; k < step; ++k)
      multiply_tf32<E, true, false>(sum, column[k], scratch, 16 * i_block, 16 * (j + k), lane);
    Tf32Block sums;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums.set(i, to_tf32<E>(sum[i]));
    multiply_tf32<E, false, true>(block, sums, scratch, 16 * i_block, 16 * i_block, lane);
#pragma unroll
    for (float& x : block) x = to_tf32<E>(x);  // does not change the result of rounding to E
    write(i_block, block);
    if (step == 3) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) column[step < 3 ? step : 0].set(i, block[i]);
  }
}

// Copies a record from shared to global memory. The record may be overwritten after wait_for_record.
template <int kThreads>
__device__ __forceinline__ void store_record(const ChunkRecord& record, ChunkRecord* to, int thread) {
#if __CUDA_ARCH__ >= 900
  if (thread == 0) store_bulk(to, &record, sizeof(ChunkRecord));
#else
  const auto* from = reinterpret_cast<const uint4*>(&record);
  for (int piece = thread; piece < static_cast<int>(sizeof(ChunkRecord) / 16); piece += kThreads)
    reinterpret_cast<uint4*>(to)[piece] = from[piece];
#endif
}
__device__ __forceinline__ void wait_for_record(int thread) {
#if __CUDA_ARCH__ >= 900
  if (thread == 0) store_bulk_wait();
#endif
}

// Makes writes of this thread to shared memory visible to wgmma and to bulk copies. Does nothing before sm_90.
__device__ __forceinline__ void fence_record() {
#if __CUDA_ARCH__ >= 900
  fence_async_proxy();
#endif
}

}  // namespace efla::gpu
