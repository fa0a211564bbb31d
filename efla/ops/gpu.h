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

// Returns the GPUs of the machine.
Gpus find_gpus();

// Memory of a GPU, to and from which host memory is copied.
class GpuMemory {
 public:
  GpuMemory() = default;  // without bytes
  // Allocates the memory. Throws CudaError if the GPU has too little, and Error in a build without CUDA kernels.
  GpuMemory(const Device& device, std::size_t bytes);

  void* data() const { return memory_.get(); }

  // Copy all bytes from and to host memory, after the GPU's earlier work has ended. Throw CudaError, also for errors of
  // this earlier work.
  void write(const void* host) const;
  void read(void* host) const;

 private:
  Device device_;
  std::size_t bytes_ = 0;
  std::shared_ptr<void> memory_;
};

}  // namespace efla
