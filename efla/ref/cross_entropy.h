// The cross-entropy of a softmax in float64, row by row.
#pragma once

#include "efla/rule/cross_entropy.h"

namespace efla::ref {

template <class T>
void cross_entropy(const CrossEntropy<T>& problem);

}  // namespace efla::ref
