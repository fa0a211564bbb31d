// The operator in float64, written to be read beside the paper and never to be fast: the fast kernels are tested
// against it. Elements of T are widened to float64 on the way in and rounded once on the way out.
#pragma once

#include "efla/rule/problem.h"

namespace efla::ref {

// The token recurrence: EFLA paper, equation 20 (and 5, 11 to 13 with the other step sizes).
template <class T>
void recurrent_fwd(const DeltaForward<T>& problem);

// Its gradients, by walking the tokens back over the stored states. Of a sequence's chunk states only the first is
// read.
template <class T>
void recurrent_bwd(const DeltaBackward<T>& problem);

// The chunkwise form with W, U and T written out: equations 21 to 32. chunk ≥ 1 tokens at a time. For rules without
// decay, as the paper's.
template <class T>
void chunk_fwd(const DeltaForward<T>& problem, std::int64_t chunk);

// The decode step: one token of the recurrence.
template <class T, class S>
void step(const DeltaStep<T, S>& problem);

}  // namespace efla::ref
