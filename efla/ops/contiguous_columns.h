// A check that implementations of several operations share: columns that lie side by side in memory.
#pragma once

#include <string>

#include "efla/base/view.h"

namespace efla {

// Returns whether the last axis of a view is contiguous; true for an absent view.
template <class T, int Rank>
bool has_contiguous_columns(const View<T, Rank>& view) {
  return !view || view.extent[Rank - 1] <= 1 || view.stride[Rank - 1] == 1;
}

// Returns why a kernel refuses views if one of them has columns that are apart in memory, or "".
template <class... Views>
std::string refuse_strided_columns(const Views&... views) {
  return (has_contiguous_columns(views) && ...) ? "" : "it needs the columns of a row side by side in memory";
}

}  // namespace efla
