// Where an operator runs: the device of its tensors, and the threads or the stream that do the work.
#pragma once

#include <cstddef>
#include <memory>

#include "efla/base/device.h"
#include "efla/base/threads.h"

struct CUstream_st;  // cudaStream_t points to one

namespace efla {

struct ExecutionContext {
  Device device = {};             // every pointer of a problem refers to memory of this device
  ThreadPool* pool = nullptr;     // for the CPU; nullptr: the process's pool (default_pool)
  CUstream_st* stream = nullptr;  // for a GPU, a cudaStream_t: kernels are enqueued there, and the call does not wait
  // For a GPU: returns memory of the device for the kernels of one call, aligned to 256 bytes. After the last copy of
  // the result is destroyed, later work of the stream may use the memory. nullptr: the CUDA runtime's own pool.
  std::shared_ptr<void> (*allocate)(std::size_t bytes, const ExecutionContext& context) = nullptr;

  // Returns the pool for the CPU.
  ThreadPool& threads() const;
};

// Returns the pool that operators use by default, with the number of threads of set_threads. If set_threads was not
// called, the pool has `threads` threads; 0: one per processor. A pool lives until the process ends. After fork the
// child gets pools of its own, so that it may compute, call set_threads and exit. The child must neither use nor
// destroy other pools of its parent, whose threads do not exist there.
ThreadPool& default_pool(int threads = 0);

// Sets the number of threads of the default pool, 1 to 1024. Throws Error.
void set_threads(int threads);

}  // namespace efla
