// The gradients of a chunk's inputs as a thread block computes them on any GPU. grads_portable.cu has the equations and
// the division over warps.
#pragma once

#include <cstdint>

#include "efla/cuda/chunk/chunk_bwd.h"
#include "efla/cuda/chunk/grads/grads.cuh"
#include "efla/cuda/chunk/prepare/prepare.cuh"
#include "efla/cuda/chunk/products.cuh"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {

// Sums over the keys of a token, to which every part of the keys adds: k̂·X, and the terms r and w of a gate's gradient.
enum PortableSum { kErase, kRead, kWritten, kSums };

// The passes over the slices of value columns, in their order.
enum class PortablePhase { scores, read, write };

// The number of parts of the keys.
template <int kTiles>
inline constexpr int kKeyParts = kTiles == 4 ? 4 : 2;

// The shared memory of a thread block.
template <int kTiles>
struct PortableMemory {
  static constexpr int kStageTiles = kTiles + 2, kStages = kTiles == 4 ? 2 : 1;
  alignas(1024) unsigned char k[kTiles * kTileBytes], q[kTiles * kTileBytes];
  unsigned char w_keys[kTileBytes], w_queries[kTileBytes];  // W_ij n_k,j and W_ij n_q,i
  unsigned char h_keys[kTileBytes], h_erase[kTileBytes];    // H_ij n_k,j and −a_i n_k,i H_ij
  unsigned char stage[kStages][kStageTiles * kTileBytes];   // tiles of a slice; stage 0 also has M and outputs
  float key_factor[kChunkTokens], query_factor[kChunkTokens];
  float prefix[kChunkTokens], suffix[kChunkTokens];  // log2 γ_i, and ŝ_i
  float a[kChunkTokens], b[kChunkTokens];
  KeySums<kSums, kKeyParts<kTiles>, kChunkTokens> sums;
};

// Returns the two elements of `tiles` at a pair of accumulators: row `row`, columns 8·piece + 2 (lane % 4) and the
// next.
template <class E>
__device__ __forceinline__ float2 pair_of(const unsigned char* tiles, int row, int piece, int lane) {
  const auto pair = *reinterpret_cast<const std::uint32_t*>(tiles + piece_offset(row, piece) + lane % 4 * 4);
  return {low_of<E>(pair), high_of<E>(pair)};
}

// Computes a chunk and a query head. kGrouped: the query head has several value heads.
template <class E, int kTiles, bool kGrouped>
class PortableGrads {
 public:
  static constexpr int kParts = kKeyParts<kTiles>, kWarps = 4 * kParts, kThreads = 32 * kWarps;
  static constexpr int kStages = PortableMemory<kTiles>::kStages, kAhead = kStages - 1;
  static constexpr int kRowThreads = kThreads / kChunkTokens;                // neighbouring threads that share a row
  static constexpr int kBlocks = 4 * kTiles / kParts, kCount = 8 * kBlocks;  // 16-key blocks and accumulators of a warp
  using Sums = float[kCount];

  __device__ PortableGrads(const ChunkBackward<E>& c, PortableMemory<kTiles>& memory, const ChunkAt& at, int slot,
                           int i_q)
      : c_(c),
        p_(c.p),
        m_(memory),
        at_(at),
        slot_(slot),
        i_q_(i_q),
        thread_(threadIdx.x),
        lane_(threadIdx.x % 32),
        row_(threadIdx.x / 32 % 4),
        part_(threadIdx.x / 128),
        piece_(2 * kBlocks * (threadIdx.x / 128)) {}

  // Writes the gradients of all inputs. If the query head has one value head, the gradient of q is stored before the
  // gradient of k is computed, so that two thread blocks fit into the registers of a multiprocessor. With sixteen warps
  // the sums over value heads are in memory, because registers are scarce.
  __device__ void run() {
    load_head();
    if constexpr (kGrouped && kTiles == 4) {
      const std::int64_t group = p_.shape.group(), head = slot_ * p_.shape.heads + i_q_;
      float* const sums = c_.key_sums + head * (2 * kCount * kThreads) + thread_;
      Sums x, of_head;
      const auto add_to = [&](float* sum) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          float& element = sum[i * kThreads];
          element = i_h_ == i_q_ * group ? of_head[i] : element + of_head[i];
        }
      };
      const auto store_sum = [&](const float* sum, auto&&... to) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) of_head[i] = sum[i * kThreads];
        store(of_head, to...);
      };
      for (i_h_ = i_q_ * group; i_h_ < (i_q_ + 1) * group; ++i_h_) {
        read_part(of_head, x);
        add_to(sums);
        write_gradients(x, of_head);
        finish_tokens(of_head);
        add_to(sums + kCount * kThreads);
      }
      store_sum(sums, m_.q, m_.query_factor, p_.dq, c_.dq_rows);
      store_sum(sums + kCount * kThreads, m_.k, m_.key_factor, p_.dk, c_.dk_rows);
    } else if constexpr (kGrouped) {
      Sums dq = {}, dk = {};
      const int group = static_cast<int>(p_.shape.group());
      for (i_h_ = i_q_ * group; i_h_ < (i_q_ + 1) * group; ++i_h_) {
        Sums of_head, x;
        read_part(of_head, x);
#pragma unroll
        for (int i = 0; i < kCount; ++i) dq[i] += of_head[i];
        write_gradients(x, of_head);
        finish_tokens(of_head);
#pragma unroll
        for (int i = 0; i < kCount; ++i) dk[i] += of_head[i];
      }
      store(dq, m_.q, m_.query_factor, p_.dq, c_.dq_rows);
      store(dk, m_.k, m_.key_factor, p_.dk, c_.dk_rows);
    } else {
      i_h_ = i_q_;
      Sums x, gradient;
      read_part(gradient, x);
      store(gradient, m_.q, m_.query_factor, p_.dq, c_.dq_rows);
      write_gradients(x, gradient);
      finish_tokens(gradient);
      store(gradient, m_.k, m_.key_factor, p_.dk, c_.dk_rows);
    }
  }

 private:
  // Loads keys and queries and computes the factors of the L2 norm. Ends with a barrier.
  __device__ void load_head() {
    load_rows<kTiles, kThreads>(m_.k, p_.k, at_.i_b, at_.start, at_.rows, i_q_, 0, c_.forward.k_rows, thread_);
    load_rows<kTiles, kThreads>(m_.q, p_.q, at_.i_b, at_.start, at_.rows, i_q_, 0, c_.forward.q_rows, thread_);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    const int row = thread_ / kRowThreads;
    const float k = squares(m_.k, row), q = squares(m_.q, row);
    constexpr auto kEpsilon = static_cast<float>(kL2NormEpsilon);
    const float k_factor = p_.rule.qk_l2norm ? 1 / sqrtf(k + kEpsilon) : 1.0F;
    if (thread_ % kRowThreads == 0) {
      m_.key_factor[row] = k_factor;
      m_.query_factor[row] = p_.rule.qk_l2norm ? 1 / sqrtf(q + kEpsilon) : 1.0F;
    }
    __syncthreads();
  }

  // Computes what a value head's tokens read: leaves the gradient of q̂ in dq, and X in x.
  __device__ void read_part(Sums& dq, Sums& x) {
    token_vectors();
    scores();
    read_gradients(dq, x);
  }

  // Applies the backward of the L2 norm to the gradient of k̂ or q̂, and stores the gradient of k or q.
  __device__ void store(Sums& gradient, const unsigned char* tiles, const float* factors, const View<E, 4>& to,
                        bool aligned) {
    if (p_.rule.qk_l2norm) {
      float along[2] = {};
      for_pairs(
          [&](int r, int row, int piece, float* pair) {
            const float2 x = pair_of<E>(tiles, row, piece, lane_);
            along[r] += factors[row] * (x.x * pair[0] + x.y * pair[1]);
          },
          gradient);
      __syncthreads();
      put_sums(kWritten, along);
      __syncthreads();
      for_pairs(
          [&](int, int row, int piece, float* pair) {
            const float2 x = pair_of<E>(tiles, row, piece, lane_);
            const float factor = factors[row], sum = factor * m_.sums.total(kWritten, row);
            pair[0] = factor * (pair[0] - sum * x.x);
            pair[1] = factor * (pair[1] - sum * x.y);
          },
          gradient);
    }
    __syncthreads();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      std::uint32_t packed[4];
      to_operand<E>(packed, gradient + 8 * block);
      write_block(m_.stage[0], 16 * row_, piece_ + 2 * block, packed, lane_);
    }
    __syncthreads();
    constexpr int kPieces = 8 * kTiles;
    const int piece = thread_ % kPieces, count = min(static_cast<int>(to.extent[3]) - 8 * piece, 8);
    for (int row = thread_ / kPieces; row < at_.rows && count > 0; row += kThreads / kPieces) {
      const uint4 values = *reinterpret_cast<const uint4*>(m_.stage[0] + piece_offset(row, piece));
      store_row_piece<E>(to.at(at_.i_b, at_.start + row, i_q_, 8 * piece), to.stride[3], values, count, aligned);
    }
    __syncthreads();
  }

  // Calls f(r, row, piece, pair) for every pair of accumulators of a warp, with `row` = 16 row_ + lane / 4 + 8 r.
  template <class F>
  __device__ void for_pairs(F&& f, Sums& sums) {
    const int row = opaque(16 * row_ + lane_ / 4);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) f(i % 2, row + 8 * (i % 2), piece_ + i / 2, sums + 2 * i);
  }

  // Writes the warp's part of a sum over keys, for its 16 rows.
  __device__ void put_sums(int kind, const float (&sums)[2]) {
    m_.sums.put(kind, part_, 16 * row_ + lane_ / 4, sums, lane_);
  }

  // Returns the sum of the squares of a piece.
  __device__ static float piece_squares(const unsigned char* tiles, int row, int piece) {
    const uint4 words = *reinterpret_cast<const uint4*>(tiles + piece_offset(row, piece));
    float sum = 0;
    for (const std::uint32_t word : {words.x, words.y, words.z, words.w}) {
      sum += low_of<E>(word) * low_of<E>(word) + high_of<E>(word) * high_of<E>(word);
    }
    return sum;
  }

  // Returns the sum of the squares of a row, computed by the threads of the row.
  __device__ float squares(const unsigned char* tiles, int row) const {
    constexpr int kPieces = 8 * kTiles / kRowThreads;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) sum += piece_squares(tiles, row, kPieces * (thread_ % kRowThreads) + i);
    return lane_sum<kRowThreads>(sum);
  }

  // Returns λ of token `thread_`. It is computed where it is needed, because registers are scarce.
  __device__ float lambda() const {
    float sum = 0;
#pragma unroll 1
    for (int piece = 0; piece < 8 * kTiles; ++piece) sum += piece_squares(m_.k, thread_, piece);
    return sum * m_.key_factor[thread_] * m_.key_factor[thread_];
  }

  // Returns β of token `thread_`.
  __device__ float beta() const {
    return thread_ < at_.rows ? to_float(p_.beta(at_.i_b, at_.start + thread_, i_h_)) : 0.0F;
  }

  // Computes the decays and gains of the value head's tokens. Ends with a barrier.
  __device__ void token_vectors() {
    prefetch<PortablePhase::scores>();
    if (thread_ < 32) {
      const DeltaForward<E>& p = c_.forward.p;
      const TokenPair<E> pair = read_tokens(p, p.beta.at(at_.i_b, at_.start, i_h_),
                                            p.g ? p.g.at(at_.i_b, at_.start, i_h_) : nullptr, 0, at_.rows, lane_);
      Token tokens[2];
      scan_tokens(pair, p.rule.decay == Decay::scalar, lane_, tokens);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        m_.prefix[2 * lane_ + e] = tokens[e].prefix;
        m_.suffix[2 * lane_ + e] = exp2f(tokens[e].suffix);
      }
    }
    if (thread_ < kChunkTokens) {
      const float alpha = gain_alpha(p_.rule.step, beta(), lambda());
      m_.a[thread_] = static_cast<float>(p_.rule.step.erase_scale) * alpha;
      m_.b[thread_] = static_cast<float>(p_.rule.step.write_scale) * alpha;
    }
    __syncthreads();
  }

  __device__ std::int64_t slice_at(int slice) const { return slice_index(c_, slot_, i_h_, slice); }

  // Starts the copy of a slice's tiles: dO, D and U for scores; dO, D and S for reads; U and dS' for writes.
  template <PortablePhase kPhase>
  __device__ void load_slice(unsigned char* to, int slice) {
    // An opaque number makes the compiler compute addresses again for every slice, because registers are scarce with
    // sums over value heads in memory.
    const int thread = kGrouped && kTiles == 4 ? opaque(thread_) : thread_;
    constexpr int kState = kTiles * kTileBytes;
    const unsigned char* const u = c_.writes + slice_at(slice) * kTileBytes;
    if constexpr (kPhase == PortablePhase::write) {
      load_image<kThreads>(to, u, kTileBytes, thread);
      load_image<kThreads>(to + kTileBytes, c_.dstates + slice_at(slice) * kState, kState, thread);
    } else {
      load_rows<1, kThreads>(to, p_.dout, at_.i_b, at_.start, at_.rows, i_h_, 64 * slice, c_.dout_rows, thread);
      load_image<kThreads>(to + kTileBytes, c_.dresiduals + slice_at(slice) * kTileBytes, kTileBytes, thread);
      constexpr bool kScores = kPhase == PortablePhase::scores;
      load_image<kThreads>(to + 2 * kTileBytes, kScores ? u : c_.states + slice_at(slice) * kState,
                           kScores ? kTileBytes : kState, thread);
    }
  }

  // Returns the stage of a slice. The first slice of a phase uses the last stage, because M and outputs use stage 0
  // until the previous phase has ended.
  __device__ unsigned char* stage_of(int slice) { return m_.stage[(slice + 1) % kStages]; }

  // Starts the copy of a phase's first slice if there are two stages. Called once before for_slices of the phase, which
  // then starts the copies of the other slices only.
  template <PortablePhase kPhase>
  __device__ void prefetch() {
    if constexpr (kAhead > 0) {
      load_slice<kPhase>(stage_of(0), 0);
      copy_async_commit();
    }
  }

  // Calls f(tiles, slice) for all slices. Ends with a barrier.
  template <PortablePhase kPhase, class F>
  __device__ void for_slices(F&& f) {
#pragma unroll 1
    for (int slice = 0; slice < c_.slices; ++slice) {
      if (slice + kAhead < c_.slices) load_slice<kPhase>(stage_of(slice + kAhead), slice + kAhead);
      copy_async_commit();
      copy_async_wait<kAhead>();
      __syncthreads();
      f(stage_of(slice), slice);
      __syncthreads();
    }
  }

  // Computes W and H, dv, db (which replaces b), and in dg Σ_{i≥t>j} M_ij. Ends with a barrier.
  __device__ void scores() {
    float sum[32] = {}, db = 0;
    for_slices<PortablePhase::scores>([&](const unsigned char* tiles, int slice) {
      const unsigned char* const d = tiles + kTileBytes;
      multiply_below<4>(sum, shared_address(part_ == 0 ? tiles : d), shared_address(d + kTileBytes));
      db += value_gradients<kThreads>(c_, at_, i_h_, slice, d, m_.b, thread_);
    });
    prefetch<PortablePhase::read>();
    db = lane_sum<kRowThreads>(db);
    if (thread_ % kRowThreads == 0) m_.b[thread_ / kRowThreads] = db;
    const bool gated = p_.rule.decay == Decay::scalar;
    float products[32] = {};
    if (gated) multiply_below<4 * kTiles>(products, shared_address(part_ == 0 ? m_.q : m_.k), shared_address(m_.k));
    auto* matrix = reinterpret_cast<float*>(m_.stage[0]);
    const auto scale = part_ == 0 ? c_.forward.scale : 1.0F;
    unsigned char* const by_keys = part_ == 0 ? m_.w_keys : m_.h_keys;
    unsigned char* const by_rows = part_ == 0 ? m_.w_queries : m_.h_erase;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > row_ || part_ > 1) break;
      std::uint32_t for_keys[4], for_rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * row_ + lane_ / 4 + 8 * (i % 2), column = 16 * block + 8 * (i / 2) + 2 * (lane_ % 4);
        const float row_factor = part_ == 0 ? m_.query_factor[row] : -m_.a[row] * m_.key_factor[row];
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& element = sum[8 * block + 2 * i + e];
          const bool below = column + e < row || (part_ == 0 && column + e == row);
          element = below ? scale * exp2_fast(m_.prefix[row] - m_.prefix[column + e]) * element : 0.0F;
          x[e] = element * m_.key_factor[column + e];
          // From here on `products` has elements of M.
          products[8 * block + 2 * i + e] *= x[e] * row_factor;
        }
        for_keys[i] = pack<E>(x[0], x[1]);
        for_rows[i] = pack<E>(row_factor * sum[8 * block + 2 * i], row_factor * sum[8 * block + 2 * i + 1]);
      }
      write_block(by_keys, 16 * row_, 2 * block, for_keys, lane_);
      write_block(by_rows, 16 * row_, 2 * block, for_rows, lane_);
    }
    if (gated) {
      for (int turn = 0; turn < 2; ++turn) {
        if (part_ == turn) {
#pragma unroll
          for (int i = 0; i < 32; ++i) {
            const int row = 16 * row_ + lane_ / 4 + 8 * (i / 2 % 2),
                      column = 16 * (i / 8) + 8 * (i / 4 % 2) + 2 * (lane_ % 4) + i % 2;
            float& element = matrix[row * (kChunkTokens + 1) + column];
            if (i / 8 <= row_) element = products[i] + (turn == 0 ? 0.0F : element);
          }
        }
        __syncthreads();
      }
      spanning_sums(matrix);
    }
    __syncthreads();
  }

  // sum += a bᵀ for the warp's block row, up to the diagonal. Rows have kSteps · 16 elements. Only the warps of parts 0
  // and 1 compute.
  template <int kSteps>
  __device__ void multiply_below(float (&sum)[32], std::uint32_t a, std::uint32_t b) {
    if (part_ > 1) return;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t rows[4];
      load_matrices(rows, block_address(a, 16 * row_, 2 * step, lane_));
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        if (block > row_) break;
        std::uint32_t columns[4];
        load_matrices(columns, block_address(b, 16 * block, 2 * step, lane_));
        mma<E>(sum + 8 * block, rows, columns[0], columns[2]);
        mma<E>(sum + 8 * block + 4, rows, columns[1], columns[3]);
      }
    }
  }

  // Writes Σ_{i≥t>j} M_ij of every token t to dg.
  __device__ void spanning_sums(float* matrix) {
    if (thread_ < kChunkTokens) sum_before<kChunkTokens>(matrix, thread_);
    __syncthreads();
    if (thread_ >= at_.rows) return;
    p_.dg(at_.i_b, at_.start + thread_, i_h_, 0) = sum_from<kChunkTokens>(matrix, thread_);
  }

  // Computes what reads the state before the chunk: the gradient of q̂, X, and the sums r and k̂·X.
  __device__ void read_gradients(Sums& dq, Sums& x) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) dq[i] = x[i] = 0;
    for_slices<PortablePhase::read>([&](const unsigned char* tiles, int) {
      multiply_both<E, kBlocks>(dq, x, shared_address(tiles), shared_address(tiles + kTileBytes),
                                shared_address(tiles + 2 * kTileBytes), row_, lane_, piece_, 3);
    });
    prefetch<PortablePhase::write>();
    float read[2] = {}, erase[2] = {};
    const bool gated = p_.rule.decay == Decay::scalar;
    for_pairs(
        [&](int r, int row, int piece, float* pair) {
          const float decay = exp2_fast(m_.prefix[row]), factor = c_.forward.scale * decay;
          pair[0] *= factor;
          pair[1] *= factor;
          if (!gated) return;
          const float2 q = pair_of<E>(m_.q, row, piece, lane_);
          read[r] += m_.query_factor[row] * (q.x * pair[0] + q.y * pair[1]);
        },
        dq);
    for_pairs(
        [&](int r, int row, int piece, float* pair) {
          const float decay = exp2_fast(m_.prefix[row]);
          pair[0] *= decay;
          pair[1] *= decay;
          if (!gated) return;
          const float2 k = pair_of<E>(m_.k, row, piece, lane_);
          read[r] -= m_.a[row] * m_.key_factor[row] * (k.x * pair[0] + k.y * pair[1]);
        },
        x);
    multiply_both<E, kBlocks>(dq, x, shared_address(m_.w_keys), shared_address(m_.h_keys), shared_address(m_.k), row_,
                              lane_, piece_, row_);
    for_pairs(
        [&](int r, int row, int piece, float* pair) {
          const float2 k = pair_of<E>(m_.k, row, piece, lane_);
          erase[r] += m_.key_factor[row] * (k.x * pair[0] + k.y * pair[1]);
        },
        x);
    put_sums(kErase, erase);
    if (gated) put_sums(kRead, read);
  }

  // Computes the gradient of k̂ without the part that comes through the gains, and leaves it in y. Computes the terms w
  // and z of the gates' gradients.
  __device__ void write_gradients(const Sums& x, Sums& y) {
    const bool gated = p_.rule.decay == Decay::scalar;
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = 0;
    float z = 0;
    for_slices<PortablePhase::write>([&](const unsigned char* tiles, int slice) {
      const unsigned char* const ds = tiles + kTileBytes;
      multiply_one<E, false, kBlocks>(y, shared_address(tiles), shared_address(ds), row_, lane_, piece_);
      if (gated) z += state_product(ds, c_.states + slice_at(slice) * kTiles * kTileBytes);
    });
    float written[2] = {};
    for_pairs(
        [&](int r, int row, int piece, float* pair) {
          const float suffix = m_.suffix[row];
          pair[0] *= suffix;
          pair[1] *= suffix;
          if (!gated) return;
          const float2 k = pair_of<E>(m_.k, row, piece, lane_);
          written[r] += m_.key_factor[row] * (k.x * pair[0] + k.y * pair[1]);
        },
        y);
    if (gated) {
      put_sums(kWritten, written);
      z = warp_total(z);
      if (lane_ == 0) reinterpret_cast<float*>(m_.stage[0])[thread_ / 32] = z;
    }
    multiply_one<E, true, kBlocks>(y, shared_address(m_.w_queries), shared_address(m_.q), row_, lane_, piece_);
    multiply_one<E, true, kBlocks>(y, shared_address(m_.h_erase), shared_address(m_.k), row_, lane_, piece_);
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] -= m_.a[16 * row_ + lane_ / 4 + 8 * (i / 2 % 2)] * x[i];
    __syncthreads();
  }

  // Returns the thread's part of the sum of products of two states' elements. x is in shared memory, y in global
  // memory.
  __device__ float state_product(const unsigned char* x, const unsigned char* y) {
    float sum = 0;
#pragma unroll(kTiles == 4 ? 4 : 1)
    for (int i = 0; i < kTiles * kTileBytes / 16 / kThreads; ++i) {
      const int byte = 16 * (thread_ + i * kThreads);
      const uint4 a = *reinterpret_cast<const uint4*>(x + byte), b = *reinterpret_cast<const uint4*>(y + byte);
      const std::uint32_t of_a[4] = {a.x, a.y, a.z, a.w}, of_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum += low_of<E>(of_a[j]) * low_of<E>(of_b[j]) + high_of<E>(of_a[j]) * high_of<E>(of_b[j]);
      }
    }
    return sum;
  }

  // Returns the sum over the lanes of a warp.
  __device__ static float warp_total(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
    return x;
  }

  // Writes dbeta and dg, and adds what comes through λ to the gradient of k̂ in dk.
  __device__ void finish_tokens(Sums& dk) {
    if (p_.rule.decay == Decay::scalar && thread_ < at_.rows) {
      float& dg = p_.dg(at_.i_b, at_.start + thread_, i_h_, 0);
      float sum = dg, z = 0;
      for (int w = 0; w < kWarps; ++w) z += reinterpret_cast<const float*>(m_.stage[0])[w];
      z *= exp2f(m_.prefix[kChunkTokens - 1]);
      sum = m_.sums.add_gate_terms(sum, thread_, kRead, kWritten);
      dg = sum + z;
    }
    if (thread_ < kChunkTokens) {
      const float da = -m_.sums.total(kErase, thread_);
      const float dalpha = static_cast<float>(p_.rule.step.erase_scale) * da +
                           static_cast<float>(p_.rule.step.write_scale) * m_.b[thread_];
      const Gain<float> of_token = gain(p_.rule.step, beta(), lambda());
      if (thread_ < at_.rows) {
        p_.dbeta(at_.i_b, at_.start + thread_, i_h_) = from_state<E>(beta_gradient(of_token, dalpha));
      }
      m_.sums.of[kErase][0][thread_] = twice_lambda_gradient(of_token, dalpha);
      m_.sums.of[kErase][1][thread_] = of_token.lambda_unit * m_.key_factor[thread_];
    }
    __syncthreads();
    for_pairs(
        [&](int, int row, int piece, float* pair) {
          const float2 k = pair_of<E>(m_.k, row, piece, lane_);
          const float twice_dlambda = m_.sums.of[kErase][0][row], unit = m_.sums.of[kErase][1][row];
          pair[0] += twice_dlambda * (unit * k.x);
          pair[1] += twice_dlambda * (unit * k.y);
        },
        dk);
    __syncthreads();
  }

  const ChunkBackward<E>& c_;
  const DeltaBackward<E>& p_;
  PortableMemory<kTiles>& m_;
  const ChunkAt at_;
  const int slot_, i_q_;
  const int thread_, lane_, row_, part_, piece_;
  int i_h_ = 0;
};

}  // namespace efla::gpu
