#include "efla/autograd/context.h"

#include <memory>

#ifdef EFLA_TORCH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace efla::autograd {

#ifdef EFLA_TORCH_CUDA
namespace {

// The allocator gives freed memory to later work of the same stream alone, which is the current one here.
std::shared_ptr<void> allocate(std::size_t bytes, const ExecutionContext& context) {
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(context.device.index));
  const auto memory = std::make_shared<at::Tensor>(
      at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device)));
  return {memory, memory->data_ptr()};
}

}  // namespace

bool has_gpu_kernels() { return true; }
#else
bool has_gpu_kernels() { return false; }
#endif

ExecutionContext context_of(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return {};
  ExecutionContext context{.device = {Device::Kind::cuda, tensor.device().index()}};
#ifdef EFLA_TORCH_CUDA
  context.stream = c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
  context.allocate = allocate;
#endif
  return context;
}

}  // namespace efla::autograd
