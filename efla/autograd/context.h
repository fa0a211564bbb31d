// Where operators on a tensor run.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>

#include "efla/ops/context.h"

namespace efla::autograd {

// Returns the context of operators on a tensor's device: the process's threads, or the GPU's current stream of LibTorch
// with memory from LibTorch's allocator.
ExecutionContext context_of(const at::Tensor& tensor);

// The same device as LibTorch and as the operators name it.
at::Device torch_device(const Device& device);
Device device_of(const at::Device& device);

// Gives this thread a stream of its own on a GPU while the object lives, so that the work of several threads runs side
// by side there; nothing on the CPU. Tensors made meanwhile stay with the stream.
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
// those that cannot. Some, such as the gradient of an embedding of few rows, otherwise add by atomic operations, in any
// order. Sets a variable of the environment, so that the first call belongs before other threads start. Does nothing in
// a build without GPUs.
void compute_reproducibly();

// Returns the most bytes that LibTorch's tensors have had at one time on a GPU.
std::int64_t most_bytes_allocated(const Device& device);

// Whether this build has kernels for LibTorch's tensors on a GPU.
bool has_gpu_kernels();

}  // namespace efla::autograd
