// The kernels that use Intel AMX. They need target.h's uses_amx(). Arithmetic and states are float32, but for
// the factors of products (amx/bf16_split-inl.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "efla/base/threads.h"
#include "efla/cpu/common/workspace.h"
#include "efla/rule/problem.h"

namespace efla::cpu {

// Whether AMX is in use and computes such shapes: those with keys of a multiple of 32 dimensions, the depth of one
// product.
bool amx_takes(const DeltaShape& shape);

// Returns how many of the rows of chunks hold a token, from 0 to 1, if all sequences have the same length. AMX computes
// all rows, other kernels those with tokens.
inline double filled_rows(const DeltaShape& shape) {
  const double tokens =
      static_cast<double>(shape.tokens) / static_cast<double>(std::max<std::int64_t>(shape.packed, 1));
  return tokens / (std::ceil(tokens / kChunk) * kChunk);
}

// The chunkwise forward of kernels.h, for shapes that amx_takes.
template <class T>
void amx_chunk_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t amx_chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// The chunkwise backward of kernels.h, for shapes that amx_takes and a scale between 1e-20 and 1e20, because gradients
// are divided by it on the way. Sequences may have any length, so that one in two pieces has the bits of the whole.
bool amx_takes_backward(const DeltaShape& shape, const DeltaRule& rule);
template <class T>
void amx_chunk_bwd(const DeltaBackward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t amx_chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

}  // namespace efla::cpu
