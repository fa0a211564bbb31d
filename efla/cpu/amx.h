// The kernels that use a processor's matrix unit, Intel AMX. Where target.h's uses_matrix_unit() is false nothing here
// may be called.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "efla/base/threads.h"
#include "efla/cpu/workspace.h"
#include "efla/rule/problem.h"

namespace efla::cpu {

// Whether the chunkwise forward takes its products from the matrix unit: where that is in use, for keys of a multiple
// of 32 dimensions, the depth of one product.
bool amx_takes(const DeltaShape& shape);

// How many of the rows of chunks hold a token, from 0 to 1, if all sequences are of the same length. The matrix unit
// computes all rows, other kernels those with tokens.
inline double filled_rows(const DeltaShape& shape) {
  const double tokens =
      static_cast<double>(shape.tokens) / static_cast<double>(std::max<std::int64_t>(shape.packed, 1));
  return tokens / (std::ceil(tokens / kChunk) * kChunk);
}

// chunk_fwd of such shapes (delta.h).
template <class T>
void amx_chunk_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t amx_chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// The same of the backward, which the matrix unit takes where the scale is an ordinary number: gradients are divided by
// it on the way. Of any length, so that a sequence in two parts has the bits of the whole.
bool amx_takes_backward(const DeltaShape& shape, const DeltaRule& rule);
template <class T>
void amx_chunk_bwd(const DeltaBackward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t amx_chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

}  // namespace efla::cpu
