#include "efla/ops/gpu.h"

#include "efla/base/error.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/device.h"
#endif

namespace efla {

#ifdef EFLA_HAS_CUDA

Gpus find_gpus() {
  Gpus gpus;
  for (auto& device : gpu::find_devices(gpus.absence)) {
    gpus.found.push_back({std::move(device.name), device.memory_bytes, device.major, device.minor});
  }
  return gpus;
}

GpuMemory::GpuMemory(const Device& device, std::size_t bytes) : device_(device), bytes_(bytes) {
  const gpu::OnDevice current(device.index);
  memory_ = gpu::allocate(bytes);
}

void GpuMemory::write(const void* host) const {
  if (bytes_ == 0) return;
  const gpu::OnDevice current(device_.index);
  gpu::copy_to_device(data(), host, bytes_);
}

void GpuMemory::read(void* host) const {
  if (bytes_ == 0) return;
  const gpu::OnDevice current(device_.index);
  gpu::copy_to_host(host, data(), bytes_);
}

#else

Gpus find_gpus() { return {{}, "this build has no CUDA kernels"}; }

GpuMemory::GpuMemory(const Device& device, std::size_t) {
  throw Error("gpu", "device", name_of(device), "the CPU: this build has no CUDA kernels");
}

void GpuMemory::write(const void*) const {}
void GpuMemory::read(void*) const {}

#endif

}  // namespace efla
