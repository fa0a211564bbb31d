// Copies tensors to contiguous memory, one thread per 8 elements of a row (copy_rows.h).
#include "efla/cuda/common/copy_rows.h"

#include <cstdint>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"

namespace efla::gpu {
namespace {

constexpr int kThreads = 256, kPiece = 8;

// Copies kPiece elements of a row per thread.
template <class E>
__global__ void __launch_bounds__(kThreads) copy_kernel(View<const E, 4> from, View<E, 4> to) {
  const std::int64_t pieces = from.extent[3] / kPiece;
  std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= from.size() / kPiece) return;
  const std::int64_t piece = index % pieces;
  index /= pieces;
  const std::int64_t i_h = index % from.extent[2];
  index /= from.extent[2];
  const std::int64_t t = index % from.extent[1], i_b = index / from.extent[1];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) to(i_b, t, i_h, kPiece * piece + i) = from(i_b, t, i_h, kPiece * piece + i);
}

}  // namespace

template <class E>
std::size_t copied_bytes(const View<const E, 4>& view) {
  return (static_cast<std::size_t>(view.size()) * sizeof(E) + 255) / 256 * 256;
}

template <class E>
View<const E, 4> copy_rows(const View<const E, 4>& view, void* to, cudaStream_t stream) {
  const auto copy = View<E, 4>::contiguous(static_cast<E*>(to), view.extent);
  const std::int64_t pieces = view.size() / kPiece;
  copy_kernel<<<grid_of("copy_rows", (pieces + kThreads - 1) / kThreads), kThreads, 0, stream>>>(view, copy);
  check_launch("copy_rows");
  return copy;
}

template std::size_t copied_bytes(const View<const bfloat16, 4>&);
template View<const bfloat16, 4> copy_rows(const View<const bfloat16, 4>&, void*, cudaStream_t);
template std::size_t copied_bytes(const View<const float16, 4>&);
template View<const float16, 4> copy_rows(const View<const float16, 4>&, void*, cudaStream_t);

}  // namespace efla::gpu
