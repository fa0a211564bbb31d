// Softmax attention over pages in float64, one row after the other.
#pragma once

#include "efla/rule/attention.h"

namespace efla::ref {

// Writes the new keys and values into the pages, and computes o (rule/attention.h) and rounds it once. S is float or
// bfloat16.
template <class S>
void attention(const AttentionForward<S>& problem);

}  // namespace efla::ref
