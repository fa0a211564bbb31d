// How the heads of a backward are shared out where none are taken together (heads_parts.h): one a thread, or one after
// the other to all threads.
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

// Calls head(i, memory, team) for every i in [0, heads), heads one a thread. Those left over when all threads have had
// as many are computed by all threads, one head after the other, where that keeps more of them at work: `busy` threads
// of a team have work, and it is reckoned at half the speed of threads with heads of their own.
template <class Head>
void for_each_head(std::int64_t heads, std::int64_t busy, Workspace workspace, ThreadPool& pool, Head head) {
  const int threads = pool.threads();
  const std::int64_t left = heads % threads, alone = 2 * left <= busy ? heads - left : heads;
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(threads) / kAlignment * kAlignment;
  pool.run(alone,
           [&](std::int64_t i, int worker) { head(i, workspace.data + bytes * static_cast<std::size_t>(worker), 1); });
  for (std::int64_t i = alone; i < heads; ++i) head(i, workspace.data, threads);
}

}  // namespace efla::cpu
