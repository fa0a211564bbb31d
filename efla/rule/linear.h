// The contract of a linear layer without bias.
#pragma once

#include "efla/base/view.h"

namespace efla {

// y[m, n] = Σ_d x[m, d] · weight[n, d].
struct LinearForward {
  View<const float, 2> x;       // [M, D]
  View<const float, 2> weight;  // [N, D]
  View<float, 2> y;             // [M, N]
};

// Throws Error as validate of rule/validate.h does.
void validate(const LinearForward& problem);

}  // namespace efla
