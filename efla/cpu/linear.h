// The product of rows with a weight matrix. Decoding computes it for a few rows and every weight of a model: each
// weight is then read once from memory, in the type in which it is stored.
#pragma once

#include <span>

#include "efla/base/threads.h"
#include "efla/rule/linear.h"

namespace efla::cpu {

// Computes the problems in one run of the pool, in any order. Columns are contiguous (stride 1). The order of a sum
// depends only on D: the same bits for any M, any neighbours of a row, any other problems, and any pool.
void linear(std::span<const LinearForward> problems, ThreadPool& pool);

}  // namespace efla::cpu
