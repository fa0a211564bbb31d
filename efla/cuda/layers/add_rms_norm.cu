// add_rms_norm, forward and backward: sum = x + branch, y = rms_norm(sum) · weight. docs/ops/add_rms_norm.md has the
// equations. A group of threads has a row in registers (rows.cuh), so that every tensor is read once and written once.
// In the backward a thread block adds its rows' part of dweight, and a second kernel adds the parts (partial_sums.h).
#include <algorithm>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/partial_sums.h"
#include "efla/cuda/layers/add_rms_norm.h"
#include "efla/cuda/layers/rows.cuh"

namespace efla::gpu {
namespace {

template <class L, class T>
__global__ void __launch_bounds__(L::kThreads)
    add_forward_kernel(const __grid_constant__ AddRmsNormForward<T> p, std::int64_t rows_per_group) {
  __shared__ float shared[32];
  const int lane = threadIdx.x % L::kLanes;
  const std::int64_t rows = p.x.extent[0], columns = p.x.extent[1];
  std::int64_t row = (blockIdx.x * rows_per_group * L::kRows) + threadIdx.x / L::kLanes;
  Row<L> weight;
  weight.load(p.weight.data, columns, lane);
  RawRow<L, float> next_x{};
  RawRow<L, T> next_branch{};
  const auto read = [&](std::int64_t at) {
    if (at >= rows) return;
    next_x.read(p.x.at(at), columns, lane);
    if (p.branch) next_branch.read(p.branch.at(at), columns, lane);
  };
  read(row);
  for (std::int64_t i = 0; i < rows_per_group; ++i, row += L::kRows) {
    Row<L> sum, branch;
    sum.take(next_x);
    branch.take(next_branch);
    if (i + 1 < rows_per_group) read(row + L::kRows);
    sum.for_each([&](float& e, int piece, int j) { e += branch.at[piece][j]; });
    float squares = 0;
    sum.for_each([&](float e, int, int) { squares += e * e; });
    squares = group_sum<L>(squares, shared);
    if (row >= rows) continue;
    if (p.branch) sum.store(p.sum.at(row), columns, lane);
    const float r = 1 / sqrtf(squares / static_cast<float>(columns) + p.eps);
    sum.for_each([&](float& e, int piece, int j) { e = e * r * weight.at[piece][j]; });
    sum.store(p.y.at(row), columns, lane);
  }
}

// Computes the backward. Thread block b takes row groups b, b + gridDim.x, … and writes its part [D] of dweight.
template <class L, class T>
__global__ void __launch_bounds__(L::kThreads)
    add_backward_kernel(const __grid_constant__ AddRmsNormBackward<T> p, float* parts) {
  __shared__ float shared[32];
  extern __shared__ __align__(16) float sums[];  // [kRows][D]
  const int lane = threadIdx.x % L::kLanes, group = threadIdx.x / L::kLanes;
  const std::int64_t rows = p.sum.extent[0], columns = p.sum.extent[1];
  Row<L> weight, dweight;
  weight.load(p.weight.data, columns, lane);
  dweight.fill(0);
  constexpr bool kReadAhead = L::kVector > 1;  // otherwise there are too few registers
  for (std::int64_t first = std::int64_t{blockIdx.x} * L::kRows; first < rows;
       first += std::int64_t{gridDim.x} * L::kRows) {
    const std::int64_t row = first + group;
    RawRow<L, float> raw_sum{}, raw_dsum{};
    RawRow<L, T> raw_dy{};
    if (row < rows) {
      raw_sum.read(p.sum.at(row), columns, lane);
      raw_dy.read(p.dy.at(row), columns, lane);
      if (kReadAhead && p.dsum) raw_dsum.read(p.dsum.at(row), columns, lane);
    }
    Row<L> sum, dy;
    sum.take(raw_sum);
    dy.take(raw_dy);
    float squares = 0, dot = 0;
    sum.for_each([&](float e, int piece, int j) {
      squares += e * e;
      dot += weight.at[piece][j] * dy.at[piece][j] * e;
    });
    squares = group_sum<L>(squares, shared);
    dot = group_sum<L>(dot, shared);
    const float r = 1 / sqrtf(squares / static_cast<float>(columns) + p.eps);
    const float pull = r * r * (dot / static_cast<float>(columns));
    dweight.for_each([&](float& e, int piece, int j) { e += dy.at[piece][j] * sum.at[piece][j] * r; });
    if (row >= rows) continue;
    if (!kReadAhead && p.dsum) raw_dsum.read(p.dsum.at(row), columns, lane);
    Row<L> dsum;
    dsum.take(raw_dsum);
    dsum.for_each([&](float& e, int piece, int j) {
      e += r * (weight.at[piece][j] * dy.at[piece][j] - sum.at[piece][j] * pull);
    });
    dsum.store(p.dx.at(row), columns, lane);
    if (p.dbranch) dsum.store(p.dbranch.at(row), columns, lane);
  }
  write_part<L>(dweight, parts + blockIdx.x * columns, sums, columns, lane, group);
}

template <class T>
bool has_pieces(const AddRmsNormForward<T>& p) {
  return has_aligned_rows(p.x) && (!p.branch || (has_aligned_rows(p.branch) && has_aligned_rows(p.sum))) &&
         has_aligned_rows(p.weight) && has_aligned_rows(p.y);
}

template <class T>
bool has_pieces(const AddRmsNormBackward<T>& p) {
  return has_aligned_rows(p.sum) && has_aligned_rows(p.weight) && has_aligned_rows(p.dy) &&
         (!p.dsum || has_aligned_rows(p.dsum)) && has_aligned_rows(p.dx) && (!p.dbranch || has_aligned_rows(p.dbranch));
}

}  // namespace

template <class T>
void add_rms_norm(const AddRmsNormForward<T>& p, cudaStream_t stream) {
  constexpr const char* kOperation = "add_rms_norm_forward";
  require_columns(kOperation, p.x.extent[1]);
  if (p.x.size() == 0) return;
  with_layout<float>(has_pieces(p), p.x.extent[1], [&]<class L>(L) {
    const RowsPerGroup work(p.x.extent[0], L::kRows);
    add_forward_kernel<L, T><<<grid_of(kOperation, work.blocks), L::kThreads, 0, stream>>>(p, work.rows);
  });
  check_launch(kOperation);
}

template <class T>
void add_rms_norm(const AddRmsNormBackward<T>& p, const Workspace& workspace, cudaStream_t stream) {
  constexpr const char* kOperation = "add_rms_norm_backward";
  const std::int64_t rows = p.sum.extent[0], columns = p.sum.extent[1];
  require_columns(kOperation, columns);
  require_workspace(kOperation, workspace, add_rms_norm_workspace_bytes(p));
  auto* parts = static_cast<float*>(workspace.data);
  std::int64_t count = 0;
  if (p.sum.size() > 0) {
    with_layout<float>(has_pieces(p), columns, [&]<class L>(L) {
      count = parts_of(rows, L::kRows, kMostAddNormParts);
      const std::size_t bytes = L::kRows > 1 ? L::kRows * columns * sizeof(float) : 0;
      add_backward_kernel<L, T><<<static_cast<unsigned>(count), L::kThreads, bytes, stream>>>(p, parts);
    });
    check_launch(kOperation);
  }
  launch_add_parts(parts, count, {p.dweight.data, {columns, 1}, {p.dweight.stride[0], 0}}, stream);
}

template <class T>
std::size_t add_rms_norm_workspace_bytes(const AddRmsNormBackward<T>& p) {
  std::int64_t parts = 0;
  with_layout<float>(has_pieces(p), p.sum.extent[1],
                     [&]<class L>(L) { parts = parts_of(p.sum.extent[0], L::kRows, kMostAddNormParts); });
  return static_cast<std::size_t>(parts * p.sum.extent[1]) * sizeof(float);
}

#define EFLA_INSTANTIATE(T)                                                                 \
  template void add_rms_norm(const AddRmsNormForward<T>&, cudaStream_t);                    \
  template void add_rms_norm(const AddRmsNormBackward<T>&, const Workspace&, cudaStream_t); \
  template std::size_t add_rms_norm_workspace_bytes(const AddRmsNormBackward<T>&);
EFLA_INSTANTIATE(float)
EFLA_INSTANTIATE(bfloat16)
#undef EFLA_INSTANTIATE

}  // namespace efla::gpu
