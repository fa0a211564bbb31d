// The last step of sums over rows: adds parts that thread blocks have written, in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "efla/base/view.h"

namespace efla::gpu {

// Computes sum[i, j] = Σ_p parts[p, i · extent[1] + j] with parts [count, sum.size()]. Without parts the sums are
// zeros. Throws CudaError where the launch fails.
void launch_add_parts(const float* parts, std::int64_t count, const View<float, 2>& sum, cudaStream_t stream);

}  // namespace efla::gpu
