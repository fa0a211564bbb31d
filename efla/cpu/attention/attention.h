// Softmax attention over pages with SIMD (docs/ops/attention.md). Google Highway selects the target at run time.
#pragma once

#include <cstddef>

#include "efla/base/threads.h"
#include "efla/cpu/attention/plan.h"
#include "efla/cpu/common/workspace.h"
#include "efla/rule/attention.h"

namespace efla::cpu {

// Writes the new keys and values into the pages and computes o (rule/attention.h), in float32. S is float or bfloat16.
// Stores the scores of a block of kAttentionBlock keys and the rows of one task only, never T × T scores.
//
// The bits of a row of o depend on its query, and on the keys and values of its text up to its token, and on nothing
// else: not on the other rows and runs of the call, how the text was cut into calls, whether a token came with a
// prompt, alone or as part of a draft, the page size, or the number of threads.
template <class S>
void attention(const AttentionForward<S>& problem, const AttentionPlan& plan, Workspace workspace, ThreadPool& pool);
std::size_t attention_workspace_bytes(const AttentionShape& shape, const AttentionPlan& plan, int threads);

}  // namespace efla::cpu
