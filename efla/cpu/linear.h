// The product of rows with a weight matrix (docs/ops/linear.md). Decoding computes this product for a few rows and
// every weight of a model. Each weight is then read once from memory, in the type in which it is stored.
#pragma once

#include <span>

#include "efla/base/threads.h"
#include "efla/rule/linear.h"

namespace efla::cpu {

// Computes y of the problems (rule/linear.h) in one run of the pool, in any order. Computes the product alone: the
// members for a norm, SwiGLU and a residual are ignored. Columns must be contiguous (stride 1). Rounds x where the
// problem allows it and uses_bfloat16() of common/target.h is true; numbers below the smallest normal one then count as
// 0. The order of a sum depends only on D, so that a row has the same bits for any M, any neighbours, any other
// problems and any pool.
void linear(std::span<const LinearForward> problems, ThreadPool& pool);

}  // namespace efla::cpu
