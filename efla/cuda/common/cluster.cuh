// Clusters of thread blocks, which read and write each other's shared memory (sm_90).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/ptx.cuh"

namespace efla::gpu {

// Launches a kernel as launch_early of launch.h does. Every `cluster` thread blocks are a cluster.
template <class... Parameters>
void launch_clusters_early(const char* name, void (*kernel)(Parameters...), unsigned blocks, unsigned cluster,
                           int threads, std::size_t bytes, cudaStream_t stream, Parameters... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  void* pointers[] = {&arguments...};
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers), name);
}

// A barrier of all threads of a cluster: writes to shared memory before `arrive` are visible after `wait`.
__device__ __forceinline__ void arrive_at_cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void wait_at_cluster_barrier() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Return what is at the place that `from` has in the shared memory of a thread block of the cluster, or zeros unless
// `exists`.
__device__ __forceinline__ float load_from_cluster(const float* from, int rank, bool exists) {
  float x = 0;
  asm volatile(
      "{ .reg .b32 address; .reg .pred p; setp.ne.b32 p, %3, 0; mapa.shared::cluster.u32 address, %1, %2; "
      "@p ld.shared::cluster.f32 %0, [address]; }"
      : "+f"(x)
      : "r"(shared_address(from)), "r"(rank), "r"(static_cast<int>(exists))
      : "memory");
  return x;
}

__device__ __forceinline__ float4 load_4_from_cluster(const float* from, int rank, bool exists) {
  float4 x{0, 0, 0, 0};
  asm volatile(
      "{ .reg .b32 address; .reg .pred p; setp.ne.b32 p, %6, 0; mapa.shared::cluster.u32 address, %4, %5; "
      "@p ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [address]; }"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "r"(shared_address(from)), "r"(rank), "r"(static_cast<int>(exists))
      : "memory");
  return x;
}

}  // namespace efla::gpu
