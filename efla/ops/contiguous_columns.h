// A reason to refuse that rows of several lists have.
#pragma once

#include <string>

#include "efla/base/view.h"

namespace efla {

template <class T, int Rank>
bool has_contiguous_columns(const View<T, Rank>& view) {
  return !view || view.extent[Rank - 1] <= 1 || view.stride[Rank - 1] == 1;
}

// Returns why a kernel refuses views of which one has columns that are apart in memory, or "".
template <class... Views>
std::string refuse_strided_columns(const Views&... views) {
  return (has_contiguous_columns(views) && ...) ? "" : "it needs the columns of a row side by side in memory";
}

}  // namespace efla
