// The decay gate, forward and backward. docs/ops/decay_gate.md has the equations. A thread has kVector columns, whose
// bias and rate it reads once, of rows at equal distances. In the backward thread blocks write parts of dbias and
// da_log, and a second kernel adds the parts (partial_sums.h).
#include <algorithm>

#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/partial_sums.h"
#include "efla/cuda/common/pieces.cuh"
#include "efla/cuda/layers/decay_gate.h"

namespace efla::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 4;  // columns per thread if rows are aligned: 16 bytes of g
constexpr int kRows = 2;   // rows that a thread reads before it computes with them

// How a problem is divided over thread blocks. A block has `lanes` threads side by side, a power of two, with `vector`
// columns each. column_blocks thread blocks cover the columns of a row, and row_blocks of them share the rows of each
// column.
struct Division {
  int vector, lanes;
  std::int64_t column_blocks, row_blocks;

  Division(bool pieces, const std::array<std::int64_t, 2>& extent) : vector(pieces ? kPiece : 1), lanes(1) {
    while (lanes < kThreads && lanes * vector < extent[1]) lanes *= 2;
    const std::int64_t width = std::int64_t{lanes} * vector, height = kThreads / lanes * kRows;
    column_blocks = (extent[1] + width - 1) / width;
    row_blocks = std::clamp(kMostGateBlocks / column_blocks, std::int64_t{1},
                            std::max((extent[0] + height - 1) / height, std::int64_t{1}));
  }
  unsigned grid(const char* operation) const { return grid_of(operation, column_blocks * row_blocks); }
};

template <class T>
Division division_of(const DecayGateForward<T>& p) {
  return {has_aligned_rows(p.z) && has_aligned_rows(p.g), p.z.extent};
}

template <class T>
Division division_of(const DecayGateBackward<T>& p) {
  return {has_aligned_rows(p.z) && has_aligned_rows(p.dg) && has_aligned_rows(p.dz), p.z.extent};
}

// Returns the number of parts of a sum over the rows.
template <class T>
std::int64_t parts_of(const DecayGateBackward<T>& p) {
  return p.z.size() > 0 ? division_of(p).row_blocks : 0;
}

// Where a thread works: its first column and row, and the distance between its rows.
struct Place {
  std::int64_t column, row, step;

  __device__ Place(int vector, int lanes, unsigned column_blocks) {
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = kThreads / lanes;
    column = (std::int64_t{blockIdx.x % column_blocks} * lanes + lane) * vector;
    row = std::int64_t{blockIdx.x / column_blocks} * groups + group;
    step = std::int64_t{gridDim.x / column_blocks} * groups;
  }
};

// The rate of a thread's columns, and the bias plus the rest of the rate (decay_activation.h).
template <int kVector>
struct Columns {
  float bias[kVector], rate[kVector];

  template <class Problem>
  __device__ Columns(const Problem& p, std::int64_t first) {
    const std::int64_t channels = p.z.extent[1] / p.a_log.extent[0];
    std::int64_t head = first / channels, end = (head + 1) * channels;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (first + j == end) ++head, end += channels;
      const float a_log = p.a_log(head);
      bias[j] = p.bias(first + j) + rest_of_log_rate(a_log, p.activation);
      rate[j] = expf(factor_log_rate(a_log));
    }
  }
};

// Returns log(1 + e) for e in [0, 1], with a relative error of at most 2⁻²¹; log1pf would take longer than the memory
// accesses. The result is 2 artanh(s) with s = e / (2 + e): s times a function of s², which is fitted on [0, 1/9].
__device__ __forceinline__ float log1p_of_unit(float e) {
  const float s = e * reciprocal_fast(2 + e), t = s * s;
  return s * (2.0F + t * (0.66666317F + t * (0.40024853F + t * (0.27961418F + t * 0.28174657F))));
}

// A decay g and its derivatives with respect to x = z + bias and to a_log.
struct GatedDecay {
  float value, by_x, by_a_log;
};

// Computes a decay from the exponential of −|x| or −|rate · x|, which cannot overflow.
template <DecayActivation kActivation>
__device__ __forceinline__ GatedDecay gated_decay(float x, float rate, float bound) {
  constexpr bool kSoftplus = kActivation == DecayActivation::softplus;
  const float y = kSoftplus ? x : rate * x, e = expf(-fabsf(y)), inverse = reciprocal_fast(1 + e);
  const float sigma = y >= 0 ? inverse : e * inverse;
  if constexpr (kSoftplus) {
    const float g = -rate * ((x > 0 ? x : 0) + log1p_of_unit(e));
    return {g, -rate * sigma, g};
  }
  const float slope = bound * rate * (e * inverse * inverse);
  return {bound * sigma, slope, slope * x};
}

template <DecayActivation kActivation, int kVector, class T>
__global__ void __launch_bounds__(kThreads, 4)
    decay_gate_forward_kernel(const __grid_constant__ DecayGateForward<T> p, int lanes, unsigned column_blocks) {
  const Place place(kVector, lanes, column_blocks);
  const std::int64_t rows = p.z.extent[0];
  if (place.column >= p.z.extent[1]) return;
  const Columns<kVector> columns(p, place.column);
  for (std::int64_t first = place.row; first < rows; first += kRows * place.step) {
    Piece<T, kVector> z_there[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int64_t row = first + i * place.step;
      if (row < rows) z_there[i] = read_piece<kVector>(p.z.at(row) + place.column);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int64_t row = first + i * place.step;
      if (row >= rows) break;
      float z[kVector];
      widen(z_there[i], z);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        z[j] = gated_decay<kActivation>(z[j] + columns.bias[j], columns.rate[j], p.bound).value;
      }
      store_piece(p.g.at(row) + place.column, z);
    }
  }
}

// Computes dz, and writes the sums over the rows of a row of blocks b to part b [HV·C] of both arrays.
template <DecayActivation kActivation, int kVector, class T>
__global__ void __launch_bounds__(kThreads, 4)
    decay_gate_backward_kernel(const __grid_constant__ DecayGateBackward<T> p, int lanes, unsigned column_blocks,
                               float* dbias_parts, float* da_log_parts) {
  __shared__ float dbias_sums[kThreads * kVector], da_log_sums[kThreads * kVector];
  const Place place(kVector, lanes, column_blocks);
  const std::int64_t rows = p.z.extent[0], all_columns = p.z.extent[1];
  float dbias[kVector] = {}, da_log[kVector] = {};
  if (place.column < all_columns) {
    const Columns<kVector> columns(p, place.column);
    for (std::int64_t first = place.row; first < rows; first += kRows * place.step) {
      Piece<T, kVector> z_there[kRows];
      Piece<float, kVector> dg_there[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const std::int64_t row = first + i * place.step;
        if (row >= rows) continue;
        z_there[i] = read_piece<kVector>(p.z.at(row) + place.column);
        dg_there[i] = read_piece<kVector>(p.dg.at(row) + place.column);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const std::int64_t row = first + i * place.step;
        if (row >= rows) break;
        float z[kVector], dg[kVector];
        widen(z_there[i], z);
        widen(dg_there[i], dg);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const GatedDecay g = gated_decay<kActivation>(z[j] + columns.bias[j], columns.rate[j], p.bound);
          z[j] = g.by_x * dg[j];
          dbias[j] += z[j];
          da_log[j] += g.by_a_log * dg[j];
        }
        store_piece(p.dz.at(row) + place.column, z);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    dbias_sums[threadIdx.x * kVector + j] = dbias[j];
    da_log_sums[threadIdx.x * kVector + j] = da_log[j];
  }
  __syncthreads();
  const int width = lanes * kVector;
  const std::int64_t begin = std::int64_t{blockIdx.x % column_blocks} * width;
  const std::int64_t part = blockIdx.x / column_blocks * all_columns;
  for (int i = threadIdx.x; i < width && begin + i < all_columns; i += kThreads) {
    float dbias_sum = 0, da_log_sum = 0;
    for (int at = i; at < kThreads * kVector; at += width) {
      dbias_sum += dbias_sums[at];
      da_log_sum += da_log_sums[at];
    }
    dbias_parts[part + begin + i] = dbias_sum;
    da_log_parts[part + begin + i] = da_log_sum;
  }
}

// Calls f<kActivation, kVector>() with the values for a problem.
template <class F>
void with_kernel(DecayActivation activation, bool pieces, F&& f) {
  const auto with_vector = [&]<DecayActivation kActivation> {
    if (pieces) return f.template operator()<kActivation, kPiece>();
    f.template operator()<kActivation, 1>();
  };
  if (activation == DecayActivation::softplus) return with_vector.template operator()<DecayActivation::softplus>();
  with_vector.template operator()<DecayActivation::sigmoid>();
}

}  // namespace

template <class T>
void decay_gate(const DecayGateForward<T>& p, cudaStream_t stream) {
  constexpr const char* kOperation = "decay_gate_forward";
  if (p.z.size() == 0) return;
  const Division division = division_of(p);
  with_kernel(p.activation, division.vector > 1, [&]<DecayActivation kActivation, int kVector> {
    decay_gate_forward_kernel<kActivation, kVector><<<division.grid(kOperation), kThreads, 0, stream>>>(
        p, division.lanes, static_cast<unsigned>(division.column_blocks));
  });
  check_launch(kOperation);
}

template <class T>
void decay_gate(const DecayGateBackward<T>& p, const Workspace& workspace, cudaStream_t stream) {
  constexpr const char* kOperation = "decay_gate_backward";
  require_workspace(kOperation, workspace, decay_gate_workspace_bytes(p));
  const std::int64_t columns = p.z.extent[1], heads = p.a_log.extent[0], channels = columns / heads;
  const std::int64_t parts = parts_of(p);
  auto* const dbias_parts = static_cast<float*>(workspace.data);
  float* const da_log_parts = dbias_parts + parts * columns;
  float* const da_log_sums = da_log_parts + parts * columns;  // [C, HV]
  if (parts > 0) {
    const Division division = division_of(p);
    with_kernel(p.activation, division.vector > 1, [&]<DecayActivation kActivation, int kVector> {
      decay_gate_backward_kernel<kActivation, kVector><<<division.grid(kOperation), kThreads, 0, stream>>>(
          p, division.lanes, static_cast<unsigned>(division.column_blocks), dbias_parts, da_log_parts);
    });
    check_launch(kOperation);
  }
  launch_add_parts(dbias_parts, parts, {p.dbias.data, {columns, 1}, {p.dbias.stride[0], 0}}, stream);
  launch_add_parts(da_log_parts, parts, {da_log_sums, {heads, channels}, {1, heads}}, stream);
  launch_add_parts(da_log_sums, channels, {p.da_log.data, {heads, 1}, {p.da_log.stride[0], 0}}, stream);
}

template <class T>
std::size_t decay_gate_workspace_bytes(const DecayGateBackward<T>& p) {
  return static_cast<std::size_t>((2 * parts_of(p) + 1) * p.z.extent[1]) * sizeof(float);
}

#define EFLA_INSTANTIATE(T)                                                              \
  template void decay_gate(const DecayGateForward<T>&, cudaStream_t);                    \
  template void decay_gate(const DecayGateBackward<T>&, const Workspace&, cudaStream_t); \
  template std::size_t decay_gate_workspace_bytes(const DecayGateBackward<T>&);
EFLA_INSTANTIATE(float)
EFLA_INSTANTIATE(bfloat16)
#undef EFLA_INSTANTIATE

}  // namespace efla::gpu
