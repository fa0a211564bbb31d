// The kernels that use a processor's matrix unit, Intel AMX. Where target.h's uses_matrix_unit() is false nothing here
// may be called.
#pragma once

#include <cstddef>
#include <cstdint>

#include "efla/base/threads.h"
#include "efla/cpu/workspace.h"
#include "efla/rule/problem.h"

namespace efla::cpu {

// Whether the chunkwise forward takes its products from the matrix unit: where that is in use, for keys of a multiple
// of 32 dimensions, the depth of one product.
bool amx_takes(const DeltaShape& shape);

// chunk_fwd of such shapes (delta.h).
template <class T>
void amx_chunk_fwd(const DeltaForward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t amx_chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

// The same of the backward, which the matrix unit takes where there is no decay of channels and the scale is an
// ordinary number: gradients are divided by it on the way.
bool amx_takes_backward(const DeltaShape& shape, const DeltaRule& rule);
template <class T>
void amx_chunk_bwd(const DeltaBackward<T>& problem, Workspace workspace, ThreadPool& pool);
std::size_t amx_chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads);

}  // namespace efla::cpu
