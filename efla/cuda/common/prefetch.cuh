// Prefetching to the L2 cache.
#pragma once

namespace efla::gpu {

// Prefetches the cache line at `from` to the L2 cache, without waiting.
__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// Prefetches `bytes` bytes, a multiple of 16, to the L2 cache, without waiting (sm_90).
__device__ __forceinline__ void prefetch_bulk(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes));
}

}  // namespace efla::gpu
