// GPUs and their memory, for programs that use the operators without LibTorch. A build without CUDA kernels has no GPUs
// and says so.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "efla/base/device.h"

namespace efla {

struct Gpu {
  std::string name;
  std::size_t memory_bytes = 0;
  int major = 0, minor = 0;  // compute capability
};

struct Gpus {
  std::vector<Gpu> found;  // by index
  std::string absence;     // why there are none, or ""
};

Gpus find_gpus();

// Bytes in a GPU's memory, which host memory is copied to and from.
class GpuMemory {
 public:
  GpuMemory() = default;  // without bytes
  // Throws CudaError where the GPU does not have the memory.
  GpuMemory(const Device& device, std::size_t bytes);

  void* data() const { return memory_.get(); }

  // Copy all bytes, after the GPU's work so far has ended. Throw CudaError, also for errors of that work.
  void write(const void* host) const;
  void read(void* host) const;

 private:
  Device device_;
  std::size_t bytes_ = 0;
  std::shared_ptr<void> memory_;
};

}  // namespace efla
