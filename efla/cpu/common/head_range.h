// Distributes heads to threads: a task has neighbouring heads of a sequence, and in a forward, if there are few heads,
// a slice of their value columns. docs/design/2026-11-recurrent-forward.md says why heads are computed together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "efla/base/threads.h"
#include "efla/cpu/common/workspace.h"
#include "efla/rule/problem.h"

namespace efla::cpu {

// A part of the problem that one thread computes: of sequence n, the value heads (in a backward the query heads) [head,
// head_end) and the value panels [panel, panel_end).
struct HeadRange {
  std::int64_t n, head, head_end, panel, panel_end;
};

// Returns the number of neighbouring heads of a sequence per task. Rows of neighbouring heads lie beside each other in
// memory, so that a kernel that computes these heads together, chunk by chunk, looks up the pages of a chunk once for
// all of them. The number is at most four, and never so large that a thread gets more work than with single heads.
inline std::int64_t heads_per_block(const DeltaShape& shape, int threads) {
  const std::int64_t sequences = shape.sequences(), heads = shape.value_heads;
  const auto rounds = [&](std::int64_t groups) { return (sequences * groups + threads - 1) / threads; };
  const std::int64_t most = std::min({sequences * heads / (2 * threads), heads, std::int64_t{4}});
  for (std::int64_t together = most; together > 1; --together) {
    const std::int64_t groups = (heads + together - 1) / together;
    const std::int64_t largest = (heads + groups - 1) / groups;
    if (rounds(groups) * largest <= rounds(heads)) return largest;
  }
  return 1;
}

// Returns `shape` with one value head per query head.
inline DeltaShape query_heads_alone(DeltaShape shape) {
  shape.value_heads = shape.heads;
  return shape;
}

// Calls compute(range, memory) for every range, with the calling thread's part of the workspace. The value columns are
// `panels` panels.
template <class Compute>
void for_each_head_range(const DeltaShape& shape, std::int64_t panels, Workspace workspace, ThreadPool& pool,
                         const Compute& compute) {
  const std::int64_t value_heads = shape.value_heads, heads = shape.sequences() * value_heads;
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(pool.threads());
  // If there are too few heads to keep the threads evenly busy, each head is cut into slices of value panels. Every
  // slice loads the tokens again.
  const std::int64_t wanted =
      pool.threads() == 1 || heads >= 4 * pool.threads() ? 1 : (2 * pool.threads() + heads - 1) / heads;
  const std::int64_t slices = std::min(panels, wanted);
  const std::int64_t together = heads_per_block(shape, pool.threads());
  const std::int64_t groups = (value_heads + together - 1) / together;
  pool.run(shape.sequences() * groups * slices, [&](std::int64_t task, int worker) {
    const std::int64_t group = task / slices % groups, i = task % slices;
    const HeadRange range{task / slices / groups, value_heads * group / groups, value_heads * (group + 1) / groups,
                          panels * i / slices, panels * (i + 1) / slices};
    compute(range, workspace.data + bytes * static_cast<std::size_t>(worker));
  });
}

}  // namespace efla::cpu
