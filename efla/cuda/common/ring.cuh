// Barriers in shared memory, the copies whose bytes they count, and rings of stages (sm_90).
//
// The arrivals of a barrier complete its phases, one after another, and a wait names the parity of the phase. Ring and
// StageBarriers compute the parity from the number of an item, so that no kernel does.
#pragma once

#include <cstdint>

#include "efla/cuda/common/ptx.cuh"

namespace efla::gpu {

// Initialises a barrier in shared memory that `count` arrivals complete.
__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives at a barrier, whose phase then also waits for `bytes` bytes of copies.
__device__ __forceinline__ void barrier_expect(std::uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Start copies to shared memory whose bytes `barrier` counts: load_bulk of `bytes` bytes, a multiple of 16; load_tile
// of 64 columns of 64 tokens of a head, from `column` and token t on, to a tile (tensor_map.h).
__device__ __forceinline__ void load_bulk(void* to, const void* from, int bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void load_tile(void* to, const void* map, int column, int i_h, int t, int i_b,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(i_h), "r"(t), "r"(i_b), "r"(shared_address(barrier))
      : "memory");
}
// Starts and commits the copy of a tile to memory, with the waits of store_bulk. Elements outside of the tensor are not
// written.
__device__ __forceinline__ void store_tile(const void* map, const void* from, int column, int i_h, int t, int i_b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(column), "r"(i_h), "r"(t), "r"(i_b), "r"(shared_address(from))
      : "memory");
}
// Waits until the phase of the barrier with this parity has completed.
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "waiting_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra waiting_%=; }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// One barrier per stage. Items are numbered from 0, and item i has stage i % kStages.
template <int kStages>
struct StageBarriers {
  std::uint64_t at[kStages];

  // Initialises the barriers. `count` arrivals complete an item.
  __device__ __forceinline__ void init(int count) {
    for (std::uint64_t& barrier : at) barrier_init(&barrier, count);
  }
  // Returns the barrier of item i.
  __device__ __forceinline__ std::uint64_t* of(auto i) { return &at[i % kStages]; }
  // Arrives for item i.
  __device__ __forceinline__ void arrive(auto i) { barrier_arrive(of(i)); }
  // Waits until item i is complete.
  __device__ __forceinline__ void wait(auto i) { barrier_wait(of(i), parity(i)); }
  // Waits until the item before item i in the same stage is complete. There is none for the first kStages items.
  __device__ __forceinline__ void wait_previous(auto i) { barrier_wait(of(i), parity(i) ^ 1U); }
  // Returns the parity of the phase that completes item i.
  __device__ __forceinline__ static unsigned parity(auto i) { return static_cast<unsigned>(i / kStages) & 1U; }
};

// The barriers of kStages stages in shared memory, which some threads fill and others read, item by item.
template <int kStages>
struct Ring {
  StageBarriers<kStages> full, free;

  // Initialises the barriers: an item is full after `fills` arrivals, and its stage is free after `releases` arrivals.
  __device__ __forceinline__ void init(int fills, int releases) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full.of(i), fills);
      barrier_init(free.of(i), releases);
    }
  }
  // For threads that fill: waits until the stage of item i is free.
  __device__ __forceinline__ void wait_free(auto i) { free.wait_previous(i); }
  // For a thread that fills by copies: waits until the stage of item i is free, and returns the barrier that counts the
  // `bytes` bytes of the copies that the thread then starts.
  __device__ __forceinline__ std::uint64_t* start(auto i, int bytes) {
    wait_free(i);
    barrier_expect(full.of(i), bytes);
    return full.of(i);
  }
  // For threads that read: waits until item i is full; says that this thread has read item i.
  __device__ __forceinline__ void wait_full(auto i) { full.wait(i); }
  __device__ __forceinline__ void release(auto i) { free.arrive(i); }
};

}  // namespace efla::gpu
