// RMS normalisation, forward and backward, with or without a gate. docs/ops/rms_norm.md has the equations. A group of
// threads has a row in registers (rows.cuh), so that every tensor is read once. In the backward a thread block adds its
// rows' part of dweight, and a second kernel adds the parts (partial_sums.h).
#include <algorithm>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/partial_sums.h"
#include "efla/cuda/layers/activation.cuh"
#include "efla/cuda/layers/rms_norm.h"
#include "efla/cuda/layers/rows.cuh"

namespace efla::gpu {
namespace {

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
        activate<T>(p.activation, gate.at[i_p][j], value, slope);
        e *= value;
      });
    }
    x.store(p.y.at(row), columns, lane);
  }
}

// Computes the backward. Thread block b takes row groups b, b + gridDim.x, … and writes its part [D] of dweight, if
// there are `parts`.
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
  constexpr bool kReadAhead = L::kVector > 1 && L::kLanes < 1024;  // otherwise there are too few registers
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
    if constexpr (kGated) {  // dy becomes du = dy · act(gate)
      Row<L> gate;
      if (row < rows) {
        gate.load(p.gate.at(row), columns, lane);
      } else {
        gate.fill(0);
      }
      gate.for_each([&](float& z, int i, int j) {
        float value, slope;
        activate<T>(p.activation, z, value, slope);
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
  write_part<L>(dweight, parts + blockIdx.x * columns, sums, columns, lane, group);
}

template <bool kGated, class L, class T>
void launch(const RmsNormForward<T>& p, cudaStream_t stream) {
  const RowsPerGroup work(p.x.extent[0], L::kRows);
  forward_kernel<kGated, L, T><<<grid_of("rms_norm_forward", work.blocks), L::kThreads, 0, stream>>>(p, work.rows);
  check_launch("rms_norm_forward");
}

template <bool kGated, class L, class T>
void launch(const RmsNormBackward<T>& p, float* parts, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(parts_of(p.x.extent[0], L::kRows, kMostNormParts));
  const std::size_t sums = L::kRows > 1 && parts != nullptr ? L::kRows * p.x.extent[1] * sizeof(float) : 0;
  backward_kernel<kGated, L, T><<<grid, L::kThreads, sums, stream>>>(p, parts);
  check_launch("rms_norm_backward");
  if (parts == nullptr) return;
  launch_add_parts(parts, grid, {p.dweight.data, {p.dweight.extent[0], 1}, {p.dweight.stride[0], 0}}, stream);
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
  with_layout<T>(has_pieces(p), p.x.extent[1],
                 [&]<class L>(L) { parts = parts_of(p.x.extent[0], L::kRows, kMostNormParts); });
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
