// An attention layer's part of a decode step, and copies of keys and values to and from pages: each validates a
// problem, chooses a row of its list (implementation.h) and runs it. docs/ops/attention_step.md describes both.
#pragma once

#include "efla/ops/implementation.h"
#include "efla/rule/attention_step.h"

namespace efla {

// Computes o of rule/attention_step.h and writes the new keys and values into the pages. A text has the same bits for
// any other texts of the call. On the CPU only "ref" takes it, by name. Throws Error for a bad argument or if no
// implementation takes the problem, and CudaError for failures on a GPU.
template <class S>
Choice attention_step(const AttentionStep<S>& problem, const RunOptions& options = {});

// Copies keys and values. Throws as attention_step does.
template <class S>
Choice copy_pages(const PageCopy<S>& problem, const RunOptions& options = {});

}  // namespace efla
