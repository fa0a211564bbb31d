// The gated product of an MLP with SIMD.
#pragma once

#include "efla/base/threads.h"
#include "efla/rule/gate.h"

namespace efla::cpu {

// Columns are contiguous (stride 1). The same bits for any neighbours of an element and any pool.
void gate(const GateForward& problem, ThreadPool& pool);

}  // namespace efla::cpu
