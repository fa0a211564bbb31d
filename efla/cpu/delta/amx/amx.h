// The kernels of the chunk algorithm that use Intel AMX. They may be called only if uses_amx() of target.h is true.
// Arithmetic and states are float32, except the factors of products, which are sums of bfloat16 numbers
// (amx/bf16_split-inl.h). docs/design/2026-11-amx.md explains the design, docs/numerics.md the precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "efla/base/threads.h"
#include "efla/cpu/common/workspace.h"
#include "efla/rule/problem.h"

namespace efla::cpu {

// Returns whether AMX is in use and takes the shape: K must be a multiple of 32, the depth of one product.
bool amx_takes(const DeltaShape& shape);

// Returns the fraction of the rows of chunks that hold a token, as if all sequences had the same length. AMX computes
// all rows, other kernels only the rows with tokens.
inline double filled_rows(const DeltaShape& shape) {
  const double tokens =
      static_cast<double>(shape.tokens) / static_cast<double>(std::max<std::int64_t>(shape.packed, 1));
  return tokens / (std::ceil(tokens / kChunk) * kChunk);
}

// The chunkwise forward of kernels.h, for shapes that amx_takes.
template <class T>
void amx_chunk_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t amx_chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// The chunkwise backward of kernels.h, for shapes that amx_takes and a scale of size 1e-20 to 1e20, because the kernel
// divides gradients by the scale and multiplies the results by it. Sequences may have any length, because otherwise a
// sequence in two parts would not have the bits of the whole (docs/numerics.md).
bool amx_takes_backward(const DeltaShape& shape, const DeltaRule& rule);
template <class T>
void amx_chunk_bwd(const DeltaBackward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t amx_chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

}  // namespace efla::cpu
