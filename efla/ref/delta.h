// The operator in float64, written to be read beside the paper, not to be fast. The tests compare the fast kernels with
// these functions. Inputs of type T, which is float, bfloat16, float16 or double, are widened to float64; outputs are
// rounded at the end. Problems must be valid.
#pragma once

#include "efla/rule/problem.h"

namespace efla::ref {

// Computes the token recurrence: equation 20 of EFLA (arXiv 2512.12602); equations 5 and 11 to 13 for other steps.
// Takes every interval of saved states.
template <class T>
void recurrent_fwd(const DeltaForward<T>& problem);

// Computes the gradients of the token recurrence (docs/ops/delta_rule.md). Walks forward from the first saved state of
// each sequence, keeps the states of all tokens, and walks back over them. Takes every interval of saved states.
template <class T>
void recurrent_bwd(const DeltaBackward<T>& problem);

// Computes a decode step: one token of the recurrence. S, the type of the state, is State<T> or bfloat16.
template <class T, class S>
void step(const DeltaStep<T, S>& problem);

}  // namespace efla::ref
