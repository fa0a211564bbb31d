// The gradients of the inputs by chunks on Hopper GPUs, without a gate per key channel, K ≤ 128 and V ≤ 128. Notation
// of grads_portable.cu, but W and H contain the factors of the L2 norm. docs/design/2026-11-cuda-backward.md explains
// it.
//
//   W_ij = scale n_q,i n_k,j Γ_ij dO_i·U_j  for i ≥ j,    H_ij = n_k,i n_k,j Γ_ij D_i·U_j  for i > j
//   G = −a∘H − (a∘H)ᵀ
//   n_q dq̂ = out∘(dO Sᵀ) + W k,    n_k dk̂ = write∘(U dS'ᵀ) − read∘(D Sᵀ) + Wᵀ q + G k
//   da_i = −γ_i n_k,i k_i·(S D_i) − Σ_j H_ij k_i·k_j
//
// Persistent thread blocks, one per multiprocessor, take one chunk and query head after another. Each has four
// warpgroups. Group 0 computes W and the gradient of q. Group 1 computes the gradient of k. Group 2 computes G, the
// gradients of values, β and gates, and the factors of tokens. In group 3 one warp copies the next operands, and three
// warps compute S·dS'. Operands with value columns are used first. Their shared memory is free during the second half
// of a chunk's work and receives the next chunk. Keys and queries are used until the end and have two places.
#include <algorithm>

#include "efla/cuda/chunk/chunk_bwd.h"
#include "efla/cuda/chunk/grads/grads_sm90.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"

namespace efla::gpu {
namespace {

constexpr int kThreads = 4 * kGroupThreads;

// Turns w, which holds dO Uᵀ, into W by multiplying each element by its factor, and multiplies `products`, which holds
// q kᵀ, by W element by element. n_q: the factors of the rows. Rounds W to operands, and writes its blocks up to the
// diagonal to `tile`.
template <class E>
__device__ __forceinline__ void finish_w(float (&w)[32], float (&products)[32], std::uint32_t (&operand)[4][4],
                                         float2 n_q, const RowsOfWarp<E>& rows, int warp, const TokenSums& sums,
                                         unsigned char* tile) {
  const float2 prefix = rows.of(sums.prefix);
#pragma unroll
  for (int block = 0; block < 4; ++block) {
#pragma unroll
    for (int j = 8 * block; j < 8 * block + 8; j += 2) {
      const int column = 16 * block + j / 4 % 2 * 8 + 2 * (rows.lane % 4), row = rows.first + j / 2 % 2 * 8;
      const float2 from = *reinterpret_cast<const float2*>(sums.from_key + column);
      const float to = j / 2 % 2 == 0 ? prefix.x : prefix.y, n = j / 2 % 2 == 0 ? n_q.x : n_q.y;
      w[j] = column <= row ? w[j] * (n * exp2_fast(to - from.x)) : 0.0F;
      w[j + 1] = column + 1 <= row ? w[j + 1] * (n * exp2_fast(to - from.y)) : 0.0F;
      products[j] *= w[j];
      products[j + 1] *= w[j + 1];
    }
    to_operand<E>(operand[block], w + 8 * block);
    if (block <= warp) write_block(tile, 16 * warp, 2 * block, operand[block], rows.lane);
  }
}

// Runs group 0, which computes W and the gradient of q.
template <int kTiles, int kSlices, class E>
__device__ __forceinline__ void query_gradients(const ChunkBackward<E>& c, int thread,
                                                GradsShared<kTiles, kSlices>& shared) {
  const int warp = warp_of(thread), lane = thread % 32;
  const RowsOfWarp<E> rows(warp, lane);
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
        multiply_images<E, kTiles, kSlices>(of_head, shared.dout, shared.before);
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
      multiply_rows_of<E, kSlices>(w, shared.dout, shared.u);
      multiply_rows_of<E, kTiles>(products, q, k);
      products_commit();
      if (l2norm && i == 0) {
        const float squares = query_squares<E, kTiles>(shared_address(q), warp, lane);
        if (lane < 16) sums.query_factor[16 * warp + lane] = rsqrtf(squares + static_cast<float>(kL2NormEpsilon));
        __syncwarp();
        factor = rows.of(sums.query_factor);
      }
      products_wait<0>();
      follow.release(kOutputs);
      named_barrier(kVectorsBarrier, 2 * kGroupThreads);
      std::uint32_t operand[4][4];
      finish_w(w, products, operand, {c.forward.scale * factor.x, c.forward.scale * factor.y}, rows, warp, sums,
               shared.w);
      fence_async_proxy();
      named_arrive(kTilesBarrier, 3 * kGroupThreads);
      products_fence();
      update_state<E, kTiles>(dq, operand, shared_address(k));
      products_commit();
      if (gated) {
        spanning_sums<E>(products, warp, lane, sums.spanning[warp]);
        named_arrive(kGatesBarrier, 2 * kGroupThreads);
      }
      products_wait<0>();
    }
    store_rows<kTiles>(dq, l2norm, factor, q, c.p.dq, item, warp, lane);
  }
}

// Runs group 1, which computes the gradient of k.
template <int kTiles, int kSlices, class E>
__device__ __forceinline__ void key_gradients(const ChunkBackward<E>& c, int thread,
                                              GradsShared<kTiles, kSlices>& shared) {
  const int warp = warp_of(thread), lane = thread % 32;
  const RowsOfWarp<E> rows(warp, lane);
  const bool of_lambda = gain_depends_on_lambda(c.p.rule);
  const int group = static_cast<int>(c.p.shape.group());
  Follower<kTiles, kSlices> follow{shared, lane};
  float dk[32 * kTiles];
  for (;; follow.finish_item()) {
    const Item& item = follow.next_item();
    if (item.rows == 0) return;
    const unsigned char *k = shared.k[follow.count & 1U], *q = shared.q[follow.count & 1U];
    float2 factor{1, 1}, lambda{0, 0}, unit{1, 1};
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
      multiply_images<E, kTiles, kSlices>(x, shared.d, shared.before);
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
      multiply_images<E, kTiles, kSlices>(x, shared.u, shared.after);
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
      add_product<E, false, kTiles>(dk, shared.g, k);
      add_product<E, true, kTiles>(dk, shared.w, q);
      products_commit();
      products_wait<0>();
      named_barrier(kLambdaBarrier, 2 * kGroupThreads);
      const float2 of_head = rows.of(sums.lambda_factor);
      lambda.x += of_head.x;
      lambda.y += of_head.y;
      unit = rows.of(sums.lambda_unit);
      factor = rows.of(sums.key_factor);
    }
    if (of_lambda) rows.add(dk, lambda, unit, k);
    store_rows<kTiles>(dk, c.p.rule.qk_l2norm, factor, k, c.p.dk, item, warp, lane);
  }
}

// Writes dv of a warp's 16 tokens. A lane has one piece of every fourth row.
template <int kSlices, class E>
__device__ __forceinline__ void write_values(const ChunkBackward<E>& c, const Item& item, int i_h, int warp, int lane,
                                             const unsigned char* d, const float* gains) {
  const int piece = lane % 8, first = 16 * warp + lane / 8;
  const std::int64_t stride = c.p.dv.stride[1];
  E* to = c.p.dv.at(item.i_b, item.start + first, i_h, 8 * piece);
#pragma unroll 1
  for (int row = first; row < 16 * warp + 16; row += 4, to += 4 * stride) {
    const float b = gains[row];
    const auto scaled = [&](std::uint32_t x) { return pack<E>(b * low_of<E>(x), b * high_of<E>(x)); };
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const uint4 x = *reinterpret_cast<const uint4*>(d + slice * kTileBytes + piece_offset(row, piece));
      if (row < item.rows && 64 * slice + 8 * piece < c.p.shape.value_dim) {
        *reinterpret_cast<uint4*>(to + 64 * slice) = uint4{scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w)};
      }
    }
  }
}

// Runs a warp that computes S·dS', the sum of products of elements, which the gradient of a gate needs. It is the sum
// of the diagonals of products of 16 rows of both images. Each of the kHelpers warps has every kHelpers-th block of 16
// rows.
template <int kTiles, int kSlices, class E>
__device__ __forceinline__ void sum_states(const ChunkBackward<E>& c, int helper, int lane,
                                           GradsShared<kTiles, kSlices>& shared) {
  const bool gated = c.p.rule.decay == Decay::scalar;
  const int group = static_cast<int>(c.p.shape.group());
  Follower<kTiles, kSlices> follow{shared, lane};
  for (;; follow.finish_item()) {
    if (follow.next_item().rows == 0) return;
#pragma unroll 1
    for (int i = 0; i < group; ++i, ++follow.step) {
      follow.wait(kBefore);
      follow.wait(kAfter);
      float products[2][8] = {};
      if (gated) {
#pragma unroll 1
        for (int block = helper; block < 4 * kSlices * kTiles; block += kHelpers) {
          const std::uint32_t at = block / 4 * kTileBytes;
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            std::uint32_t before[4], after[4];
            load_matrices(before, block_address(shared_address(shared.before) + at, 16 * (block % 4), 2 * step, lane));
            load_matrices(after, block_address(shared_address(shared.after) + at, 16 * (block % 4), 2 * step, lane));
            mma<E>(products[step % 2], before, after[0], after[2]);
            mma<E>(products[step % 2] + 4, before, after[1], after[3]);
          }
        }
      }
      follow.release(kBefore);
      follow.release(kAfter);
      float sum = diagonal_part(products[0], lane) + diagonal_part(products[1], lane);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
      if (lane == 0) {
        shared.sums[follow.step & 1U].states[helper] = sum;
        shared.states_full.arrive(follow.step);
      }
    }
  }
}

// Writes a warp's block row of G and the transposed blocks. x are the accumulators of −a∘H.
template <class E>
__device__ __forceinline__ void write_symmetric(const float (&x)[32], unsigned char* tile, int warp, int lane) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > warp) break;
    std::uint32_t packed[4];
    to_operand<E>(packed, x + 8 * block);
    if (block < warp) {
      write_block_transposed(tile, 16 * block, 2 * warp, packed, lane);
    } else {  // −a∘H is zero on and above the diagonal, so OR adds the transposed
      packed[2] = transpose_matrix(packed[1]);
      packed[0] |= transpose_matrix(packed[0]);
      packed[3] |= transpose_matrix(packed[3]);
    }
    write_block(tile, 16 * warp, 2 * block, packed, lane);
  }
}

// Adds the terms that span each token and writes the gradients of the gates. Run by one warp, two tokens per lane.
template <class E>
__device__ __forceinline__ void write_gates(const ChunkBackward<E>& c, const Item& item, int i_h, float decay, int lane,
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
  const float z = decay * (sums.states[0] + sums.states[1] + sums.states[2]);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    float sum = z + (after + read[1] + (e == 0 ? read[0] : 0.0F)) + (before + (e == 1 ? written[0] : 0.0F));
#pragma unroll
    for (int w = 0; w < 2 * kGroupWarps; ++w) sum += sums.spanning[w][t];
    if (t < item.rows) c.p.dg(item.i_b, item.start + t, i_h, 0) = sum;
  }
}

// What group 2 needs of the rule for every token. It is computed once.
struct GainRule {
  bool gated, of_lambda;
  float erase_scale, write_scale;

  __device__ explicit GainRule(const DeltaRule& rule)
      : gated(rule.decay == Decay::scalar),
        of_lambda(gain_depends_on_lambda(rule)),
        erase_scale(static_cast<float>(rule.step.erase_scale)),
        write_scale(static_cast<float>(rule.step.write_scale)) {}
};

// Writes the factors and gains of the warp's 16 tokens of a value head to `sums`. k are the tiles of the keys.
template <int kTiles, class E>
__device__ __forceinline__ void write_factors(const DeltaForward<E>& p, const GainRule& rule, const Item& item, int i_h,
                                              const unsigned char* k, int warp, int lane, TokenSums& sums) {
  const TokenPair<E> pair = read_tokens(p, p.beta.at(item.i_b, item.start, i_h),
                                        rule.gated ? p.g.at(item.i_b, item.start, i_h) : nullptr, 0, item.rows, lane);
  float lambda = 0, n_k = 1;
  if (rule.of_lambda || p.rule.qk_l2norm) lambda = query_squares<E, kTiles>(shared_address(k), warp, lane);
  if (p.rule.qk_l2norm) {
    n_k = rsqrtf(lambda + static_cast<float>(kL2NormEpsilon));
    lambda *= n_k * n_k;
  }
  const Token token = token_of(pair, rule.gated, warp, lane);
  const Gain<float> of_token =
      rule.of_lambda ? gain(p.rule.step, token.beta, lambda) : Gain<float>{token.beta, 1, 1, 0, 0};
  if (lane >= 16) return;
  const int t = 16 * warp + lane % 16;
  const float log_factor = __log2f(n_k);
  sums.prefix[t] = token.prefix;
  sums.to_key[t] = token.prefix + log_factor;
  sums.from_key[t] = token.prefix - log_factor;
  sums.key_factor[t] = n_k;
  sums.lambda_factor[t] = rule.erase_scale * of_token.alpha;  // a, replaced by the gradient through λ later
  sums.lambda_unit[t] = of_token.lambda_unit * n_k;
  sums.lambda_slope[t] = 2 * of_token.lambda_slope;
  sums.beta_slope[t] = of_token.beta_slope;
  sums.beta_unit[t] = of_token.beta_unit;
}

// Turns h, which holds D Uᵀ, into −a∘H by multiplying each element by its factor, and multiplies `products`, which
// holds k kᵀ, by −a∘H element by element. Writes Σ_j H_ij k_i·k_j to `sums`.
template <class E>
__device__ __forceinline__ void finish_h(float (&h)[32], float (&products)[32], const RowsOfWarp<E>& rows, int warp,
                                         TokenSums& sums) {
  const float2 to_row = rows.of(sums.to_key), a = rows.of(sums.lambda_factor);
  float2 key_key{0, 0};
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > warp) break;
#pragma unroll
    for (int j = 8 * block; j < 8 * block + 8; j += 2) {
      const int column = 16 * block + j / 4 % 2 * 8 + 2 * (rows.lane % 4);
      const float2 from = *reinterpret_cast<const float2*>(sums.from_key + column);
      const float to = j / 2 % 2 == 0 ? to_row.x : to_row.y;
      h[j] *= exp2_fast(to - from.x);
      h[j + 1] *= exp2_fast(to - from.y);
    }
    if (block == warp) keep_below(h + 8 * block, rows.lane);
#pragma unroll
    for (int j = 8 * block; j < 8 * block + 8; ++j) {
      (j / 2 % 2 == 0 ? key_key.x : key_key.y) += h[j] * products[j];
      // Adding 0 turns −0 into 0, which write_symmetric needs.
      h[j] = __fmaf_rn(j / 2 % 2 == 0 ? -a.x : -a.y, h[j], 0.0F);
      products[j] *= h[j];
    }
  }
  rows.put(sums.key_key, lane_sum<4>(key_key.x), lane_sum<4>(key_key.y));
}

// Runs group 2, which computes G, the gradients of values, β and gates, and the factors of tokens.
template <int kTiles, int kSlices, class E>
__device__ __forceinline__ void token_gradients(const ChunkBackward<E>& c, int thread,
                                                GradsShared<kTiles, kSlices>& shared) {
  const int warp = warp_of(thread);
  const DeltaForward<E>& p = c.forward.p;
  const GainRule rule(p.rule);
  const int group = static_cast<int>(p.shape.group());
  Follower<kTiles, kSlices> follow{shared, thread % 32};
  for (;; follow.finish_item()) {
    const Item& item = follow.next_item();
    if (item.rows == 0) return;
    const unsigned char* k = shared.k[follow.count & 1U];
#pragma unroll 1
    for (int i = 0; i < group; ++i, ++follow.step) {
      const int i_h = item.i_q * group + i, lane = opaque(thread % 32), t = 16 * warp + lane % 16;
      const RowsOfWarp<E> rows(warp, lane);
      TokenSums& sums = shared.sums[follow.step & 1U];
      write_factors<kTiles>(p, rule, item, i_h, k, warp, lane, sums);
      named_barrier(kTokensBarrier, kGroupThreads);
      named_arrive(kVectorsBarrier, 2 * kGroupThreads);
      float h[32], products[32];
      leave_undefined(h);
      leave_undefined(products);
      follow.wait(kOutputs);
      products_fence();
      multiply_rows_of<E, kSlices>(h, shared.d, shared.u);
      multiply_rows_of<E, kTiles>(products, k, k);
      products_commit();
      const RecordVectors& vectors = follow.wait_for_vectors();
      const float decay = vectors.decay;
      write_values<kSlices>(c, item, i_h, warp, lane, shared.d, vectors.b);
      follow.wait(kValues);
      const float db = row_dots<E, kSlices>(shared_address(shared.v), shared_address(shared.d), warp, lane);
      follow.release(kValues);
      products_wait<0>();
      follow.release(kOutputs);
      finish_h(h, products, rows, warp, sums);
      write_symmetric<E>(h, shared.g, warp, lane);
      fence_async_proxy();
      named_arrive(kTilesBarrier, 3 * kGroupThreads);
      named_barrier(kSumsBarrier, 2 * kGroupThreads);
      if (lane < 16) {
        const float da = -(exp2_fast(sums.to_key[t]) * sums.state_key[t] + sums.key_key[t]),
                    dalpha = rule.erase_scale * da + rule.write_scale * db, unit = sums.beta_unit[t];
        sums.lambda_factor[t] = dalpha * sums.lambda_slope[t] * sums.lambda_unit[t];
        if (t < item.rows) {
          c.p.dbeta(item.i_b, item.start + t, i_h) = from_state<E>(dalpha * unit * sums.beta_slope[t] * unit);
        }
      }
      named_barrier(kLambdaBarrier, 2 * kGroupThreads);
      if (rule.gated) {
        spanning_sums<E>(products, warp, lane, sums.spanning[kGroupWarps + warp]);
        named_barrier(kTokensBarrier, kGroupThreads);
        named_barrier(kGatesBarrier, 2 * kGroupThreads);
        if (warp == 0) {
          shared.states_full.wait(follow.step);
          write_gates(c, item, i_h, decay, lane, sums);
        }
      }
      follow.release_vectors();  // and the sums S·dS' of the same step
    }
  }
}

template <class E, int kTiles, int kSlices>
__global__ void __launch_bounds__(kThreads, 1)
    grads_kernel(const __grid_constant__ ChunkBackward<E> c, const __grid_constant__ RowMaps maps,
                 const __grid_constant__ CUtensorMap dout) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<GradsShared<kTiles, kSlices>*>(memory);
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  if (threadIdx.x == 0) {
    constexpr int kUsers[kParts] = {12, 8 + kHelpers, 4 + kHelpers, 4};  // warps that use a part
    for (int part = 0; part < kParts; ++part) shared.parts[part].init(1, kUsers[part]);
    shared.item_ring.init(1, 3 * kGroupWarps + kHelpers);
    shared.vectors_ring.init(1, 3 * kGroupWarps);
    shared.states_full.init(kHelpers);
    barrier_init(&shared.tail, 1);
  }
  for (int at = threadIdx.x; at < kTileBytes / 16; at += kThreads) reinterpret_cast<uint4*>(shared.w)[at] = uint4{};
  fence_async_proxy();
  __syncthreads();
  // Together at most 4 · 128 registers per lane, with which the thread block was started.
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
    if (thread < 32) {
      copy_items(c, maps, dout, thread, shared);
    } else {
      sum_states(c, warp_of(thread) - 1, thread % 32, shared);
    }
  }
  wait_for_kernels();  // the inputs are complete, but the next kernel must find the sweeps ended
}

template <int kTiles, int kSlices, class E>
void launch(const ChunkBackward<E>& c, const RowMaps& maps, const CUtensorMap& dout, cudaStream_t stream) {
  constexpr int kBytes = sizeof(GradsShared<kTiles, kSlices>);
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = grads_kernel<E, kTiles, kSlices>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  const std::int64_t items = c.forward.slots * c.p.shape.heads;
  launch_early("chunk_bwd, grads", kernel, static_cast<unsigned>(std::min<std::int64_t>(items, multiprocessors())),
               kThreads, kBytes, stream, c, maps, dout);
}

}  // namespace

template <class E>
bool grads_sm90_take(const ChunkBackward<E>& c) {
  return c.slices <= 2 && !divides_keys(c.p.shape) && c.dq_rows && c.dk_rows;
}

template <class E>
void launch_grads_sm90(const ChunkBackward<E>& c, const RowMaps& maps, const CUtensorMap& dout, cudaStream_t stream) {
  if (c.p.shape.key_dim <= 64) {
    return c.slices == 1 ? launch<1, 1>(c, maps, dout, stream) : launch<1, 2>(c, maps, dout, stream);
  }
  return c.slices == 1 ? launch<2, 1>(c, maps, dout, stream) : launch<2, 2>(c, maps, dout, stream);
}

template bool grads_sm90_take(const ChunkBackward<bfloat16>&);
template bool grads_sm90_take(const ChunkBackward<float16>&);
template void launch_grads_sm90(const ChunkBackward<bfloat16>&, const RowMaps&, const CUtensorMap&, cudaStream_t);
template void launch_grads_sm90(const ChunkBackward<float16>&, const RowMaps&, const CUtensorMap&, cudaStream_t);

}  // namespace efla::gpu
