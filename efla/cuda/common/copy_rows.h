// Copies of tensors whose rows the copy engine cannot read (tensor_map.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla::gpu {

// Returns the bytes of a contiguous copy of a view, a multiple of 256.
std::size_t copied_bytes(const View<const bfloat16, 4>& view);

// Copies a view, whose last extent is a multiple of 8, to contiguous memory, and returns the view of the copy.
View<const bfloat16, 4> copy_rows(const View<const bfloat16, 4>& view, void* to, cudaStream_t stream);

}  // namespace efla::gpu
