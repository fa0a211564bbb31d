#include "efla/cuda/device.h"

#include "efla/cuda/common/error.h"

namespace efla::gpu {

int make_current(int device) {
  int before = 0;
  check(cudaGetDevice(&before), "cudaGetDevice");
  if (device != before) check(cudaSetDevice(device), "cudaSetDevice");
  return before;
}

void restore_current(int before) noexcept {
  int now = before;
  if (cudaGetDevice(&now) == cudaSuccess && now != before) cudaSetDevice(before);
}

std::shared_ptr<void> allocate_on_stream(std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return nullptr;
  void* memory = nullptr;
  check(cudaMallocAsync(&memory, bytes, stream), "cudaMallocAsync");
  return {memory, [stream](void* p) { cudaFreeAsync(p, stream); }};
}

std::shared_ptr<void> allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  return {memory, [](void* p) { cudaFree(p); }};
}

void copy_to_device(void* device, const void* host, std::size_t bytes) {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

void copy_to_host(void* host, const void* device, std::size_t bytes) {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

std::vector<Properties> find_devices(std::string& absence) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    absence = cudaGetErrorString(code);
    return {};
  }
  std::vector<Properties> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    devices.push_back({properties.name, properties.totalGlobalMem, properties.major, properties.minor});
  }
  if (devices.empty()) absence = "no CUDA-capable device is detected";
  return devices;
}

}  // namespace efla::gpu
