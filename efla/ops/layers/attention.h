// Softmax attention over pages: validates a problem, chooses a row of the operation's list (implementation.h) and runs
// it. docs/ops/attention.md describes the operation.
#pragma once

#include "efla/ops/implementation.h"
#include "efla/rule/attention.h"

namespace efla {

// Writes the new keys and values into the pages and computes o of rule/attention.h. S, the type in which keys and
// values are stored, is float or bfloat16. A row of o has the same bits for any other rows of the call, any cuts of its
// text into calls, whether its token came with a prompt, alone or in a draft, any page size and any number of threads.
// Throws Error for a bad argument or if no implementation takes the problem.
template <class S>
Choice attention_forward(const AttentionForward<S>& problem, const RunOptions& options = {});

}  // namespace efla
