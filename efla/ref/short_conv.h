// The short convolution in float64, one element after the other.
#pragma once

#include "efla/rule/short_conv.h"

namespace efla::ref {

// Computes y and rounds it once. T is float or bfloat16.
template <class T>
void short_conv(const ShortConvForward<T>& problem);

// Computes dx and dweight and rounds them once.
template <class T>
void short_conv(const ShortConvBackward<T>& problem);

}  // namespace efla::ref
