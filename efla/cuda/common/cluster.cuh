// Clusters of thread blocks: launches, barriers, and copies to the shared memory of another block (sm_90).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/ptx.cuh"

namespace efla::gpu {

// Launches a kernel as launch_early of launch.h does, with `cluster` consecutive thread blocks per cluster. Throws
// CudaError.
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

// A barrier of all threads of a cluster, in two steps. It does not order writes before the arrival, because a fence
// would wait for all writes of a thread to global memory.
__device__ __forceinline__ void arrive_at_cluster_barrier() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void wait_at_cluster_barrier() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Makes a barrier that this thread has initialised (barrier_init in ring.cuh) visible to the cluster. The cluster's
// barrier must follow.
__device__ __forceinline__ void announce_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Starts a copy of `bytes` bytes, a multiple of 16, to the shared memory of thread block `rank` of the cluster, to the
// place that `to` has in this block. The barrier at the place of `arrived` in that block counts the bytes. barrier_wait
// (ring.cuh) suffices there, although it acquires for one block only: an acquire for the cluster would also invalidate
// the L1 cache, which shared memory does not use.
__device__ __forceinline__ void send_to_block(void* to, const void* from, int bytes, std::uint64_t* arrived, int rank) {
  asm volatile(
      "{ .reg .b32 place, barrier; mapa.shared::cluster.u32 place, %0, %4; mapa.shared::cluster.u32 barrier, %3, %4; "
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [place], [%1], %2, [barrier]; }" ::"r"(
          shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(arrived)), "r"(rank)
      : "memory");
}

}  // namespace efla::gpu
