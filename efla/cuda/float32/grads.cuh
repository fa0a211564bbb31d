// What the kernels of the gradients share: the products over the slices of value columns of a chunk and a value head. A
// thread block has a chunk and a query head, and loops over the value heads of the query head. A warp computes 16
// tokens and a part of the key channels of dO Sᵀ, D Sᵀ and U dS'ᵀ. Of the 32 × 32 matrices W and H (grads.cu) four
// warps compute W and four warps H, 16 × 16 elements each.
#pragma once

#include "efla/cuda/common/lane_sums.cuh"
#include "efla/cuda/float32/products.cuh"

namespace efla::gpu {

// Computes the products of a chunk and a value head. Shared is the type of the shared memory of a thread block, whose
// members state (S, then dS'), dout, d and u have a slice.
template <int KD, class Shared>
class SliceGrads {
 public:
  static constexpr int kWarps = Shared::kWarps, kThreads = Shared::kThreads, kParts = Shared::kParts;
  static constexpr int kTiles = KD / 8 / kParts;  // of a warp's channels
  using Rows = float[4 * kTiles];

 protected:
  __device__ SliceGrads(const Float32Backward& c, Shared& memory, const ChunkAt& at, int slot, int i_q, unsigned thread)
      : c_(c),
        p_(c.p),
        m_(memory),
        at_(at),
        slot_(slot),
        i_q_(i_q),
        thread_(thread),
        lane_(thread % 32),
        first_(thread / 32 % 2 * 16),
        part_(thread / 64),
        quadrant_(thread / 32),
        of_queries_(quadrant_ < 4),
        first_column_(thread / 64 % 2 * 16) {}

  __device__ static void clear(Rows& x) {
#pragma unroll
    for (float& element : x) element = 0;
  }

  __device__ void wait_for_loads() {
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
  }

  // Computes dO Sᵀ, D Sᵀ and U dS'ᵀ, and dO·U or D·U, writes dv and returns the thread's part of db. Calls f(S in
  // global memory) for every slice while dS' is in shared memory.
  template <class F>
  __device__ float multiply_slices(float (&scores)[8], Rows& dq, Rows& x, Rows& dk, F&& f) {
    float db = 0;
    clear(dq);
    clear(x);
    clear(dk);
    for (int slice = 0; slice < c_.slices; ++slice) {
      const std::int64_t index = (slot_ * p_.shape.value_heads + i_h_) * c_.slices + slice;
      load_tile<kFloat32Columns, kThreads>(m_.dout, p_.dout, at_.i_b, at_.start, at_.rows, i_h_,
                                           slice * kFloat32Columns, c_.dout_rows, thread_);
      load_image<kThreads>(m_.u, c_.writes + index * kFloat32Tokens * kFloat32Columns, sizeof(m_.u), thread_);
      load_image<kThreads>(m_.d, c_.dresiduals + index * kFloat32Tokens * kFloat32Columns, sizeof(m_.d), thread_);
      load_image<kThreads>(m_.state, c_.states + index * kFloat32Columns * KD, sizeof(m_.state), thread_);
      wait_for_loads();
      multiply_slice(scores, dq, x);
      db += value_gradients(slice);
      __syncthreads();
      load_image<kThreads>(m_.state, c_.dstates + index * kFloat32Columns * KD, sizeof(m_.state), thread_);
      wait_for_loads();
#pragma unroll 2
      for (int step = 0; step < kFloat32Columns / 8; ++step) {
        const int lane = opaque(lane_) & 31;  // addresses are computed here
        const auto u = row_operand<kFloat32Columns>(shared_address(m_.u), first_, 8 * step, lane);
        multiply_tile<KD>(dk, u, shared_address(m_.state), step, lane);
      }
      f(c_.states + index * kFloat32Columns * KD);
      __syncthreads();
    }
    return db;
  }

  // x += a b for the channels of the warp, with b rows [8 · step, 8 · step + 8) of a tile.
  template <int kColumns>
  __device__ void multiply_tile(Rows& x, const Operand& a, std::uint32_t tile, int step, int lane) {
    __syncwarp();  // as in add_to_state of the sweeps
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      multiply_columns<kColumns>(x + 4 * i, a, tile, 8 * step, 8 * (kTiles * part_ + i), lane);
    }
  }

  // Adds a slice's part of dO·U or D·U, dO Sᵀ and D Sᵀ.
  __device__ void multiply_slice(float (&scores)[8], Rows& dq, Rows& x) {
    if (first_column_ <= first_) {
#pragma unroll 1
      for (int step = 0; step < kFloat32Columns / 8; ++step) {
        const int lane = opaque(lane_) & 31;  // addresses are computed here
        const auto rows =
            row_operand<kFloat32Columns>(shared_address(of_queries_ ? m_.dout : m_.d), first_, 8 * step, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply_rows<kFloat32Columns>(scores + 4 * i, rows, shared_address(m_.u), first_column_ + 8 * i, 8 * step,
                                         lane);
        }
      }
    }
#pragma unroll 1
    for (int step = 0; step < kFloat32Columns / 8; ++step) {
      const int lane = opaque(lane_) & 31;  // addresses are computed here
      multiply_tile<KD>(dq, row_operand<kFloat32Columns>(shared_address(m_.dout), first_, 8 * step, lane),
                        shared_address(m_.state), step, lane);
      multiply_tile<KD>(x, row_operand<kFloat32Columns>(shared_address(m_.d), first_, 8 * step, lane),
                        shared_address(m_.state), step, lane);
    }
  }

  // Writes dv of a slice and returns the thread's part of db.
  __device__ float value_gradients(int slice) {
    constexpr int kRowThreads = kThreads / kFloat32Tokens;
    const int row = thread_ / kRowThreads;
    if (row >= at_.rows) return 0;
    float sum = 0;
    for (int column = thread_ % kRowThreads; column < kFloat32Columns; column += kRowThreads) {
      const std::int64_t j = static_cast<std::int64_t>(slice) * kFloat32Columns + column;
      if (j >= p_.shape.value_dim) break;
      const float d = m_.d[tile_index<kFloat32Columns>(row, column)];
      sum += to_float(p_.v(at_.i_b, at_.start + row, i_h_, j)) * d;
      p_.dv(at_.i_b, at_.start + row, i_h_, j) = m_.vectors.b[row] * d;
    }
    return sum;
  }

  // Calls f(i, row, column) for the lane's elements of W or H.
  template <class F>
  __device__ void for_scores(F&& f) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      f(i, first_ + lane_ / 4 + 8 * (i / 2 % 2), first_column_ + i / 4 * 8 + 2 * (lane_ % 4) + i % 2);
    }
  }

  const Float32Backward& c_;
  const DeltaBackward<float>& p_;
  Shared& m_;
  const ChunkAt& at_;
  const int slot_, i_q_;
  const int thread_, lane_, first_, part_;  // first_: the warp's first token; part_: its part of the channels
  const int quadrant_;                      // the warp's 16 × 16 elements: 0 to 3 of W, 4 to 7 of H
  const bool of_queries_;                   // whether they are of W
  const int first_column_;
  int i_h_ = 0;
};

}  // namespace efla::gpu
