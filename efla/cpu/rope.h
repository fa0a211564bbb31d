// Rotary position embeddings on the CPU (docs/ops/rope.md).
#pragma once

#include "efla/base/threads.h"
#include "efla/rule/rope.h"

namespace efla::cpu {

// Computes y (rule/rope.h): angles, sines and cosines in float64, rotations in float32. The bits of a token do not
// depend on the other tokens or on the pool.
void rope(const RopeForward& problem, ThreadPool& pool);

}  // namespace efla::cpu
