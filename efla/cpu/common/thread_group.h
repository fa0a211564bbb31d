// Distributes the heads of a backward to threads if no heads are computed together (head_range.h): one head per thread,
// or one head at a time to a group of all threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "efla/base/threads.h"
#include "efla/cpu/common/workspace.h"

namespace efla::cpu {

// Returns the scratch for all threads; bytes(group_threads) is the scratch of one head that `group_threads` threads
// compute.
template <class Bytes>
std::size_t group_workspace_bytes(int threads, Bytes bytes) {
  return std::max(bytes(1) * static_cast<std::size_t>(threads), bytes(threads));
}

// Calls head(i, memory, group_threads) for every i in [0, heads), one head per thread. The last heads % threads heads
// are computed one after the other by all threads together, if this is estimated to be faster. The estimate:
// `active_threads` threads of a group have work, and each needs twice its part of a head's time.
template <class Head>
void for_each_head(std::int64_t heads, std::int64_t active_threads, Workspace workspace, ThreadPool& pool, Head head) {
  const int threads = pool.threads();
  const std::int64_t left = heads % threads, alone = 2 * left <= active_threads ? heads - left : heads;
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(threads) / kAlignment * kAlignment;
  pool.run(alone,
           [&](std::int64_t i, int worker) { head(i, workspace.data + bytes * static_cast<std::size_t>(worker), 1); });
  for (std::int64_t i = alone; i < heads; ++i) head(i, workspace.data, threads);
}

}  // namespace efla::cpu
