// The forward of gated linear units with SIMD (docs/ops/glu.md).
#pragma once

#include "efla/base/threads.h"
#include "efla/rule/glu.h"

namespace efla::cpu {

// Computes y = act(gate) · up (rule/glu.h). Columns must be contiguous (stride 1). An element has the same bits for any
// neighbours and any pool.
void glu(const GluForward<float>& problem, ThreadPool& pool);

}  // namespace efla::cpu
