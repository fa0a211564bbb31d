// A linear layer in float64, one element after the other.
#pragma once

#include "efla/rule/linear.h"

namespace efla::ref {

// Computes y (rule/linear.h) and rounds it once.
void linear(const LinearForward& problem);

}  // namespace efla::ref
