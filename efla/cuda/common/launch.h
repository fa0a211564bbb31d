// Launches of kernels, and checks of their arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "efla/base/view.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/workspace.h"

namespace efla::gpu {

// Lets a kernel use `bytes` bytes of dynamic shared memory per thread block. Multiprocessors then prefer shared memory
// to cache for this kernel, because kernels that run at the same time on a multiprocessor need the same division of its
// memory. Throws CudaError.
template <class... Parameters>
void reserve_shared_memory(void (*kernel)(Parameters...), int bytes) {
  const auto* const function = reinterpret_cast<const void*>(kernel);
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  check(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
}

// Launches a kernel with `bytes` bytes of dynamic shared memory per thread block. Throws CudaError that names `name`.
template <class... Parameters>
void launch_kernel(const char* name, void (*kernel)(Parameters...), unsigned blocks, int threads, std::size_t bytes,
                   cudaStream_t stream, std::type_identity_t<Parameters>... arguments) {
  const auto* const function = reinterpret_cast<const void*>(kernel);
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
  void* pointers[] = {&arguments...};
  cudaLaunchKernel(function, dim3(blocks), dim3(static_cast<unsigned>(threads)), pointers, bytes, stream);
  check_launch(name);
}

// Launches a kernel for Hopper GPUs that may begin before the previous kernel in the stream has ended (programmatic
// dependent launch). Earlier kernels may then still run, back to and including the last kernel that was launched in the
// ordinary way. Before it calls wait_for_kernels (ptx.cuh), the kernel must not read or write memory that one of them
// writes. `bytes` is its dynamic shared memory. Throws CudaError that names `name`.
template <class... Parameters>
void launch_early(const char* name, void (*kernel)(Parameters...), unsigned blocks, int threads, std::size_t bytes,
                  cudaStream_t stream, Parameters... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  void* pointers[] = {&arguments...};
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers), name);
}

// Returns whether the current device is a Hopper GPU. Throws CudaError.
bool is_hopper();

// Returns the number of multiprocessors of the current device. Throws CudaError.
int multiprocessors();

// Returns whether a thread block on the current device may have `bytes` bytes of shared memory. Throws CudaError.
bool has_shared_memory(std::size_t bytes);

// Returns `blocks` as the x extent of a grid. Throws Error(operation, …) if it exceeds what CUDA allows, 2³¹ − 1.
unsigned grid_of(const char* operation, std::int64_t blocks);

// Throws Error(operation, …) unless the workspace has `needed` bytes and is aligned to 256 bytes.
void require_workspace(const char* operation, const Workspace& workspace, std::size_t needed);

// Returns whether every row of a view can be read or written in pieces of 16 bytes.
template <class T, int Rank>
bool has_aligned_rows(const View<T, Rank>& view) {
  constexpr std::int64_t kPiece = 16 / sizeof(T);
  bool aligned = view.stride[Rank - 1] == 1 && view.extent[Rank - 1] % kPiece == 0 &&
                 reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (int d = 0; d + 1 < Rank; ++d) aligned = aligned && (view.extent[d] == 1 || view.stride[d] % kPiece == 0);
  return aligned;
}

}  // namespace efla::gpu
