// The cross-entropy of a softmax in float64, row by row.
#pragma once

#include "efla/rule/cross_entropy.h"

namespace efla::ref {

// Computes the losses and, with a share, the gradient (rule/cross_entropy.h), and then rounds them. T is float or
// bfloat16.
template <class T>
void cross_entropy(const CrossEntropy<T>& problem);

}  // namespace efla::ref
