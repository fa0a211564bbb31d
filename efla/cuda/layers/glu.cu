// Gated linear units, forward and backward. docs/ops/glu.md has the equations. One thread per piece of 16 bytes of each
// tensor, or per element if rows are not aligned.
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/pieces.cuh"
#include "efla/cuda/layers/activation.cuh"
#include "efla/cuda/layers/glu.h"

namespace efla::gpu {
namespace {

constexpr int kThreads = 256;

// Calls f(row, column) with the first element of this thread's piece.
template <int kVector, class F>
__device__ void at_piece(std::int64_t rows, std::int64_t columns, F&& f) {
  const std::int64_t pieces = columns / kVector, i = (std::int64_t{blockIdx.x} * kThreads) + threadIdx.x;
  const std::int64_t row = i / pieces;
  if (row < rows) f(row, (i - row * pieces) * kVector);
}

template <int kVector, class T>
__global__ void __launch_bounds__(kThreads) glu_forward_kernel(const __grid_constant__ GluForward<T> p) {
  at_piece<kVector>(p.gate.extent[0], p.gate.extent[1], [&](std::int64_t row, std::int64_t column) {
    float gate[kVector], up[kVector];
    load_piece(p.gate.at(row) + column, gate);
    load_piece(p.up.at(row) + column, up);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float value, slope;
      activate<T>(p.activation, gate[j], value, slope);
      up[j] *= value;
    }
    store_piece(p.y.at(row) + column, up);
  });
}

// Bounds registers for four blocks per multiprocessor; with fewer registers the compiler reads the three inputs one
// after another.
template <int kVector, class T>
__global__ void __launch_bounds__(kThreads, 4) glu_backward_kernel(const __grid_constant__ GluBackward<T> p) {
  at_piece<kVector>(p.gate.extent[0], p.gate.extent[1], [&](std::int64_t row, std::int64_t column) {
    float gate[kVector], up[kVector], dy[kVector];
    load_piece(p.gate.at(row) + column, gate);
    load_piece(p.up.at(row) + column, up);
    load_piece(p.dy.at(row) + column, dy);
    float dgate[kVector], dup[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float value, slope;
      activate<T>(p.activation, gate[j], value, slope);
      dgate[j] = dy[j] * up[j] * slope;
      dup[j] = dy[j] * value;
      up[j] *= value;
    }
    store_piece(p.dgate.at(row) + column, dgate);
    store_piece(p.dup.at(row) + column, dup);
    if (p.y) store_piece(p.y.at(row) + column, up);
  });
}

template <class T>
unsigned blocks_of(const char* operation, const View<const T, 2>& rows, int vector) {
  return grid_of(operation, (rows.size() / vector + kThreads - 1) / kThreads);
}

}  // namespace

template <class T>
void glu(const GluForward<T>& p, cudaStream_t stream) {
  constexpr const char* kOperation = "glu_forward";
  constexpr int kVector = kPieceElements<T>;
  if (p.gate.size() == 0) return;
  if (has_aligned_rows(p.gate) && has_aligned_rows(p.up) && has_aligned_rows(p.y)) {
    glu_forward_kernel<kVector><<<blocks_of(kOperation, p.gate, kVector), kThreads, 0, stream>>>(p);
  } else {
    glu_forward_kernel<1><<<blocks_of(kOperation, p.gate, 1), kThreads, 0, stream>>>(p);
  }
  check_launch(kOperation);
}

template <class T>
void glu(const GluBackward<T>& p, cudaStream_t stream) {
  constexpr const char* kOperation = "glu_backward";
  constexpr int kVector = kPieceElements<T>;
  if (p.gate.size() == 0) return;
  if (has_aligned_rows(p.gate) && has_aligned_rows(p.up) && has_aligned_rows(p.dy) && has_aligned_rows(p.dgate) &&
      has_aligned_rows(p.dup) && (!p.y || has_aligned_rows(p.y))) {
    glu_backward_kernel<kVector><<<blocks_of(kOperation, p.gate, kVector), kThreads, 0, stream>>>(p);
  } else {
    glu_backward_kernel<1><<<blocks_of(kOperation, p.gate, 1), kThreads, 0, stream>>>(p);
  }
  check_launch(kOperation);
}

#define EFLA_INSTANTIATE(T)                              \
  template void glu(const GluForward<T>&, cudaStream_t); \
  template void glu(const GluBackward<T>&, cudaStream_t);
EFLA_INSTANTIATE(float)
EFLA_INSTANTIATE(bfloat16)
#undef EFLA_INSTANTIATE

}  // namespace efla::gpu
