// Copies of tensors whose rows the copy engine cannot read (tensor_map.h). E is bfloat16 or float16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla::gpu {

// Returns the bytes of a contiguous copy of a view, a multiple of 256.
template <class E>
std::size_t copied_bytes(const View<const E, 4>& view);

// Copies a view, whose last extent is a multiple of 8, to contiguous memory at `to`, which has copied_bytes, and
// returns the view of the copy. Throws CudaError where the launch fails.
template <class E>
View<const E, 4> copy_rows(const View<const E, 4>& view, void* to, cudaStream_t stream);

}  // namespace efla::gpu
