// GPUs and their memory, for callers without a framework that manages GPUs and memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace efla::gpu {

// Makes a GPU the current one of the calling thread and returns the previous one. Throws CudaError.
int make_current(int device);

// Makes `before`, which make_current returned, the current GPU again.
void restore_current(int before) noexcept;

// Makes a GPU the current one of the calling thread during the lifetime of the object.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(make_current(device)) {}
  ~OnDevice() { restore_current(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_;
};

// Returns `bytes` bytes of the current device from the runtime's pool, aligned to 256 bytes, for work on the stream.
// When the last pointer is released, the memory is free for later work on the stream. Throws CudaError.
std::shared_ptr<void> allocate_on_stream(std::size_t bytes, cudaStream_t stream);

// Returns `bytes` bytes of the current device. Throws CudaError.
std::shared_ptr<void> allocate(std::size_t bytes);

// Copy `bytes` bytes between host and device, and wait for the copy and for all earlier work. Throw CudaError.
void copy_to_device(void* device, const void* host, std::size_t bytes);
void copy_to_host(void* host, const void* device, std::size_t bytes);

// What a GPU is.
struct Properties {
  std::string name;
  std::size_t memory_bytes = 0;
  int major = 0, minor = 0;  // compute capability
};

// Returns the GPUs in the order of their indices. If there are none, `absence` becomes the runtime's reason.
std::vector<Properties> find_devices(std::string& absence);

}  // namespace efla::gpu
