// Descriptors with which Hopper's copy engine reads rows of a tensor into tiles (tile.cuh).
#pragma once

#include <cuda.h>

#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla::gpu {

// E is bfloat16 or float16.

// Whether map_rows takes a view whose rows are contiguous and aligned to 16 bytes.
template <class E>
bool can_map_rows(const View<const E, 4>& view);

// Whether the copy engine can copy whole rows of a view, in pieces of 16 bytes.
template <class E>
bool can_copy_rows(const View<const E, 4>& view);

// Returns the descriptor of a view [B, T, H, D], of which a copy takes 64 tokens of one head and 64 elements of each;
// elements outside of the view become zeros. Coordinates in the order d, h, t, b.
template <class E>
CUtensorMap map_rows(const View<const E, 4>& view);

struct RowMaps {
  CUtensorMap q, k, v;
};

}  // namespace efla::gpu
