// Root-mean-square normalisation with SIMD (docs/ops/rms_norm.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "efla/base/threads.h"
#include "efla/cpu/common/workspace.h"
#include "efla/rule/rms_norm.h"

namespace efla::cpu {

// Compute the forward and the backward of rule/rms_norm.h. Columns, weight and dweight must be contiguous (stride 1). T
// is float or bfloat16; arithmetic is in float32. Work is divided by the shape alone, so that the bits are the same for
// any pool.
template <class T>
void rms_norm(const RmsNormForward<T>& problem, ThreadPool& pool);
template <class T>
void rms_norm(const RmsNormBackward<T>& problem, Workspace workspace, ThreadPool& pool);

// Returns the bytes of workspace that a backward with dweight needs for partial sums of N rows of D columns.
std::size_t rms_norm_workspace_bytes(std::int64_t rows, std::int64_t columns);

}  // namespace efla::cpu
