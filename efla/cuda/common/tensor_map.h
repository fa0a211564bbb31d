// Descriptors (tensor maps) with which Hopper's copy engine copies between rows of a tensor [B, T, H, D] and tiles
// (tile.cuh). E is bfloat16 or float16.
#pragma once

#include <cuda.h>

#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla::gpu {

inline constexpr int kRowsPerTile = 64;  // and tokens that one copy brings

// Returns whether map_rows takes a view whose rows are contiguous and aligned to 16 bytes.
template <class E>
bool can_map_rows(const View<const E, 4>& view);

// Returns whether the copy engine can copy the rows of a view, in pieces of 16 bytes.
template <class E>
bool can_copy_rows(const View<const E, 4>& view);

// Returns the descriptor of a view [B, T, H, D]. One copy has kRowsPerTile tokens of one head, 64 elements per token.
// Elements outside of the view become zeros. Coordinates are in the order d, h, t, b. Throws CudaError where the driver
// refuses.
template <class E>
CUtensorMap map_rows(const View<const E, 4>& view);

// The descriptors of the inputs q, k and v.
struct RowMaps {
  CUtensorMap q, k, v;
};

}  // namespace efla::gpu
