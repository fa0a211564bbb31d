// What the launches of kernels share.
#pragma once

#include <cstdint>

namespace efla::gpu {

// Returns `blocks` as the x extent of a grid; throws Error(operation, …) where it exceeds what CUDA allows, 2³¹ − 1.
unsigned grid_of(const char* operation, std::int64_t blocks);

// Throws Error(operation, …) where the key dim exceeds kMaxKeyDim.
void require_key_dim(const char* operation, std::int64_t key_dim);

}  // namespace efla::gpu
