// Runs each task on one thread. If the program itself distributes work (training by examples, generation by the rows of
// a product), the libraries that a task calls must not start threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "efla/base/threads.h"

namespace efla::libtorch {

// Keeps LibTorch, OpenMP and OpenBLAS to the calling thread; every thread that runs tasks must call this function
// first; later calls do nothing. The settings of LibTorch and OpenMP belong to the thread, the setting of OpenBLAS to
// the process.
void compute_on_this_thread_only();

// Runs tasks 0 to count - 1, each of them on one thread alone: at the same time on the pool's threads, or on a GPU one
// after the other, because one task fills a GPU.
void run_tasks(ThreadPool& pool, const at::Device& device, std::int64_t count,
               const std::function<void(std::int64_t task)>& task);

// Makes OpenBLAS allocate its buffers for matrix products on `threads` threads at a time, because OpenBLAS waits
// forever if a later allocation fails. Throws std::runtime_error if memory is short. Does nothing with another BLAS.
void reserve_product_buffers(int threads);

}  // namespace efla::libtorch
