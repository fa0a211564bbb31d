// Runs each task on one thread. Where the program distributes the work (training by examples, generating by the rows of
// a product), what a task calls must not start threads of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "efla/base/threads.h"

namespace efla::autograd {

// Keeps LibTorch, OpenMP and OpenBLAS to the calling thread; every thread that runs tasks calls it first (free from the
// second call on). LibTorch's and OpenMP's settings belong to the thread, OpenBLAS's to the process.
void compute_on_this_thread_only();

// Runs tasks 0 to count - 1, each of them on one thread alone: side by side on the pool's threads, or one after another
// where they compute on a GPU, which one task fills.
void run_tasks(ThreadPool& pool, const at::Device& device, std::int64_t count,
               const std::function<void(std::int64_t task)>& task);

// Makes OpenBLAS allocate its buffers for matrix products on `threads` threads at a time, because a later allocation
// that fails would make it wait forever. Throws std::runtime_error where memory is short. Does nothing with another
// BLAS.
void reserve_product_buffers(int threads);

}  // namespace efla::autograd
