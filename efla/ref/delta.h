// The operator in float64, written to be read beside the paper, never to be fast. The fast kernels are tested against
// it. Inputs of type T are widened to float64, outputs are rounded once.
#pragma once

#include "efla/rule/problem.h"

namespace efla::ref {

// Computes the token recurrence: equation 20 of EFLA (arXiv 2512.12602); equations 5 and 11 to 13 for other steps.
template <class T>
void recurrent_fwd(const DeltaForward<T>& problem);

// Computes the gradients of the token recurrence by walking back over the stored states of all tokens. Reads only the
// first saved state of each sequence. Both functions take every interval.
template <class T>
void recurrent_bwd(const DeltaBackward<T>& problem);

// Computes the chunk algorithm with W, U and T written out: equations 21 to 32 of EFLA. Takes chunk ≥ 1 tokens at a
// time. Supports rules without decay only, like the paper.
template <class T>
void chunk_fwd(const DeltaForward<T>& problem, std::int64_t chunk);

// Computes a decode step: one token of the recurrence.
template <class T, class S>
void step(const DeltaStep<T, S>& problem);

}  // namespace efla::ref
