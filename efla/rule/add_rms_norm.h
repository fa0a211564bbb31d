// The contract of the step between two branches of a residual network: the output of the previous branch is added to
// the residual stream, and the next branch reads the RMS norm (rms_norm.h) of the sum. docs/ops/add_rms_norm.md
// describes the operator.
#pragma once

#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla {

// sum = x + branch and y = sum · r · weight with r = 1/√(mean(sum²) + eps), row by row. The stream x has N rows of D
// columns in float32. Branches are in T, float or bfloat16.
template <class T>
struct AddRmsNormForward {
  View<const float, 2> x;       // [N, D]
  View<const T, 2> branch;      // [N, D], optional; absent: sum = x
  View<const float, 1> weight;  // [D]
  float eps = 1e-6F;
  View<float, 2> sum;  // [N, D], required with a branch; may be x
  View<T, 2> y;        // [N, D]
};

// The gradients of a loss whose gradients with respect to y and sum are dy and dsum; r is computed again.
//   dx = r (weight·dy − sum r² mean(weight·dy·sum)) + dsum,  dbranch = dx,  dweight = Σ_rows dy·sum·r
template <class T>
struct AddRmsNormBackward {
  View<const float, 2> sum;     // [N, D]
  View<const float, 1> weight;  // [D]
  float eps = 1e-6F;
  View<const T, 2> dy;        // [N, D]
  View<const float, 2> dsum;  // [N, D], optional; absent: zeros
  View<float, 2> dx;          // [N, D], may be dsum
  View<T, 2> dbranch;         // [N, D], optional
  View<float, 1> dweight;     // [D]
};

// Throws Error as validate of rule/validate.h does.
template <class T>
void validate(const AddRmsNormForward<T>& problem);
template <class T>
void validate(const AddRmsNormBackward<T>& problem);

}  // namespace efla
