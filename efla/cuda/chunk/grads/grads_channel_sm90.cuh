// The gradients where every key channel has a gate or the rule has two keys, as a thread block computes them for a
// chunk and a value head. grads_channel_sm90.cu has the equations.
#pragma once

#include <cstdint>

#include "efla/cuda/chunk/chunk_bwd.h"
#include "efla/cuda/chunk/grads/grads.cuh"
#include "efla/cuda/chunk/grads/grads_channel_memory.cuh"
#include "efla/cuda/chunk/prepare/channels.cuh"
#include "efla/cuda/chunk/products.cuh"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/common/tile.cuh"
#include "efla/cuda/common/wgmma.cuh"

namespace efla::gpu {

// Computes a chunk and a value head. Products use the layout of mma: warp block + 4 · quarter has the 16 rows of a
// block and the 32 channels of a quarter. Work per channel uses another layout: a lane has one channel of the warp's
// quarter and all 16 tokens of the block.
template <class E, int kTiles, bool kTwoKeys>
class ChannelGrads {
 public:
  using Shared = ChannelShared<E, kTiles, kTwoKeys>;
  static constexpr int kThreads = Shared::kThreads, kQuarters = Shared::kQuarters, kStages = Shared::kStages;
  static constexpr int kCount = 16;  // accumulators of 16 tokens and 32 channels
  static constexpr int kHalf = kBlock / 2;
  static constexpr int kMatrixBlocks = kBlocks / kTiles;  // blocks per warp of a block row of W or H: every kTiles-th
  using Sums = float[kCount];

  // `thread` is opaque, so that the compiler keeps nothing in registers from one value head to the next.
  __device__ ChannelGrads(const ChunkBackward<E>& c, Shared& memory, const ChunkAt& at, int slot, int i_q, int i_h,
                          int thread)
      : c_(c),
        p_(c.p),
        m_(memory),
        at_(at),
        slot_(slot),
        i_q_(i_q),
        i_h_(i_h),
        thread_(thread),
        lane_(thread % 32),
        warp_(warp_of(thread)),
        block_(warp_ % kBlocks),
        quarter_(warp_ / kBlocks),
        channel_(32 * quarter_ + lane_),
        tokens_(channel_ < static_cast<int>(c.p.shape.key_dim) ? at.rows - kBlock * block_ : 0) {}

  // Writes dv, dbeta and dg of the value head, and dq and dk after the last value head of the query head.
  __device__ void run() {
    load_tile(p_.k, &ChannelTile::k, c_.forward.k_rows);
    load_tile(p_.q, &ChannelTile::q, c_.forward.q_rows);
    copy_async_commit();
#pragma unroll 1
    for (int slice = 0; slice < kStages; ++slice) load_slice(slice);
    decay_rows();
    Sums of_query, of_erase, of_key;
    multiply_slices(of_query, of_erase, of_key);
    multiply_blocks(of_query, of_erase, of_key);
    add_pairs(of_query, of_erase, of_key);
  }

 private:
  // Returns whether token i of the block and the lane's channel exist.
  __device__ bool exists(int i) const { return i < tokens_; }
  // Rounds in one instruction; from_state needs more.
  __device__ static E rounded(float x) { return E(static_cast<std::uint16_t>(pack<E>(x, 0))); }
  // Returns the address of the next token's element. It is opaque, because many addresses need many registers.
  template <class T>
  __device__ static T* next(T* element, std::int64_t stride) {
    return opaque(element + stride);
  }
  template <class T>
  __device__ auto* at(const View<T, 4>& view, std::int64_t i_h) const {
    return view.at(at_.i_b, at_.start + kBlock * block_, i_h, channel_);
  }
  __device__ ChannelTile& tile() const { return m_.tiles[quarter_ / 2]; }
  // Returns the byte offset of the lane's channel in row 0 of a tile. It is opaque, so that offsets of other rows are
  // not kept in registers.
  __device__ int element() const { return opaque(piece_offset(0, channel_ % 64 / 8) + channel_ % 8 * 2); }
  // Returns the byte offset of the channel in row i, from its offset in row 0.
  __device__ static int offset_of(int i, int element) { return i * 128 + (element ^ (i % 8 * 16)); }
  // Return the lane's channel of one token or of all tokens of the block, from a tile.
  __device__ float read(const unsigned char* tile, int i, int element) const {
    return to_float(*reinterpret_cast<const E*>(tile + kBlock * 128 * block_ + offset_of(i, element)));
  }
  __device__ void read(const unsigned char* tile, float (&x)[kBlock], int element) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = read(tile, i, element);
  }
  // Returns the address of the lane's channel of the erase key of the block's first token. It is opaque, so that it is
  // not kept in registers between uses. There is no tile of erase keys, because shared memory is full.
  __device__ const E* erase_keys() const { return at(p_.erase_key, opaque(i_q_)); }
  // Returns the lane's channel of the erase key of token i of the block, times the row's power of two (unit_of) if
  // kUnit is set.
  template <bool kUnit = kUnitRows<E>>
  __device__ float erase_key(const E* keys, int i) const {
    if (!exists(i)) return 0;
    const float x = to_float(keys[i * p_.erase_key.stride[1]]);
    if constexpr (kUnit) return to_float(rounded(x * m_.erase_unit[kBlock * block_ + i]));
    return x;
  }
  // Returns whether every channel has a gate of its own.
  __device__ bool has_channel_gates() const { return p_.rule.decay == Decay::channel; }
  // Returns the factors n_k of the rows that erase.
  __device__ const float* erase_factors() const {
    if constexpr (kTwoKeys) {
      return m_.erase_factor;
    } else {
      return m_.key_factor;
    }
  }
  // Computes the decays of the block's tokens from the gates, and keeps them in shared memory too.
  __device__ void read_gates(float (&x)[kBlock]) const {
    const float* from = at(p_.g, i_h_);
    if constexpr (kTwoKeys) {
      if (!has_channel_gates()) from = p_.g.at(at_.i_b, at_.start + kBlock * block_, i_h_, 0);
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i, from = next(from, p_.g.stride[1])) {
      x[i] = exists(i) && (!kTwoKeys || p_.g) ? *from : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      x[i] = exp2_fast(limited_gate(x[i]));
      m_.decays[kBlock * block_ + i][channel_] = x[i];
    }
  }
  // Adds x to the gradient of q (which = 0), k (1) or κ (2). The last value head of the query head writes the gradient;
  // the other value heads keep the sum in the workspace.
  __device__ void store(int which, const View<E, 4>& view, float (&x)[kBlock]) const {
    const int group = static_cast<int>(p_.shape.group()), of_group = i_h_ - i_q_ * group;
    constexpr int kElements = kChunkTokens * 64 * kTiles;
    float* sum = c_.key_sums + ((slot_ * p_.shape.heads + i_q_) * (kTwoKeys ? 3 : 2) + which) * kElements +
                 kBlock * 64 * kTiles * opaque(block_) + channel_;
    if (of_group > 0) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) x[i] += sum[64 * kTiles * i];
    }
    if (of_group < group - 1) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) sum[64 * kTiles * i] = x[i];
      return;
    }
    E* to = at(view, i_q_);
#pragma unroll
    for (int i = 0; i < kBlock; ++i, to = next(to, view.stride[1])) {
      if (!exists(i)) return;
      if constexpr (kUnitRows<E>) {
        if (kTwoKeys && which == 2) {
          x[i] *= m_.erase_unit[kBlock * block_ + i];
        } else {
          x[i] *= (which == 0 ? m_.query_unit : m_.key_unit)[kBlock * block_ + i];
        }
      }
      *to = rounded(x[i]);
    }
  }
  // Writes the sums over the warp's channels of x, for the tokens of half a block.
  __device__ void put_sums(ChannelSum kind, int half, float (&x)[kHalf]) {
    sum_over_lanes(x, lane_);
    if (lane_ < kHalf) m_.sums.of[kind][quarter_][kBlock * block_ + kHalf * half + lane_] = x[0];
  }

  // Starts the copy of keys or queries to their tiles; does not commit it.
  __device__ void load_tile(const View<const E, 4>& view, unsigned char (ChannelTile::*to)[kTileBytes],
                            bool aligned) const {
    const int tile = thread_ / 256;
    load_rows<1, 256>(m_.tiles[tile].*to, view, at_.i_b, at_.start, at_.rows, i_q_, 64 * tile, aligned, thread_ % 256);
  }
  // Starts and commits the copy of a slice, if the slice exists.
  __device__ void load_slice(int slice) {
    if (slice >= c_.slices) return copy_async_commit();
    ChannelSlice<kTiles>& to = m_.slices[slice % kStages];
    load_rows<1, kThreads>(to.dout, p_.dout, at_.i_b, at_.start, at_.rows, i_h_, 64 * slice, c_.dout_rows, thread_);
    copy_async_commit();
    if (thread_ > 0) return;
    const std::int64_t image = slice_index(c_, slot_, i_h_, slice);
    std::uint64_t* const full = &m_.full[slice % kStages];
    barrier_expect(full, (2 + 2 * kTiles) * kTileBytes);
    load_bulk(to.u, c_.writes + image * kTileBytes, kTileBytes, full);
    load_bulk(to.d, c_.dresiduals + image * kTileBytes, kTileBytes, full);
    load_bulk(to.before, c_.states + image * kTiles * kTileBytes, kTiles * kTileBytes, full);
    load_bulk(to.after, c_.dstates + image * kTiles * kTileBytes, kTiles * kTileBytes, full);
  }

  // Returns the parity of the phase of a slice's barrier. Every earlier value head has used the barrier once for each
  // slice of the same stage.
  __device__ unsigned parity(int slice) const {
    const int head = i_h_ - i_q_ * static_cast<int>(p_.shape.group()),
              uses = (c_.slices + kStages - 1 - slice % kStages) / kStages;
    return static_cast<unsigned>(head * uses + slice / kStages) % 2;
  }

  // Writes the lane's channel of a block to decayed rows, from row `first` on.
  __device__ static void write_rows(unsigned char* rows, int first, const float (&x)[kBlock], int element) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      *reinterpret_cast<E*>(rows + first * 128 + offset_of(i, element)) = rounded(x[i]);
    }
  }
  // Writes the parts of Σk² and Σq² of the block's tokens over 64 channels.
  __device__ void put_squares() {
    const bool is_key = quarter_ % 2 == 0;
    const float squares = query_squares<E, 1>(shared_address(is_key ? tile().k : tile().q), block_, opaque(lane_));
    if (lane_ < kBlock) {
      m_.sums.of[is_key ? kKeySquares : kQuerySquares][quarter_ / 2][kBlock * block_ + lane_] = squares;
    }
  }

  // Writes the parts of κ·k and, where rows have powers of two, of Σκ² of the block's tokens over the warp's channels,
  // before make_units.
  __device__ void put_erase_products() {
    const E* const keys = erase_keys();
    const auto put = [&](ChannelSum kind, auto&& product) {
      float x[kBlock];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) x[i] = product(i, erase_key<false>(keys, i));
      sum_over_lanes(x, lane_);
      if (lane_ < kBlock) m_.sums.of[kind][quarter_][kBlock * block_ + lane_] = x[0];
    };
    const int element = this->element();
    put(kEraseKey, [&](int i, float x) { return x * read(tile().k, i, element); });
    if constexpr (kUnitRows<E>) {
      put(kEraseSquares, [](int, float x) { return x * x; });
    }
  }

  // Multiplies the warp's keys and queries by powers of two, one per row (unit_of). From here on k and q are
  // the multiplied rows, and n_k and n_q their factors; `store` multiplies the gradients by the same powers.
  __device__ void make_units() {
    const ChannelSum kind = lane_ < kBlock ? kKeySquares : kQuerySquares;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) squares += m_.sums.of[kind][i][kBlock * block_ + lane_ % kBlock];
    const float unit = unit_of(squares, p_.rule.qk_l2norm);
    const int element = this->element();
    const auto multiply = [&](unsigned char* rows, int i, float factor) {
      E& x = *reinterpret_cast<E*>(rows + kBlock * 128 * block_ + offset_of(i, element));
      x = rounded(factor * to_float(x));
    };
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      multiply(tile().k, i, __shfl_sync(0xffffffffU, unit, i));
      multiply(tile().q, i, __shfl_sync(0xffffffffU, unit, kBlock + i));
    }
  }

  // Writes decayed rows, the decays over blocks, and the factors and gains of tokens. Ends with a barrier, except for
  // the rows −a∘k.
  __device__ void decay_rows();

  // Returns whether the gain of a token is β. The other integrators need much more code.
  __device__ bool is_euler() const { return p_.rule.step.integrator == Integrator::euler; }
  // Returns Σk² or Σq² of token `thread_`.
  __device__ float squares_of(ChannelSum kind) const {
    float sum = 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) sum += m_.sums.of[kind][tile][thread_];
    return sum;
  }
  // Returns β of token `thread_`.
  __device__ float beta() const {
    return thread_ < at_.rows ? to_float(p_.beta(at_.i_b, at_.start + thread_, i_h_)) : 0.0F;
  }

  // Computes the products of all slices: dO Sᵀ, D Sᵀ and U dS'ᵀ, with the factors of tokens (of_query, of_erase,
  // of_key); W and H; dv; db, which replaces b; and Crossing::states. Ends with a barrier.
  __device__ void multiply_slices(Sums& of_query, Sums& of_erase, Sums& of_key) {
    float matrix[8 * kMatrixBlocks] = {}, states[8] = {}, db = 0;
    const bool is_w = quarter_ % 2 == 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) of_query[i] = of_erase[i] = of_key[i] = 0;
#pragma unroll 1
    for (int slice = 0; slice < c_.slices; ++slice) {
      if (slice + 1 < c_.slices) {
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      barrier_wait(&m_.full[slice % kStages], parity(slice));
      __syncthreads();
      const ChannelSlice<kTiles>& from = m_.slices[slice % kStages];
      multiply_slice(from, matrix, of_query, of_erase, of_key);
      add_state_products(from, states);
      db += value_gradients<kThreads>(c_, at_, i_h_, slice, from.d, m_.b, thread_);
      __syncthreads();
      if (slice + kStages < c_.slices) load_slice(slice + kStages);
    }
    db = lane_sum<kThreads / kChunkTokens>(db);
    if (thread_ % (kThreads / kChunkTokens) == 0) m_.b[thread_ / (kThreads / kChunkTokens)] = db;
    put_state_products(states);
    const float2 query = of_rows(m_.query_factor), key = of_rows(m_.key_factor),
                 erase = kTwoKeys ? of_rows(erase_factors()) : key;
    scale_rows(of_query, {c_.forward.scale * query.x, c_.forward.scale * query.y});
    scale_rows(of_erase, erase);
    scale_rows(of_key, key);
    unsigned char* to = is_w ? m_.w() : m_.h();
    const float2 factor = is_w ? float2{c_.forward.scale * query.x, c_.forward.scale * query.y} : erase;
#pragma unroll
    for (int b = 0; b < kMatrixBlocks; ++b) {
      const int block = quarter_ / 2 + kTiles * b;
      if (block > block_) break;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = kBlock * block_ + lane_ / 4 + 8 * (i / 2 % 2),
                  column = kBlock * block + 8 * (i / 4) + 2 * (lane_ % 4) + i % 2;
        const bool below = is_w ? column <= row : column < row;
        float& x = matrix[8 * b + i];
        x = below ? x * ((i / 2 % 2 == 0 ? factor.x : factor.y) * m_.key_factor[column]) : 0.0F;
      }
      if (block == block_) {
        put_diagonal(matrix + 8 * b, is_w);
        break;
      }
      std::uint32_t packed[4];
      to_operand<E>(packed, matrix + 8 * b);
      write_block(to, kBlock * block_, 2 * block, packed, lane_);
    }
    __syncthreads();
    if (thread_ < 64 * kTiles) {
      float sum = 0;
      for (int warp = 0; warp < kThreads / 32; ++warp) sum += m_.state_sums(warp)[thread_];
      m_.crossing().states[thread_] = sum;
    }
  }

  // Writes the accumulators of a diagonal block of W or H.
  __device__ void put_diagonal(const float* x, bool is_w) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float2& to = m_.diagonal(block_).of[lane_ / 4 + 8 * (i / 2 % 2)][8 * (i / 4) + 2 * (lane_ % 4) + i % 2];
      (is_w ? to.x : to.y) = x[i];
    }
  }

  // Adds the products of a slice: dO Uᵀ or D Uᵀ for the warp's block row and every kTiles-th block column, and dO Sᵀ, D
  // Sᵀ and U dS'ᵀ for the warp's channels. Tiles are swizzled, so the address of a step is the address of the first
  // step XOR a constant.
  __device__ void multiply_slice(const ChannelSlice<kTiles>& from, float (&matrix)[8 * kMatrixBlocks], Sums& of_query,
                                 Sums& of_erase, Sums& of_key) const {
    constexpr int kBlockBytes = kBlock * 128;
    const std::uint32_t dout = shared_address(from.dout), u = shared_address(from.u), d = shared_address(from.d),
                        before = shared_address(from.before), after = shared_address(from.after),
                        left = (quarter_ % 2 == 0 ? dout : d) + kBlockBytes * block_;
    const int lane = opaque(lane_), row = piece_offset(lane % 16, lane / 16),
              column = piece_offset(lane % 16, 4 * quarter_ + lane / 16);
#pragma unroll 2
    for (int step = 0; step < 4; ++step) {
      const int at = row ^ (32 * step);
      std::uint32_t a[4], of_dout[4], of_d[4], of_u[4];
      load_matrices(a, left + at);
#pragma unroll
      for (int i = 0; i < kMatrixBlocks; ++i) {
        std::uint32_t b[4];
        load_matrices(b, u + kBlockBytes * (quarter_ / 2 + kTiles * i) + at);
        mma<E>(matrix + 8 * i, a, b[0], b[2]);
        mma<E>(matrix + 8 * i + 4, a, b[1], b[3]);
      }
      load_matrices(of_dout, dout + kBlockBytes * block_ + at);
      load_matrices(of_d, d + kBlockBytes * block_ + at);
      load_matrices(of_u, u + kBlockBytes * block_ + at);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int in_states = kBlockBytes * step + (column ^ (32 * i));
        std::uint32_t b[4];
        load_matrices_transposed(b, before + in_states);
        mma<E>(of_query + 8 * i, of_dout, b[0], b[1]);
        mma<E>(of_query + 8 * i + 4, of_dout, b[2], b[3]);
        mma<E>(of_erase + 8 * i, of_d, b[0], b[1]);
        mma<E>(of_erase + 8 * i + 4, of_d, b[2], b[3]);
        load_matrices_transposed(b, after + in_states);
        mma<E>(of_key + 8 * i, of_u, b[0], b[1]);
        mma<E>(of_key + 8 * i + 4, of_u, b[2], b[3]);
      }
    }
  }

  // Adds S·dS' of a slice, for eight channels and every kThreads / (8 kTiles)-th value column.
  __device__ void add_state_products(const ChannelSlice<kTiles>& from, float (&sum)[8]) const {
    const int piece = thread_ % (8 * kTiles);
#pragma unroll 1
    for (int row = thread_ / (8 * kTiles); row < 64; row += kThreads / (8 * kTiles)) {
      const int at = piece_offset(row, piece);
      const uint4 x = *reinterpret_cast<const uint4*>(from.before + at),
                  y = *reinterpret_cast<const uint4*>(from.after + at);
      const std::uint32_t of_x[4] = {x.x, x.y, x.z, x.w}, of_y[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[2 * j] += low_of<E>(of_x[j]) * low_of<E>(of_y[j]);
        sum[2 * j + 1] += high_of<E>(of_x[j]) * high_of<E>(of_y[j]);
      }
    }
  }
  // Adds S·dS' over the lanes with the same channels, and writes the warp's sums.
  __device__ void put_state_products(float (&sum)[8]) {
    const int piece = lane_ % (8 * kTiles);
#pragma unroll
    for (float& x : sum) {
#pragma unroll
      for (int offset = 8 * kTiles; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
    }
    if (lane_ >= 8 * kTiles) return;
    float* to = m_.state_sums(warp_) + 8 * piece;
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] = sum[j];
  }

  // Returns the elements of a vector of tokens for the two rows of this lane's accumulators.
  __device__ float2 of_rows(const float* vector) const {
    const int row = kBlock * block_ + lane_ / 4;
    return {vector[row], vector[row + 8]};
  }
  // Multiplies the channels of x by the decays over a block.
  __device__ void scale_channels(Sums& x, int block) const { scale_columns(x, m_.decay[block] + 32 * quarter_, lane_); }
  // Returns the pair of channels of a decayed row at accumulators `i` and i + 1. `first` is the block's first row.
  __device__ float2 pair_of(const unsigned char* rows, int first, int i) const {
    const int row = first + lane_ / 4 + 8 * (i / 2 % 2);
    const auto pair =
        *reinterpret_cast<const std::uint32_t*>(rows + piece_offset(row, 4 * (quarter_ % 2) + i / 4) + lane_ % 4 * 4);
    return {low_of<E>(pair), high_of<E>(pair)};
  }
  // Writes, per channel, the sum of product(i) over the 16 tokens of the block.
  template <class F>
  __device__ void put_products(F&& product, float* to) const {
    float sums[8] = {};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 x = product(i);
      sums[i / 4 * 2] += x.x;
      sums[i / 4 * 2 + 1] += x.y;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sums[i] += __shfl_xor_sync(0xffffffffU, sums[i], offset);
    }
    if (lane_ >= 4) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<float2*>(to + 32 * quarter_ + 8 * i + 2 * lane_) = float2{sums[2 * i], sums[2 * i + 1]};
    }
  }
  // x += a b, with a one 16 × 16 block of W or H or the transposed of one, and b the decayed rows of a block.
  template <bool kTransposed>
  __device__ void add_block(Sums& x, const unsigned char* matrix, int row, int column, const unsigned char* rows,
                            int first) const {
    std::uint32_t a[4];
    if constexpr (kTransposed) {
      load_matrices_transposed(a, shared_address(matrix) + piece_offset(kBlock * row + lane_ % 8 + 8 * (lane_ / 16),
                                                                        2 * column + lane_ / 8 % 2));
    } else {
      load_matrices(a, block_address(shared_address(matrix), kBlock * row, 2 * column, lane_));
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      std::uint32_t of_b[4];
      load_matrices_transposed(of_b, block_address(shared_address(rows), first, 4 * (quarter_ % 2) + 2 * b, lane_));
      mma<E>(x + 8 * b, a, of_b[0], of_b[1]);
      mma<E>(x + 8 * b + 4, a, of_b[2], of_b[3]);
    }
  }

  // Adds what other blocks give to the sums of this block, and writes the rest of Crossing. Ends with a barrier.
  __device__ void multiply_blocks(Sums& of_query, Sums& of_erase, Sums& of_key) {
    const int first = kBlock * (block_ - 1);
#pragma unroll 1
    for (int other = 0; other < block_; ++other) {
      put_products(
          [&](int i) {
            const float2 q = pair_of(tile().queries, first, i), e = pair_of(tile().erase, first, i);
            return float2{q.x * of_query[i] + e.x * of_erase[i], q.y * of_query[i + 1] + e.y * of_erase[i + 1]};
          },
          m_.crossing().read[pair_index(block_, other)]);
      scale_channels(of_query, other);
      scale_channels(of_erase, other);
      add_block<false>(of_query, m_.w(), block_, other, tile().keys, kBlock * other);
      add_block<false>(of_erase, m_.h(), block_, other, tile().keys, kBlock * other);
    }
    if (block_ < kBlocks - 1) {
      put_products(
          [&](int i) {
            const float2 k = pair_of(tile().keys, kBlock * block_, i);
            return float2{k.x * of_key[i], k.y * of_key[i + 1]};
          },
          m_.crossing().written[block_]);
    }
#pragma unroll 1
    for (int other = kBlocks - 1; other > block_; --other) {
      scale_channels(of_key, other);
      add_block<true>(of_key, m_.w(), other, block_, tile().queries, kBlock * (other - 1));
      add_block<true>(of_key, m_.h(), other, block_, tile().erase, kBlock * (other - 1));
    }
    __syncthreads();
  }

  // Returns the index in the scratch of a token and channel. Neighbouring tokens have other banks.
  __device__ static int place(int token, int channel) { return 32 * token + (channel ^ (token % 4 * 8)); }
  // Adds `factors` times rows (keys or queries) to a gradient in the scratch, and stores the sum.
  __device__ void finish(int which, const View<E, 4>& view, const float* scratch, const unsigned char* rows,
                         const float* factors) const {
    float x[kBlock];
    read(rows, x, element());
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = scratch[place(i, lane_)] + factors[kBlock * block_ + i] * x[i];
    store(which, view, x);
  }
  // Adds `factors` times the keys and `others` times the erase keys to dk in the scratch, `others` times the keys to dκ
  // there, and stores the sums.
  __device__ void finish_keys(const float* factors, const float* others) const {
    const E* const keys = erase_keys();
    float k[kBlock], x[kBlock];
    read(tile().k, k, element());
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int token = kBlock * block_ + i;
      x[i] = m_.keys(warp_)[place(i, lane_)] + factors[token] * k[i] + others[token] * erase_key(keys, i);
    }
    store(1, p_.dk, x);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      x[i] = m_.erase(warp_)[place(i, lane_)] + others[kBlock * block_ + i] * k[i];
    }
    store(2, p_.derase_key, x);
  }
  __device__ void write_scratch(const Sums& x, float* scratch) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      *reinterpret_cast<float2*>(scratch + place(lane_ / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (lane_ % 4))) =
          float2{x[i], x[i + 1]};
    }
  }

  // Returns the sum of the terms that span the whole block, for the lane's channel.
  __device__ float crossing() const {
    const int channel = opaque(channel_);  // no addresses kept
    float sum = 0, decay = m_.decay[block_][channel];
    for (int other = block_ + 1; other < kBlocks; ++other) {
      sum += decay * m_.crossing().read[pair_index(other, block_)][channel];
      decay *= m_.decay[other][channel];
    }
    // From here on `decay` is from the block's start to the chunk's end.
    for (int other = block_ - 1; other >= 0; --other) {
      sum += decay * m_.crossing().written[other][channel];
      decay *= m_.decay[other][channel];
    }
    return sum + decay * m_.crossing().states[channel];
  }

  // Adds the pairs of tokens of the block, finishes the tokens and writes the gradients.
  __device__ void add_pairs(const Sums& of_query, const Sums& of_erase, const Sums& of_key);
  // Adds the pairs of tokens with one token in each half of the block to the gradients in the scratch, which are then
  // decayed to the start or the end of a half. Returns the sums of the terms that span all of the first (x) and of the
  // second half (y).
  __device__ float2 join_halves();
  // Adds the pairs of tokens within a half of the block. Writes the gradients of gates, of which the terms `spanning`
  // span the half, and sums over channels. Leaves dq̂ and dk̂ in the scratch.
  __device__ void pairs(int half, float spanning);
  // Writes dbeta, and computes the factors of k and q in their gradients: what comes through λ and through the L2 norm.
  // Ends with a barrier.
  __device__ void finish_tokens();
  // Writes what both keys give to each other's gradients, and the gradient of a gate per head. Returns the factor of k
  // in dk.
  __device__ float of_two_keys(const Gain<float>& gain, float dalpha, float n_k);

  const ChunkBackward<E>& c_;
  const DeltaBackward<E>& p_;
  Shared& m_;
  const ChunkAt& at_;
  const int slot_, i_q_, i_h_;
  const int thread_, lane_, warp_, block_, quarter_, channel_;
  const int tokens_;  // that exist from the block's start on; 0 if the lane's channel does not exist
};

}  // namespace efla::gpu
