// Devices, contexts and streams: where operators on LibTorch's tensors run.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>

#include "efla/ops/context.h"

namespace efla::libtorch {

// Returns the context of operators on a tensor's device: the process's thread pool, or LibTorch's current stream of the
// GPU, with memory from LibTorch's allocator. The pool has the threads of set_threads, which the program calls. Without
// that call, as in Python, it has as many threads as LibTorch's own operators (torch.set_num_threads, OMP_NUM_THREADS).
ExecutionContext context_of(const at::Tensor& tensor);

// Convert a device of the operators to LibTorch's device, and back.
at::Device torch_device(const Device& device);
Device device_of(const at::Device& device);

// Gives this thread a stream of its own on a GPU while the object lives, so that the GPU computes the work of several
// threads at the same time. Does nothing on the CPU. LibTorch's allocator keeps the memory of tensors made meanwhile
// for this stream.
class OwnStream {
 public:
  explicit OwnStream(const Device& device);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

// Makes LibTorch's operators on GPUs give the same bits in every run, in this process from now on; LibTorch warns of
// operators that cannot. Some operators, such as the gradient of an embedding, otherwise add by atomic operations, in
// any order. The first call must come before other threads start, because it sets an environment variable. Does nothing
// in a build without GPUs.
void compute_reproducibly();

// While an object lives, LibTorch's operators on GPUs give the same bits in every run or throw, where
// compute_reproducibly alone lets them warn. Softmax attention then computes its gradients without atomic operations.
// For training only, because drawing tokens has operators that would throw. Does nothing for the CPU.
class ReproducibleOnly {
 public:
  explicit ReproducibleOnly(const at::Device& device);
  ~ReproducibleOnly();
  ReproducibleOnly(const ReproducibleOnly&) = delete;
  ReproducibleOnly& operator=(const ReproducibleOnly&) = delete;

 private:
  const bool active_;
};

// Returns the greatest number of bytes that LibTorch's tensors have had at one time on a GPU; 0 in a build without
// GPUs.
std::int64_t most_bytes_allocated(const Device& device);

// Returns whether this build has kernels for LibTorch's tensors on a GPU.
bool has_gpu_kernels();

}  // namespace efla::libtorch
