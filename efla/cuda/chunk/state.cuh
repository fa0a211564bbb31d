// Matrices in the registers of a warp: the transposed state [V, K] and the 64 × 64 matrices of a chunk, as accumulators
// of mma or wgmma, 16 rows (value columns) per warp. Element 8·b + 4·h + 2·r + e of a thread is row lane/4 + 8·r,
// column 16·b + 8·h + 2·(lane % 4) + e.
#pragma once

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/accumulators.cuh"
#include "efla/cuda/common/saved_state.cuh"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {

// Rounds a 16 × 16 block, whose accumulators are x[0] to x[7], to an operand of mma or wgmma.
template <class E>
__device__ __forceinline__ void to_operand(std::uint32_t (&operand)[4], const float* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) operand[i] = pack<E>(x[2 * i], x[2 * i + 1]);
}

// Rounds the accumulators of 16 rows to operands.
template <class E, int kCount>
__device__ __forceinline__ void to_operands(std::uint32_t (&operand)[kCount][4], const float (&x)[8 * kCount]) {
#pragma unroll
  for (int step = 0; step < kCount; ++step) to_operand<E>(operand[step], x + 8 * step);
}

// Multiplies column j of operands of 16 rows and 64 columns by factors[j], which is in shared memory, and rounds again.
template <class E>
__device__ __forceinline__ void scale_operands(std::uint32_t (&operand)[4][4], const float* factors, int lane) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 factor = *reinterpret_cast<const float2*>(factors + 16 * step + 8 * half + 2 * (lane % 4));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        std::uint32_t& pair = operand[step][2 * half + r];
        pair = pack<E>(factor.x * low_of<E>(pair), factor.y * high_of<E>(pair));
      }
    }
  }
}

// Computes Rᵀ = (b∘v − read∘E)ᵀ as operands. v is a tile of tokens by value columns, and e are the accumulators of Eᵀ.
template <class E>
__device__ __forceinline__ void residual(std::uint32_t (&operand)[4][4], const float (&e)[32], std::uint32_t v,
                                         const ChunkRecord& record, int warp, int lane) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    // Matrices: tokens 0 to 7 of rows 0 to 7, tokens 0 to 7 of rows 8 to 15, then tokens 8 to 15.
    std::uint32_t values[4];
    load_matrices_transposed(values,
                             v + piece_offset(16 * block + lane % 8 + 8 * (lane / 16), 2 * warp + lane / 8 % 2));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = 16 * block + 8 * half + 2 * (lane % 4);
      const float2 b = *reinterpret_cast<const float2*>(record.b + column);
      const float2 read = *reinterpret_cast<const float2*>(record.read + column);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* from = e + 8 * block + 4 * half + 2 * r;
        const std::uint32_t pair = values[2 * half + r];
        operand[block][2 * half + r] =
            pack<E>(b.x * low_of<E>(pair) - read.x * from[0], b.y * high_of<E>(pair) - read.y * from[1]);
      }
    }
  }
}

// Writes the transposed of o, whose rows are value columns, to a tile of tokens by value columns.
template <class E>
__device__ __forceinline__ void write_outputs(const float (&o)[32], unsigned char* tile, int warp, int lane) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i % 2: rows 8 to 15; i / 2: tokens 8 to 15
      write_transposed(tile, 16 * block + 8 * (i / 2), 2 * warp + i % 2,
                       pack<E>(o[8 * block + 2 * i], o[8 * block + 2 * i + 1]), lane);
    }
  }
}

// Calls f(element of s, address in `state`) for a warp's 16 rows, of which value column `column` is the first. Elements
// that the state does not have are left out.
template <int kTiles, class T, class F>
__device__ __forceinline__ void for_each_element(float (&s)[32 * kTiles], const View<T, 4>& state, std::int64_t n,
                                                 std::int64_t i_h, std::int64_t column, int lane, F&& f) {
  const std::int64_t at = column + lane / 4, stride = state.stride[2];
  const int first = 2 * (lane % 4), keys = at < state.extent[3] ? static_cast<int>(state.extent[2]) - first : 0,
            keys_below = at + 8 < state.extent[3] ? keys : 0;
  T* from = state.at(n, i_h, first, at);
  T* below = from + 8 * state.stride[3];
#pragma unroll
  for (int i = 0; i < 8 * kTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * i + e < keys) f(s[4 * i + e], from + e * stride);
      if (8 * i + e < keys_below) f(s[4 * i + 2 + e], below + e * stride);
    }
    from += 8 * stride;
    below += 8 * stride;
  }
}

// Returns a view of the states without the keys before `first`.
template <class T>
__device__ __forceinline__ View<T, 4> keys_from(View<T, 4> states, int first) {
  if (states) states.data += first * states.stride[2];
  states.extent[2] -= first;
  return states;
}

// Reads a warp's 16 rows of a state; zeros if the view has no data.
template <int kTiles>
__device__ __forceinline__ void read_state(float (&s)[32 * kTiles], const View<const float, 4>& state, std::int64_t n,
                                           std::int64_t i_h, std::int64_t column, int lane) {
#pragma unroll
  for (float& x : s) x = 0;
  if (!state) return;
  for_each_element<kTiles>(s, state, n, i_h, column, lane, [](float& x, const float* from) { x = *from; });
}

template <int kCount>
__device__ __forceinline__ void set_zero(float (&s)[kCount]) {
#pragma unroll
  for (float& x : s) x = 0;
}

// Makes s the warp's rows of the identity.
template <int kTiles>
__device__ __forceinline__ void set_identity(float (&s)[32 * kTiles], std::int64_t column, int lane) {
  const int at = static_cast<int>(column) + lane / 4 - 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 32 * kTiles; ++i) s[i] = at == i / 4 * 8 + i % 2 - 8 * (i / 2 % 2) ? 1.0F : 0.0F;
}

// Writes a warp's 16 rows of a state, if the view has data.
template <int kTiles>
__device__ __forceinline__ void write_state(float (&s)[32 * kTiles], const View<float, 4>& state, std::int64_t n,
                                            std::int64_t i_h, std::int64_t column, int lane) {
  if (!state) return;
  for_each_element<kTiles>(s, state, n, i_h, column, lane, [](float x, float* to) { *to = x; });
}

// Writes the state before chunk `chunk` of a sequence, if the forward saves this state. `first` is the index of the
// sequence's first saved state, and `first_key` the key of the first column of s.
template <int kTiles, class E>
__device__ __forceinline__ void save_state(float (&s)[32 * kTiles], const DeltaForward<E>& p, std::int64_t i_b,
                                           std::int64_t i_h, int first, int chunk, std::int64_t column, int lane,
                                           int first_key = 0) {
  const View<float, 5>& saved = p.chunk_states;
  if (!saved) return;
  const int every = static_cast<int>(p.saved.interval / kChunkTokens);
  if (chunk % every != 0) return;
  const View<float, 4> state = saved_state(saved, i_b, first + chunk / every);
  write_state<kTiles>(s, keys_from(state, first_key), 0, i_h, column, lane);
}

}  // namespace efla::gpu
