#include "efla/torch/context.h"

#include <ATen/Parallel.h>

#include <memory>

#ifdef EFLA_TORCH_CUDA
#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <mutex>
#endif

namespace efla::libtorch {

#ifdef EFLA_TORCH_CUDA
namespace {

// LibTorch's allocator gives freed memory only to later work of the same stream, which is the current stream here.
std::shared_ptr<void> allocate(std::size_t bytes, const ExecutionContext& context) {
  const c10::cuda::CUDAGuard device(static_cast<c10::DeviceIndex>(context.device.index));
  return {c10::cuda::CUDACachingAllocator::raw_alloc(bytes), c10::cuda::CUDACachingAllocator::raw_delete};
}

}  // namespace

struct OwnStream::Guard {
  c10::cuda::CUDAStreamGuard guard;
};

OwnStream::OwnStream(const Device& device) {
  if (device.is_cpu()) return;
  const auto index = static_cast<c10::DeviceIndex>(device.index);
  guard_.reset(new Guard{c10::cuda::CUDAStreamGuard(c10::cuda::getStreamFromPool(false, index))});
}

void compute_reproducibly() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Without this variable LibTorch warns at every matrix product. The size is LibTorch's default on Hopper.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(false);  // no operator here reads such memory
  });
}

std::int64_t most_bytes_allocated(const Device& device) {
  using c10::CachingAllocator::StatType;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device.index));
  return stats.allocated_bytes[static_cast<std::size_t>(StatType::AGGREGATE)].peak;
}

bool has_gpu_kernels() { return true; }
#else
struct OwnStream::Guard {};

OwnStream::OwnStream(const Device& /*device*/) {}

void compute_reproducibly() {}

std::int64_t most_bytes_allocated(const Device& /*device*/) { return 0; }

bool has_gpu_kernels() { return false; }
#endif

OwnStream::~OwnStream() = default;

ReproducibleOnly::ReproducibleOnly(const at::Device& device) : active_(device.is_cuda()) {
  if (active_) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
}

ReproducibleOnly::~ReproducibleOnly() {
  if (active_) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
}

at::Device torch_device(const Device& device) {
  return device.is_cpu() ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device.index));
}

Device device_of(const at::Device& device) {
  return device.is_cpu() ? Device{} : Device{Device::Kind::cuda, device.index()};
}

ExecutionContext context_of(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return {.pool = &default_pool(at::get_num_threads())};
  ExecutionContext context{.device = device_of(tensor.device())};
#ifdef EFLA_TORCH_CUDA
  context.stream = c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
  context.allocate = allocate;
#endif
  return context;
}

}  // namespace efla::libtorch
