// The product of a few rows with a weight matrix, which decoding computes for every weight of a model. The weight is
// read once from memory. A general matrix product would first copy it into another order.
#pragma once

#include <cstdint>

#include "efla/base/threads.h"
#include "efla/base/view.h"

namespace efla::cpu {

// y[m, n] = Σ_d x[m, d] · weight[n, d]. Columns are contiguous (stride 1).
struct Linear {
  View<const float, 2> x;       // [M, D], M small
  View<const float, 2> weight;  // [N, D]
  View<float, 2> y;             // [M, N]
};

// The order of a sum depends only on D: the same bits for any M and any pool.
void linear(const Linear& problem, ThreadPool& pool);

}  // namespace efla::cpu
