// An attention layer's part of a decode step in float64, and copies of keys and values to and from pages.
#pragma once

#include "efla/rule/attention_step.h"

namespace efla::ref {

// Computes o of rule/attention_step.h, rounded once, and writes the new keys and values. S is float or bfloat16.
template <class S>
void attention_step(const AttentionStep<S>& problem);

template <class S>
void copy_pages(const PageCopy<S>& problem);

}  // namespace efla::ref
