// What the launches of kernels share.
#pragma once

#include <cstdint>

#include "efla/base/view.h"
#include "efla/cuda/delta.h"

namespace efla::gpu {

// Returns `blocks` as the x extent of a grid; throws Error(operation, …) where it exceeds what CUDA allows, 2³¹ − 1.
unsigned grid_of(const char* operation, std::int64_t blocks);

// Throws Error(operation, …) where the key dim exceeds kMaxKeyDim.
void require_key_dim(const char* operation, std::int64_t key_dim);

// Throws Error(operation, …) unless the workspace has `needed` bytes, aligned to 256.
void require_workspace(const char* operation, const Workspace& workspace, std::size_t needed);

// Whether every row of a view can be read or written in pieces of 16 bytes.
template <class T, int Rank>
bool has_aligned_rows(const View<T, Rank>& view) {
  constexpr std::int64_t kPiece = 16 / sizeof(T);
  bool aligned = view.stride[Rank - 1] == 1 && view.extent[Rank - 1] % kPiece == 0 &&
                 reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (int d = 0; d + 1 < Rank; ++d) aligned = aligned && (view.extent[d] == 1 || view.stride[d] % kPiece == 0);
  return aligned;
}

}  // namespace efla::gpu
