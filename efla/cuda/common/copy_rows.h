// Copies of tensors whose rows the copy engine cannot read (tensor_map.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla::gpu {

// E is bfloat16 or float16.

// Returns the bytes of a contiguous copy of a view, a multiple of 256.
template <class E>
std::size_t copied_bytes(const View<const E, 4>& view);

// Copies a view, whose last extent is a multiple of 8, to contiguous memory, and returns the view of the copy.
template <class E>
View<const E, 4> copy_rows(const View<const E, 4>& view, void* to, cudaStream_t stream);

}  // namespace efla::gpu
