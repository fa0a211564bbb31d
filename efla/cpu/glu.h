// The gated linear unit's forward with SIMD.
#pragma once

#include "efla/base/threads.h"
#include "efla/rule/glu.h"

namespace efla::cpu {

// Columns are contiguous (stride 1). The same bits for any neighbours of an element and any pool.
void glu(const GluForward<float>& problem, ThreadPool& pool);

}  // namespace efla::cpu
