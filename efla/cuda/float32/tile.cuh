// Tiles of float32 in shared memory. A row of a tile has kColumns elements. Element (row,
// column) lies at column ^ swizzle(row) of its row. So both ways in which products read a tile have no bank conflicts:
// pairs of elements of rows (multiply_rows), and two rows of eight columns (multiply_columns).
#pragma once

#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/pieces.cuh"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/common/tile.cuh"
#include "efla/cuda/float32/float32.h"

namespace efla::gpu {

__device__ __forceinline__ int swizzle(int row) { return ((row & 7) + (row >> 2 & 1)) % 4 * 8; }

// Returns the index of an element in a tile.
template <int kColumns>
__device__ __forceinline__ int tile_index(int row, int column) {
  return row * kColumns + (column & ~31) + ((column & 31) ^ swizzle(row));
}

// Read one number or two from shared memory. Volatile, so that the compiler does not read ahead more than registers
// hold.
__device__ __forceinline__ float read_shared(std::uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ float2 read_shared_pair(std::uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// Returns the address of an element of a tile that is at `tile` in shared memory.
template <int kColumns>
__device__ __forceinline__ std::uint32_t element_address(std::uint32_t tile, int row, int column) {
  return tile + 4 * static_cast<std::uint32_t>(tile_index<kColumns>(row, column));
}

// Starts the copies of rows [t, t + rows) and columns [column, column + kColumns) of a head to a tile of kFloat32Tokens
// rows. Rows and columns that do not exist become zeros. `aligned`: rows are contiguous and aligned to 16 bytes.
// Otherwise elements are copied one by one before the function returns. The caller commits and waits.
template <int kColumns, int kThreads>
__device__ __forceinline__ void load_tile(float* tile, const View<const float, 4>& view, std::int64_t i_b,
                                          std::int64_t t, int rows, std::int64_t i_h, std::int64_t column, bool aligned,
                                          int thread) {
  if (aligned) {
    constexpr int kVector = kPieceElements<float>, kPieces = kColumns / kVector;
    const float* first = view.at(i_b, t, i_h, column);
#pragma unroll 4
    for (int i = thread; i < kFloat32Tokens * kPieces; i += kThreads) {
      const int row = i / kPieces, own = i % kPieces * kVector;
      const bool exists = row < rows && column + own < view.extent[3];
      const float* from = first + row * view.stride[1] + own;
      copy_async_16(shared_address(tile + tile_index<kColumns>(row, own)), exists ? from : view.data, exists ? 16 : 0);
    }
    return;
  }
#pragma unroll 1
  for (int i = thread; i < kFloat32Tokens * kColumns; i += kThreads) {
    const int row = i / kColumns, own = i % kColumns;
    const bool exists = row < rows && column + own < view.extent[3];
    tile[tile_index<kColumns>(row, own)] = exists ? *view.at(i_b, t + row, i_h, column + own) : 0.0F;
  }
}

// Calls f(i, exists, address) for the elements of a chunk's rows that a lane has as accumulators of the transposed
// matrix (products.cuh): 16 value columns from `column` on, and all tokens. i is the index of the accumulator.
template <class T, class F>
__device__ __forceinline__ void for_each_column_element(const View<T, 4>& view, const ChunkAt& at, std::int64_t i_h,
                                                        std::int64_t column, int lane, F&& f) {
  const int first = (opaque(lane) & 3) * 2;  // addresses are computed here, and not kept in registers between chunks
  const std::int64_t stride = view.stride[1];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t own = column + lane / 4 + 8 * r;
    const int rows = own < view.extent[3] ? at.rows - first : 0;
    T* element = view.at(at.i_b, at.start + first, i_h, own);
#pragma unroll
    for (int tile = 0; tile < kFloat32Tokens / 8; ++tile) {
      f(4 * tile + 2 * r, 8 * tile < rows, element);
      f(4 * tile + 2 * r + 1, 8 * tile + 1 < rows, element + stride);
      element += 8 * stride;
    }
  }
}

// Reads 16 value columns of a chunk's rows, transposed; zeros for elements that do not exist. They are read from global
// memory, because few threads need the same element.
__device__ __forceinline__ void read_columns(float (&x)[kFloat32Tokens / 2], const View<const float, 4>& view,
                                             const ChunkAt& at, std::int64_t i_h, std::int64_t column, int lane) {
  for_each_column_element(view, at, i_h, column, lane,
                          [&](int i, bool exists, const float* from) { x[i] = exists ? *from : 0.0F; });
}
// Writes 16 value columns of a chunk's rows, only the tiles of 8 tokens for which owned(tile) is true.
template <class Owned>
__device__ __forceinline__ void write_columns(const float (&x)[kFloat32Tokens / 2], const View<float, 4>& view,
                                              const ChunkAt& at, std::int64_t i_h, std::int64_t column, int lane,
                                              Owned&& owned) {
  for_each_column_element(view, at, i_h, column, lane, [&](int i, bool exists, float* to) {
    if (exists && owned(i / 4)) *to = x[i];
  });
}

// Writes 16 value columns of a chunk's rows to a tile of tokens by kFloat32Columns value columns, in shared or global
// memory.
__device__ __forceinline__ void write_tile(const float (&x)[kFloat32Tokens / 2], float* tile, int column, int lane) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int i = 0; i < kFloat32Tokens / 2; ++i) {
    tile[tile_index<kFloat32Columns>(i / 4 * 8 + 2 * (lane % 4) + i % 2, column + lane / 4 + 8 * (i / 2 % 2))] = x[i];
  }
}

}  // namespace efla::gpu
