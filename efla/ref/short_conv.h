// The short convolution in float64, one element after the other.
#pragma once

#include "efla/rule/short_conv.h"

namespace efla::ref {

// Computes y (rule/short_conv.h) and then rounds it. T is float or bfloat16.
template <class T>
void short_conv(const ShortConvForward<T>& problem);

// Computes dx and dweight and then rounds them.
template <class T>
void short_conv(const ShortConvBackward<T>& problem);

}  // namespace efla::ref
