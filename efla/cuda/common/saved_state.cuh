// The view of one of the states that a forward saves for its backward.
#pragma once

#include <cstdint>

#include "efla/base/view.h"

namespace efla::gpu {

// Returns the view [1, HV, K, V] of state `index` of a batch entry. `saved` is chunk_states of the problem.
template <class T>
__device__ __forceinline__ View<T, 4> saved_state(const View<T, 5>& saved, std::int64_t i_b, std::int64_t index) {
  return {saved.at(i_b, index),
          {1, saved.extent[2], saved.extent[3], saved.extent[4]},
          {0, saved.stride[2], saved.stride[3], saved.stride[4]}};
}

}  // namespace efla::gpu
