// How the heads of a backward are shared out. Heads are computed one a thread as long as there is one for each; those
// that are left over, by all threads together, head after head.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "efla/base/threads.h"
#include "efla/cpu/workspace.h"

namespace efla::cpu {

// bytes(team) is the scratch of one head computed by so many threads.
template <class Bytes>
std::size_t team_workspace_bytes(int threads, Bytes bytes) {
  return std::max(bytes(1) * static_cast<std::size_t>(threads), bytes(threads));
}

// Calls head(i, memory, team) for every i in [0, heads).
template <class Head>
void for_each_head(std::int64_t heads, Workspace workspace, ThreadPool& pool, Head head) {
  const int threads = pool.threads();
  const std::int64_t alone = heads / threads * threads;
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(threads) / kAlignment * kAlignment;
  pool.run(alone,
           [&](std::int64_t i, int worker) { head(i, workspace.data + bytes * static_cast<std::size_t>(worker), 1); });
  for (std::int64_t i = alone; i < heads; ++i) head(i, workspace.data, threads);
}

}  // namespace efla::cpu
