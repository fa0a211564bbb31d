// Adds the parts of sums in a fixed order (partial_sums.h). One thread block of 32 × 32 threads computes 32 sums:
// thread row r adds parts r, r + 32, and so on; then one row of threads adds the 32 results in their order.
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/partial_sums.h"

namespace efla::gpu {
namespace {

constexpr int kColumns = 32, kRows = 32;

__global__ void __launch_bounds__(kColumns* kRows)
    add_parts_kernel(const float* parts, std::int64_t count, const __grid_constant__ View<float, 2> sum) {
  __shared__ float rows[kRows][kColumns];
  const std::int64_t size = sum.extent[0] * sum.extent[1];
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  float own = 0;
  if (i < size) {
#pragma unroll 4
    for (std::int64_t part = threadIdx.y; part < count; part += kRows) own += parts[part * size + i];
  }
  rows[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y != 0 || i >= size) return;
  float all = 0;
  for (int r = 0; r < kRows; ++r) all += rows[r][threadIdx.x];
  sum(i / sum.extent[1], i % sum.extent[1]) = all;
}

}  // namespace

void launch_add_parts(const float* parts, std::int64_t count, const View<float, 2>& sum, cudaStream_t stream) {
  const unsigned grid = grid_of("add_parts", (sum.size() + kColumns - 1) / kColumns);
  if (grid == 0) return;
  add_parts_kernel<<<grid, dim3(kColumns, kRows), 0, stream>>>(parts, count, sum);
  check_launch("add_parts");
}

}  // namespace efla::gpu
