// Products by mma.sync of matrices in the registers of a warp (state.cuh) and tiles in shared memory (tile.cuh).
// Operands a are [step][4]: 16 rows, and 16 of the common dimension per step. Matrices b are shared addresses.
#pragma once

#include "efla/cuda/chunk/state.cuh"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {

// d [16 rows, 16 · kBlocks columns] += a bᵀ, with b [16 · kBlocks rows, …] from its column 16 · `first` on.
template <class E, int kSteps, int kBlocks = 4>
__device__ __forceinline__ void multiply_rows(float (&d)[8 * kBlocks], const std::uint32_t (&a)[kSteps][4],
                                              std::uint32_t b, int lane, int first = 0) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      std::uint32_t columns[4];
      load_matrices(columns, block_address(b, 16 * block, 2 * (first + step), lane));
      mma<E>(d + 8 * block, a[step], columns[0], columns[2]);
      mma<E>(d + 8 * block + 4, a[step], columns[1], columns[3]);
    }
  }
}

// d [16 rows, 64 columns] += s bᵀ, with s the warp's 16 rows of the transposed state, which are rounded to operands
// here.
template <class E, int kTiles>
__device__ __forceinline__ void multiply_state(float (&d)[32], const float (&s)[32 * kTiles], std::uint32_t b,
                                               int lane) {
#pragma unroll
  for (int step = 0; step < 4 * kTiles; ++step) {
    std::uint32_t state[1][4];
    to_operand<E>(state[0], s + 8 * step);
    multiply_rows<E>(d, state, b, lane, step);
  }
}

// d [16 rows, 16 · kBlocks columns] += a b, with b [64 rows, …] from its column 8 · `piece` on.
template <class E, int kBlocks>
__device__ __forceinline__ void multiply_columns(float (&d)[8 * kBlocks], const std::uint32_t (&a)[4][4],
                                                 std::uint32_t b, int lane, int piece = 0) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      std::uint32_t rows[4];
      load_matrices_transposed(rows, block_address(b, 16 * step, piece + 2 * block, lane));
      mma<E>(d + 8 * block, a[step], rows[0], rows[1]);
      mma<E>(d + 8 * block + 4, a[step], rows[2], rows[3]);
    }
  }
}

// Reads 16 rows of a transposed tile as operands: columns [16 · column, 16 · column + 16) of the tile.
__device__ __forceinline__ void column_operands(std::uint32_t (&operand)[4][4], std::uint32_t tile, int column,
                                                int lane) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_matrices_transposed(operand[step],
                             tile + piece_offset(16 * step + lane % 8 + 8 * (lane / 16), 2 * column + lane / 8 % 2));
  }
}

// x += a b and y += c b. a and c are rows [16 · row, 16 · row + 16) of tiles, and b has 64 rows, from its column 8 ·
// `piece` on. Only steps 0 to `last` of the common dimension are computed.
template <class E, int kBlocks>
__device__ __forceinline__ void multiply_both(float (&x)[8 * kBlocks], float (&y)[8 * kBlocks], std::uint32_t a,
                                              std::uint32_t c, std::uint32_t b, int row, int lane, int piece,
                                              int last) {
#pragma unroll 1  // so that fewer addresses are in registers
  for (int step = 0; step <= last; ++step) {
    std::uint32_t of_a[4], of_c[4];
    load_matrices(of_a, block_address(a, 16 * row, 2 * step, lane));
    load_matrices(of_c, block_address(c, 16 * row, 2 * step, lane));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      std::uint32_t rows[4];
      load_matrices_transposed(rows, block_address(b, 16 * step, piece + 2 * block, lane));
      mma<E>(x + 8 * block, of_a, rows[0], rows[1]);
      mma<E>(x + 8 * block + 4, of_a, rows[2], rows[3]);
      mma<E>(y + 8 * block, of_c, rows[0], rows[1]);
      mma<E>(y + 8 * block + 4, of_c, rows[2], rows[3]);
    }
  }
}

// x += a b. a are rows [16 · row, 16 · row + 16) of a tile or, if kTransposed is set, of a transposed tile whose
// elements above the diagonal are zeros. b as in multiply_both.
template <class E, bool kTransposed, int kBlocks>
__device__ __forceinline__ void multiply_one(float (&x)[8 * kBlocks], std::uint32_t a, std::uint32_t b, int row,
                                             int lane, int piece) {
#pragma unroll 1
  for (int step = kTransposed ? row : 0; step < 4; ++step) {
    std::uint32_t of_a[4];
    if constexpr (kTransposed) {
      load_matrices_transposed(of_a, a + piece_offset(16 * step + lane % 8 + 8 * (lane / 16), 2 * row + lane / 8 % 2));
    } else {
      load_matrices(of_a, block_address(a, 16 * row, 2 * step, lane));
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      std::uint32_t rows[4];
      load_matrices_transposed(rows, block_address(b, 16 * step, piece + 2 * block, lane));
      mma<E>(x + 8 * block, of_a, rows[0], rows[1]);
      mma<E>(x + 8 * block + 4, of_a, rows[2], rows[3]);
    }
  }
}

}  // namespace efla::gpu
