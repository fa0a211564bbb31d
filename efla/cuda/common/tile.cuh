// Tiles in shared memory, and the copies of rows to tiles. A tile is 64 rows of 64 elements of 16 bits, 128 bytes per
// row. Piece p (16 bytes) of row r lies at piece p ^ (r & 7). This is the 128-byte swizzle of wgmma, and ldmatrix reads
// it without bank conflicts. A matrix of 64 rows and more columns is several tiles, one after another.
#pragma once

#include <cstdint>

#include "efla/base/dtype.h"
#include "efla/base/view.h"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/common/tensor_map.h"

namespace efla::gpu {

inline constexpr int kTileBytes = kRowsPerTile * 128;

// Returns the byte offset of piece `piece` of row `row`. Pieces from 8 on are in the next tiles.
__device__ __forceinline__ int piece_offset(int row, int piece) {
  return (piece >> 3) * kTileBytes + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

// Returns the address that lane `lane` gives to load_matrices for the 16 × 16 block at row `row`, column 8 · `piece`.
// The matrices are in the order of the A operand of mma: rows 0 to 7, rows 8 to 15, then the same rows of columns 8 to
// 15.
__device__ __forceinline__ std::uint32_t block_address(std::uint32_t tile, int row, int piece, int lane) {
  return tile + piece_offset(row + (lane & 15), piece + (lane >> 4));
}

// Writes the transposed of an 8 × 8 matrix to rows [row, row + 8) of a piece. Each lane has two neighbouring elements
// of a row.
__device__ __forceinline__ void write_transposed(unsigned char* tile, int row, int piece, std::uint32_t pair,
                                                 int lane) {
  *reinterpret_cast<std::uint32_t*>(tile + piece_offset(row + lane / 4, piece) + lane % 4 * 4) = transpose_matrix(pair);
}

// Writes a 16 × 16 block to rows [row, row + 16) of pieces `piece` and `piece` + 1. x are accumulators of mma, packed
// in pairs along a row.
__device__ __forceinline__ void write_block(unsigned char* tile, int row, int piece, const std::uint32_t (&x)[4],
                                            int lane) {
#if __CUDA_ARCH__ >= 900
  store_matrices(block_address(shared_address(tile), row, piece, lane), x);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<std::uint32_t*>(tile + piece_offset(row + lane / 4 + 8 * (i % 2), piece + i / 2) + lane % 4 * 4) =
        x[i];
  }
#endif
}

// Writes the transposed of the block in the same way.
__device__ __forceinline__ void write_block_transposed(unsigned char* tile, int row, int piece,
                                                       const std::uint32_t (&x)[4], int lane) {
#if __CUDA_ARCH__ >= 900
  store_matrices_transposed(shared_address(tile) + piece_offset(row + lane % 8 + 8 * (lane / 16), piece + lane / 8 % 2),
                            x);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) write_transposed(tile, row + 8 * (i / 2), piece + i % 2, x[i], lane);
#endif
}

// Zeroes the rows of a tile from `first` on. Run by `threads` threads, of which this is number `thread`.
__device__ __forceinline__ void clear_rows(unsigned char* tile, int first, int thread, int threads) {
  for (int at = 8 * first + thread; at < 8 * kRowsPerTile; at += threads) reinterpret_cast<uint4*>(tile)[at] = uint4{};
}

// Copies a piece of every step-th row from `row` on, element by element. Elements that do not exist become zeros. It is
// a loop, because it is rarely used and unrolled code would fill the instruction cache.
template <class E>
__device__ __forceinline__ void copy_elements(unsigned char* tiles, const E* from, int row, int step, int rows,
                                              int count, std::int64_t row_stride, std::int64_t stride, int piece) {
#pragma unroll 1
  for (; row < kRowsPerTile; row += step) {
    std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (row < rows && i < count)
        words[i / 2] |= static_cast<std::uint32_t>(from[row * row_stride + i * stride].bits) << (16 * (i % 2));
    }
    *reinterpret_cast<uint4*>(tiles + piece_offset(row, piece)) = uint4{words[0], words[1], words[2], words[3]};
  }
}

// Writes the first `count` of eight elements (`values`) of a row. `aligned`: as one piece of 16 bytes.
template <class E>
__device__ __forceinline__ void store_row_piece(E* to, std::int64_t stride, const uint4& values, int count,
                                                bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = values;
    return;
  }
  const std::uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) to[i * stride] = E(static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2))));
  }
}

// Starts the copy of `bytes` bytes, a multiple of 16, to shared memory. Run by kThreads threads. The caller commits and
// waits.
template <int kThreads>
__device__ __forceinline__ void load_image(void* to, const void* from, int bytes, int thread) {
  for (int at = 16 * thread; at < bytes; at += 16 * kThreads) {
    copy_async_16(shared_address(to) + at, static_cast<const unsigned char*>(from) + at, 16);
  }
}

// Starts the copies of rows [t, t + rows) and columns [column, column + 64 · kTiles) of a head to tiles. Rows and
// columns that do not exist become zeros. `aligned`: rows are contiguous and aligned to 16 bytes. Otherwise elements
// are copied one by one before the function returns. The caller commits and waits.
template <int kTiles, int kThreads, class E>
__device__ __forceinline__ void load_rows(unsigned char* tiles, const View<const E, 4>& view, std::int64_t i_b,
                                          std::int64_t t, int rows, std::int64_t i_h, std::int64_t column, bool aligned,
                                          int thread) {
  constexpr int kPieces = 8 * kTiles, kStep = kThreads / kPieces;  // pieces per row, rows per pass
  const int piece = thread % kPieces,
            columns = static_cast<int>(min(view.extent[3] - column, std::int64_t{64 * kTiles}));
  const int count = min(max(columns - 8 * piece, 0), 8);  // columns of the piece that exist
  const E* from = view.at(i_b, t, i_h, column) + static_cast<std::int64_t>(8 * piece) * view.stride[3];
  const std::int64_t stride = view.stride[1];
  if (!aligned) {
    copy_elements(tiles, from, thread / kPieces, kStep, rows, count, stride, view.stride[3], piece);
    return;
  }
#pragma unroll 2
  for (int pass = 0; pass < kRowsPerTile / kStep; ++pass) {
    const int row = thread / kPieces + pass * kStep;
    const bool exists = row < rows && count > 0;
    copy_async_16(shared_address(tiles + piece_offset(row, piece)), exists ? from + row * stride : view.data,
                  exists ? 16 : 0);
  }
}

}  // namespace efla::gpu
