// Root-mean-square normalisation of rows (Zhang and Sennrich, "Root mean square layer normalization", 2019).
#pragma once

#include <cstdint>

#include "efla/base/dtype.h"
#include "efla/base/threads.h"
#include "efla/base/view.h"

namespace efla::cpu {

// y = x · r · weight with r = 1/√(mean(x²) + eps), row by row. Columns are contiguous (stride 1); y may be x.
template <class T>
struct RmsNormForward {
  View<const T, 2> x;           // [N, D]
  View<const float, 1> weight;  // [D], contiguous, optional: ones
  float eps = 1e-6F;
  View<T, 2> y;  // [N, D]
};

// The gradients of a loss; dy is its gradient with respect to y. r is computed again.
//   dx = r (weight·dy − x r² mean(weight·dy·x)),    dweight = Σ_rows dy·x·r
template <class T>
struct RmsNormBackward {
  View<const T, 2> x;           // [N, D]
  View<const float, 1> weight;  // [D], contiguous, optional: ones
  float eps = 1e-6F;
  View<const T, 2> dy;          // [N, D]
  View<T, 2> dx;                // [N, D], may be dy
  View<float, 1> dweight;       // [D], contiguous, optional
  View<float, 2> dweight_part;  // [rms_norm_parts(N), D], contiguous: workspace, present with dweight
};

// Returns the number of parts in which dweight is summed. It depends only on the number of rows.
std::int64_t rms_norm_parts(std::int64_t rows);

// T: float or bfloat16 (arithmetic in float32). The work is split by shape only: the same bits for any pool.
template <class T>
void rms_norm(const RmsNormForward<T>& problem, ThreadPool& pool);
template <class T>
void rms_norm(const RmsNormBackward<T>& problem, ThreadPool& pool);

}  // namespace efla::cpu
