// Tiles in shared memory, and the copies of rows to tiles. A tile is 64 rows of 64 elements of 16 bits, 128 bytes per
// row. Piece p (16 bytes) of row r lies at piece p ^ (r & 7). This is the 128-byte swizzle of wgmma, and ldmatrix reads
// it without bank conflicts. A matrix of 64 rows and more columns is several tiles, one after another.
#pragma once

#include <cstdint>

#include "efla/base/dtype.h"
#include "efla/base/view.h"
#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/ptx.cuh"

namespace efla::gpu {

inline constexpr int kTileBytes = kChunkTokens * 128;

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
  for (int at = 8 * first + thread; at < 8 * kChunkTokens; at += threads) reinterpret_cast<uint4*>(tile)[at] = uint4{};
}

// Where a chunk lies: sequence n of batch entry i_b with tokens [begin, end), the chunk's first token and its number of
// tokens, which is 0 if the slot has no chunk.
struct ChunkAt {
  std::int64_t n, i_b, begin, end, start;
  int rows;
};

// Returns the slot of the first chunk of a sequence.
template <class E>
__device__ __forceinline__ std::int64_t first_slot(const ChunkProblem<E>& c, std::int64_t n) {
  return c.slots_per_sequence > 0 ? n * c.slots_per_sequence : c.p.cu_seqlens(n) / kChunkTokens + n;
}

// Returns the last of `sequences` sequences for which first(n), which increases with n, is at most `index`. All lanes
// of a warp take part.
template <class F>
__device__ __forceinline__ std::int64_t find_sequence(std::int64_t sequences, std::int64_t index, F&& first) {
  std::int64_t low = 0, high = sequences;  // first(low) ≤ index, and the answer is below high
  while (high - low > 1) {
    const std::int64_t step = (high - low + 31) / 32, n = low + static_cast<int>(threadIdx.x % 32) * step;
    const unsigned below = __ballot_sync(0xffffffffU, n < high && first(n) <= index);
    low += (__popc(below) - 1) * step;
    high = min(high, low + step);
  }
  return low;
}

// Returns the sequence to which a slot belongs. All lanes of a warp take part.
template <class E>
__device__ inline std::int64_t sequence_of_slot(const ChunkProblem<E>& c, std::int64_t slot) {
  if (c.slots_per_sequence > 0) return slot / c.slots_per_sequence;
  return find_sequence(c.p.shape.packed, slot, [&](std::int64_t n) { return first_slot(c, n); });
}

// Returns where the chunk of a slot lies. All lanes of a warp take part.
template <class E>
__device__ inline ChunkAt chunk_at(const ChunkProblem<E>& c, std::int64_t slot) {
  const std::int64_t n = sequence_of_slot(c, slot);
  const Sequence s = sequence_of(c.p, n);
  const std::int64_t start = s.begin + (slot - first_slot(c, n)) * kChunkTokens;
  return {n,     s.i_b, s.begin,
          s.end, start, static_cast<int>(max(std::int64_t{0}, min(s.end - start, std::int64_t{kChunkTokens})))};
}

// Copies a piece of every step-th row from `row` on, element by element. Elements that do not exist become zeros. It is
// a loop, because it is rarely used and unrolled code would fill the instruction cache.
template <class E>
__device__ __forceinline__ void copy_elements(unsigned char* tiles, const E* from, int row, int step, int rows,
                                              int count, std::int64_t row_stride, std::int64_t stride, int piece) {
#pragma unroll 1
  for (; row < kChunkTokens; row += step) {
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
  for (int pass = 0; pass < kChunkTokens / kStep; ++pass) {
    const int row = thread / kPieces + pass * kStep;
    const bool exists = row < rows && count > 0;
    copy_async_16(shared_address(tiles + piece_offset(row, piece)), exists ? from + row * stride : view.data,
                  exists ? 16 : 0);
  }
}

}  // namespace efla::gpu
