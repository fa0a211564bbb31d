// The product of a few rows with a weight matrix, which decoding computes for every weight of a model. The weight is
// read once from memory. A general matrix product would first copy it into another order.
#pragma once

#include "efla/base/threads.h"
#include "efla/rule/linear.h"

namespace efla::cpu {

// Computes a few rows of x. Columns are contiguous (stride 1). The order of a sum depends only on D: the same bits for
// any M and any pool.
void linear(const LinearForward& problem, ThreadPool& pool);

}  // namespace efla::cpu
