// Rows of a matrix in the registers of groups of threads, for kernels that need sums over a row. Lane l of a group has
// columns (l + i · kLanes) · kVector to (l + i · kLanes + 1) · kVector − 1, for i < kPieces, of every row of its group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "efla/base/error.h"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/pieces.cuh"
#include "efla/cuda/layers/rms_norm.h"

namespace efla::gpu {

// How rows are distributed over threads: groups of kLanes threads, each with kPieces pieces of kVector columns.
template <int kVectorIn, int kLanesIn, int kPiecesIn>
struct Layout {
  static constexpr int kVector = kVectorIn, kLanes = kLanesIn, kPieces = kPiecesIn;
  static constexpr int kThreads = kLanes > 32 ? kLanes : 256;
  static constexpr int kRows = kThreads / kLanes;  // groups per thread block, with one row each at a time
  static constexpr std::int64_t columns() { return std::int64_t{kVector} * kLanes * kPieces; }
};

// Returns the sum over the threads of a group. Every thread of the block must call it.
template <class L>
__device__ float group_sum(float x, float* shared) {
#pragma unroll
  for (int offset = (L::kLanes < 32 ? L::kLanes : 32) / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffU, x, offset);
  }
  if constexpr (L::kLanes > 32) {
    constexpr int kWarps = L::kLanes / 32;
    static_assert(L::kRows == 1);
    __syncthreads();  // the previous sum may still be read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x += shared[w];
  }
  return x;
}

// A thread's elements of a row in the types of memory, so that reads do not wait for conversions.
template <class L, class T>
struct RawRow {
  Piece<T, L::kVector> at[L::kPieces];

  __device__ void read(const T* row, std::int64_t columns, int lane) {
#pragma unroll
    for (int i = 0; i < L::kPieces; ++i) {
      const std::int64_t column = std::int64_t{lane + i * L::kLanes} * L::kVector;
      if (column < columns) {
        at[i] = read_piece<L::kVector>(row + column);
      } else {
        at[i] = {};
      }
    }
  }
};

// A thread's elements of a row in float32.
template <class L>
struct Row {
  float at[L::kPieces][L::kVector];

  template <class T>
  __device__ void take(const RawRow<L, T>& raw) {
#pragma unroll
    for (int i = 0; i < L::kPieces; ++i) widen(raw.at[i], at[i]);
  }
  template <class T>
  __device__ void load(const T* row, std::int64_t columns, int lane) {
    RawRow<L, T> raw;
    raw.read(row, columns, lane);
    take(raw);
  }
  template <class T>
  __device__ void store(T* row, std::int64_t columns, int lane) const {
#pragma unroll
    for (int i = 0; i < L::kPieces; ++i) {
      const std::int64_t column = std::int64_t{lane + i * L::kLanes} * L::kVector;
      if (column < columns) store_piece(row + column, at[i]);
    }
  }
  __device__ void fill(float value) {
#pragma unroll
    for (int i = 0; i < L::kPieces; ++i) {
#pragma unroll
      for (int j = 0; j < L::kVector; ++j) at[i][j] = value;
    }
  }
  template <class F>
  __device__ void for_each(F&& f) {
#pragma unroll
    for (int i = 0; i < L::kPieces; ++i) {
#pragma unroll
      for (int j = 0; j < L::kVector; ++j) f(at[i][j], i, j);
    }
  }
};

// Returns the number of parts of a sum over the rows: the thread blocks of a backward, at most `most`.
inline std::int64_t parts_of(std::int64_t rows, std::int64_t rows_per_block, std::int64_t most) {
  return std::min((rows + rows_per_block - 1) / rows_per_block, most);
}

// Writes a thread block's sums over its rows to part [columns]. Every group has the sums of some of the rows. `sums` is
// shared memory, [kRows][columns] if there are several groups.
template <class L>
__device__ void write_part(const Row<L>& row, float* part, float* sums, std::int64_t columns, int lane, int group) {
  if constexpr (L::kRows == 1) {
    row.store(part, columns, lane);
  } else {
    row.store(sums + group * columns, columns, lane);
    __syncthreads();
    for (std::int64_t c = threadIdx.x; c < columns; c += L::kThreads) {
      float sum = 0;
      for (int g = 0; g < L::kRows; ++g) sum += sums[g * columns + c];
      part[c] = sum;
    }
  }
}

// How the rows of a forward are distributed: over `blocks` thread blocks, in which every group computes `rows` rows one
// after another.
struct RowsPerGroup {
  std::int64_t rows, blocks;

  RowsPerGroup(std::int64_t all_rows, std::int64_t rows_per_block) {
    const std::int64_t all = (all_rows + rows_per_block - 1) / rows_per_block;
    rows = std::clamp(all / kFullGrid, std::int64_t{1}, kMostGroupRows);
    blocks = (all + rows - 1) / rows;
  }
};

// Throws Error(operation, …) if there are more than kMaxNormColumns columns.
inline void require_columns(const char* operation, std::int64_t columns) {
  if (columns > kMaxNormColumns) {
    throw Error(operation, "columns D", std::to_string(columns),
                "at most " + std::to_string(kMaxNormColumns) + " on a GPU");
  }
}

// Calls f with the Layout for rows of `columns` columns. `pieces`: rows can be read in pieces of 16 bytes of T.
template <class T, class F>
void with_layout(bool pieces, std::int64_t columns, F&& f) {
  constexpr int kVector = kPieceElements<T>;
  if (pieces) {
    if (columns <= Layout<kVector, 16, 1>::columns()) return f(Layout<kVector, 16, 1>{});
    if (columns <= Layout<kVector, 32, 1>::columns()) return f(Layout<kVector, 32, 1>{});
    if (columns <= Layout<kVector, 128, 1>::columns()) return f(Layout<kVector, 128, 1>{});
    if (columns <= Layout<kVector, 256, 1>::columns()) return f(Layout<kVector, 256, 1>{});
    if (columns <= Layout<kVector, 256, 2>::columns()) return f(Layout<kVector, 256, 2>{});
    if (columns <= Layout<kVector, 512, 2>::columns()) return f(Layout<kVector, 512, 2>{});
    return f(Layout<kVector, 1024, kMaxNormColumns / 1024 / kVector>{});
  }
  if (columns <= Layout<1, 32, 8>::columns()) return f(Layout<1, 32, 8>{});
  f(Layout<1, 1024, kMaxNormColumns / 1024>{});
}

}  // namespace efla::gpu
