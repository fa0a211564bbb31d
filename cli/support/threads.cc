#include "cli/support/threads.h"

#include <malloc.h>

#include "efla/ops/delta.h"
#include "efla/torch/one_thread.h"

namespace efla::cli {

ThreadPool& use_threads(int threads, const Device& device) {
  if (device.is_cpu()) {
    // A step allocates and frees the same tensors of a few MB over and over. By default glibc returns them to the
    // system each time, and the system clears their pages again. With a GPU there are no such tensors, and runs side by
    // side would wait for the one arena.
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
  }
  set_threads(threads == 0 ? available_processors() : threads);
  ThreadPool& pool = default_pool();
  libtorch::reserve_product_buffers(pool.threads());
  return pool;
}

}  // namespace efla::cli
