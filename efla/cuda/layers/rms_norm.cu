// RMS normalisation. A group of kLanes threads holds a row in registers, so that every tensor is read once; lane l owns
// the columns (l + i · kLanes) · kVector … of every row that its group computes.
#include <algorithm>

#include "efla/base/error.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/partial_sums.h"
#include "efla/cuda/common/pieces.cuh"
#include "efla/cuda/layers/rms_norm.h"

namespace efla::gpu {
namespace {

constexpr std::int64_t kMostParts = 1056;  // of the sum over rows: the thread blocks of a backward
constexpr std::int64_t kMostRows = 8;      // that a group of a forward computes one after the other
constexpr std::int64_t kFullGrid = 1024;   // thread blocks from which on a group takes more than one row

// How rows lie on threads: groups of kLanes threads, each with kPieces pieces of kVector columns.
template <int kVectorIn, int kLanesIn, int kPiecesIn>
struct Layout {
  static constexpr int kVector = kVectorIn, kLanes = kLanesIn, kPieces = kPiecesIn;
  static constexpr int kThreads = kLanes > 32 ? kLanes : 256;
  static constexpr int kRows = kThreads / kLanes;  // per thread block
  static constexpr std::int64_t columns() { return std::int64_t{kVector} * kLanes * kPieces; }
};

// Returns the sum over the threads of a group. Every thread of the block calls it.
template <class L>
__device__ float group_sum(float x, float* shared) {
#pragma unroll
  for (int offset = (L::kLanes < 32 ? L::kLanes : 32) / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffU, x, offset);
  }
  if constexpr (L::kLanes > 32) {
    constexpr int kWarps = L::kLanes / 32;
    static_assert(L::kRows == 1);
    __syncthreads();  // the sum before may still be read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x += shared[w];
  }
  return x;
}

// A row's elements of one thread as they are in memory: what is read ahead.
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

// A row's elements of one thread.
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

// act(gate) and its derivative.
__device__ __forceinline__ void activate(GateActivation activation, float z, float& value, float& slope) {
  const float sigma = 1 / (1 + expf(-z));
  const bool silu = activation == GateActivation::silu;
  value = silu ? z * sigma : sigma;
  slope = silu ? sigma * (1 + z * (1 - sigma)) : sigma * (1 - sigma);
}

template <bool kGated, class L, class T>
__global__ void __launch_bounds__(L::kThreads)
    forward_kernel(const __grid_constant__ RmsNormForward<T> p, std::int64_t rows_per_group) {
  __shared__ float shared[32];
  const int lane = threadIdx.x % L::kLanes;
  const std::int64_t rows = p.x.extent[0], columns = p.x.extent[1];
  std::int64_t row = (blockIdx.x * rows_per_group * L::kRows) + threadIdx.x / L::kLanes;
  Row<L> weight;
  if (p.weight) {
    weight.load(p.weight.data, columns, lane);
  } else {
    weight.fill(1);
  }
  RawRow<L, T> next{};
  if (row < rows) next.read(p.x.at(row), columns, lane);
  for (std::int64_t i = 0; i < rows_per_group; ++i, row += L::kRows) {
    Row<L> x;
    x.take(next);
    if (i + 1 < rows_per_group && row + L::kRows < rows) next.read(p.x.at(row + L::kRows), columns, lane);
    float squares = 0;
    x.for_each([&](float e, int, int) { squares += e * e; });
    squares = group_sum<L>(squares, shared);
    if (row >= rows) continue;
    const float r = 1 / sqrtf(squares / static_cast<float>(columns) + p.eps);
    x.for_each([&](float& e, int i_p, int j) { e = e * r * weight.at[i_p][j]; });
    if constexpr (kGated) {
      Row<L> gate;
      gate.load(p.gate.at(row), columns, lane);
      x.for_each([&](float& e, int i_p, int j) {
        float value, slope;
        activate(p.activation, gate.at[i_p][j], value, slope);
        e *= value;
      });
    }
    x.store(p.y.at(row), columns, lane);
  }
}

// Thread block b computes the rows of groups b, b + gridDim.x, … and writes its part [D] of dweight.
template <bool kGated, class L, class T>
__global__ void __launch_bounds__(L::kThreads)
    backward_kernel(const __grid_constant__ RmsNormBackward<T> p, float* parts) {
  __shared__ float shared[32];
  extern __shared__ __align__(16) float sums[];  // [kRows][D]
  const int lane = threadIdx.x % L::kLanes, group = threadIdx.x / L::kLanes;
  const std::int64_t rows = p.x.extent[0], columns = p.x.extent[1];
  Row<L> weight, dweight;
  if (p.weight) {
    weight.load(p.weight.data, columns, lane);
  } else {
    weight.fill(1);
  }
  dweight.fill(0);
  const std::int64_t begin = std::int64_t{blockIdx.x} * L::kRows, step = std::int64_t{gridDim.x} * L::kRows;
  constexpr bool kReadAhead = L::kVector > 1 && L::kLanes < 1024;  // elsewhere there are too few registers
  RawRow<L, T> next_x, next_dy;
  const auto read = [&](std::int64_t row) {
    if (row < rows) {
      next_x.read(p.x.at(row), columns, lane);
      next_dy.read(p.dy.at(row), columns, lane);
    } else {
      next_x = next_dy = {};
    }
  };
  if (kReadAhead) read(begin + group);
  for (std::int64_t first = begin; first < rows; first += step) {
    const std::int64_t row = first + group;
    if (!kReadAhead) read(row);
    Row<L> x, dy;
    x.take(next_x);
    dy.take(next_dy);
    if (kReadAhead) read(row + step);
    float squares = 0;
    x.for_each([&](float e, int, int) { squares += e * e; });
    squares = group_sum<L>(squares, shared);
    const float r = 1 / sqrtf(squares / static_cast<float>(columns) + p.eps);
    if constexpr (kGated) {  // dy becomes du
      Row<L> gate;
      if (row < rows) {
        gate.load(p.gate.at(row), columns, lane);
      } else {
        gate.fill(0);
      }
      gate.for_each([&](float& z, int i, int j) {
        float value, slope;
        activate(p.activation, z, value, slope);
        z = dy.at[i][j] * x.at[i][j] * r * weight.at[i][j] * slope;
        dy.at[i][j] *= value;
      });
      if (row < rows) gate.store(p.dgate.at(row), columns, lane);
    }
    float dot = 0;
    x.for_each([&](float e, int i, int j) { dot += weight.at[i][j] * dy.at[i][j] * e; });
    dot = group_sum<L>(dot, shared);
    const float pull = r * r * (dot / static_cast<float>(columns));
    dweight.for_each([&](float& sum, int i, int j) { sum += dy.at[i][j] * x.at[i][j] * r; });
    if (row >= rows) continue;
    x.for_each([&](float& e, int i, int j) { e = r * (weight.at[i][j] * dy.at[i][j] - e * pull); });
    x.store(p.dx.at(row), columns, lane);
  }
  if (parts == nullptr) return;
  float* part = parts + blockIdx.x * columns;
  if constexpr (L::kRows == 1) {
    dweight.store(part, columns, lane);
  } else {
    dweight.store(sums + group * columns, columns, lane);
    __syncthreads();
    for (std::int64_t c = threadIdx.x; c < columns; c += L::kThreads) {
      float sum = 0;
      for (int g = 0; g < L::kRows; ++g) sum += sums[g * columns + c];
      part[c] = sum;
    }
  }
}

std::int64_t parts_of(std::int64_t rows, std::int64_t rows_per_block) {
  return std::min((rows + rows_per_block - 1) / rows_per_block, kMostParts);
}

template <bool kGated, class L, class T>
void launch(const RmsNormForward<T>& p, cudaStream_t stream) {
  const std::int64_t blocks = (p.x.extent[0] + L::kRows - 1) / L::kRows;
  const std::int64_t rows_per_group = std::clamp(blocks / kFullGrid, std::int64_t{1}, kMostRows);
  const unsigned grid = grid_of("rms_norm_forward", (blocks + rows_per_group - 1) / rows_per_group);
  forward_kernel<kGated, L, T><<<grid, L::kThreads, 0, stream>>>(p, rows_per_group);
  check_launch("rms_norm_forward");
}

template <bool kGated, class L, class T>
void launch(const RmsNormBackward<T>& p, float* parts, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(parts_of(p.x.extent[0], L::kRows));
  const std::size_t sums = L::kRows > 1 && parts != nullptr ? L::kRows * p.x.extent[1] * sizeof(float) : 0;
  backward_kernel<kGated, L, T><<<grid, L::kThreads, sums, stream>>>(p, parts);
  check_launch("rms_norm_backward");
  if (parts == nullptr) return;
  launch_add_parts(parts, grid, {p.dweight.data, {p.dweight.extent[0], 1}, {p.dweight.stride[0], 0}}, stream);
}

// Calls f with the layout for rows of `columns` columns.
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

void require_columns(const char* operation, std::int64_t columns) {
  if (columns > kMaxNormColumns) {
    throw Error(operation, "columns D", std::to_string(columns),
                "at most " + std::to_string(kMaxNormColumns) + " on a GPU");
  }
}

template <class T>
bool has_pieces(const RmsNormBackward<T>& p) {
  return has_aligned_rows(p.x) && (!p.weight || has_aligned_rows(p.weight)) && has_aligned_rows(p.dy) &&
         has_aligned_rows(p.dx) && (!p.gate || (has_aligned_rows(p.gate) && has_aligned_rows(p.dgate)));
}

}  // namespace

template <class T>
void rms_norm(const RmsNormForward<T>& p, cudaStream_t stream) {
  require_columns("rms_norm_forward", p.x.extent[1]);
  if (p.x.size() == 0) return;
  const bool pieces = has_aligned_rows(p.x) && (!p.weight || has_aligned_rows(p.weight)) && has_aligned_rows(p.y) &&
                      (!p.gate || has_aligned_rows(p.gate));
  with_layout<T>(pieces, p.x.extent[1],
                 [&]<class L>(L) { p.gate ? launch<true, L>(p, stream) : launch<false, L>(p, stream); });
}

template <class T>
void rms_norm(const RmsNormBackward<T>& p, const Workspace& workspace, cudaStream_t stream) {
  constexpr const char* kOperation = "rms_norm_backward";
  require_columns(kOperation, p.x.extent[1]);
  require_workspace(kOperation, workspace, rms_norm_workspace_bytes(p));
  auto* parts = p.dweight ? static_cast<float*>(workspace.data) : nullptr;
  if (p.x.size() == 0) {
    if (p.dweight)
      launch_add_parts(nullptr, 0, {p.dweight.data, {p.dweight.extent[0], 1}, {p.dweight.stride[0], 0}}, stream);
    return;
  }
  with_layout<T>(has_pieces(p), p.x.extent[1],
                 [&]<class L>(L) { p.gate ? launch<true, L>(p, parts, stream) : launch<false, L>(p, parts, stream); });
}

template <class T>
std::size_t rms_norm_workspace_bytes(const RmsNormBackward<T>& p) {
  if (!p.dweight || p.x.size() == 0) return 0;
  std::int64_t parts = 0;
  with_layout<T>(has_pieces(p), p.x.extent[1], [&]<class L>(L) { parts = parts_of(p.x.extent[0], L::kRows); });
  return static_cast<std::size_t>(parts * p.x.extent[1]) * sizeof(float);
}

#define EFLA_INSTANTIATE(T)                                                          \
  template void rms_norm(const RmsNormForward<T>&, cudaStream_t);                    \
  template void rms_norm(const RmsNormBackward<T>&, const Workspace&, cudaStream_t); \
  template std::size_t rms_norm_workspace_bytes(const RmsNormBackward<T>&);
EFLA_INSTANTIATE(float)
EFLA_INSTANTIATE(bfloat16)
#undef EFLA_INSTANTIATE

}  // namespace efla::gpu
