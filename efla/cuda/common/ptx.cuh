// PTX instructions that CUDA C++ has no functions for, one function each. Addresses in shared memory have 32 bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "efla/base/dtype.h"

namespace efla::gpu {

// Returns the address of an object in shared memory.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes from global to shared memory. Only `bytes` (0 or 16) of them are read, and the others
// become zeros.
__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Closes a group of copies of this thread.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending committed groups of copies of this thread are in progress.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Stores 16 bytes in global memory by one instruction. nvcc divides many assignments of vectors into stores of 4 bytes,
// of which each fills a part of the sectors that it touches.
__device__ __forceinline__ void store_at_once(void* to, const uint4& x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

// Loads four 8 × 8 matrices of 16-bit elements. Lane i gives the address `row` of row i % 8 of matrix i / 8. Register m
// gets elements (lane / 4, 2 (lane % 4)) and (lane / 4, 2 (lane % 4) + 1) of matrix m.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// Loads the transposed matrices in the same way.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// Stores four 8 × 8 matrices or the transposed of them, with the layout of load_matrices (sm_90).
__device__ __forceinline__ void store_matrices(std::uint32_t row, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t row, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// d [16, 8] += a b in float32, with a [16, 16] and b [16, 8] of elements E, which is bfloat16 or float16.
template <class E>
__device__ __forceinline__ void mma(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<E, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<E, float16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// d [16, 8] = a b, plus d if `add` is set, in float32, with a [16, 8] and b [8, 8] in TF32. The operands are float32
// numbers, and the hardware drops the bits that TF32 does not have. Element k of the common dimension is element k / 2
// + 4 (k % 2) of the instruction. So accumulators of mma, in the order 0, 2, 1, 3, are an operand a.
__device__ __forceinline__ void mma_tf32(float* d, const std::uint32_t* a, bool add, std::uint32_t b0,
                                         std::uint32_t b1) {
  const float c[4] = {add ? d[0] : 0.0F, add ? d[1] : 0.0F, add ? d[2] : 0.0F, add ? d[3] : 0.0F};
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, "
      "%12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Rounds to TF32, to nearest, ties away from zero.
__device__ __forceinline__ float round_to_tf32(float x) {
  std::uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
}

// Transposes an 8 × 8 matrix of 16-bit elements that a warp holds.
__device__ __forceinline__ std::uint32_t transpose_matrix(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Returns two numbers rounded to E, bfloat16 or float16, with `low` in the lower half. Volatile, so that the compiler
// rounds a state again where it is used twice, because there are too few registers to keep the rounded state.
template <class E>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<E, bfloat16>) {
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<E, float16>);
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}
// Return the lower and the upper half of a pair, widened to float32.
template <class E>
__device__ __forceinline__ float low_of(std::uint32_t packed) {
  if constexpr (std::is_same_v<E, bfloat16>) {
    return __uint_as_float(packed << 16);
  } else {
    static_assert(std::is_same_v<E, float16>);
    float low;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(low) : "r"(packed));
    return low;
  }
}
template <class E>
__device__ __forceinline__ float high_of(std::uint32_t packed) {
  if constexpr (std::is_same_v<E, bfloat16>) {
    return __uint_as_float(packed & 0xffff0000U);
  } else {
    static_assert(std::is_same_v<E, float16>);
    float high;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(high) : "r"(packed));
    return high;
  }
}

// Returns x as a value about which the compiler knows nothing. What is computed from it is then computed where it is
// used, and not before a loop, where it would occupy registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <class T>
__device__ __forceinline__ T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Returns 2^x, approximately; 0 for results below the normal numbers.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns 1/x, approximately; 0 for results below the normal numbers.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns 1 if a = b, otherwise 0.
__device__ __forceinline__ float one_if_equal(int a, int b) {
  float y;
  asm("set.eq.f32.s32 %0, %1, %2;" : "=f"(y) : "r"(a), "r"(b));
  return y;
}

// Starts and commits a bulk copy of `bytes` bytes, a multiple of 16, from shared to global memory (sm_90).
__device__ __forceinline__ void store_bulk(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all bulk copies of this thread have read their source.
__device__ __forceinline__ void store_bulk_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until all bulk copies of this thread but the last kPending have written their destination.
template <int kPending>
__device__ __forceinline__ void store_bulk_finish() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Makes writes of this thread to shared memory visible to the async proxy: wgmma, and bulk copies with their barriers
// (sm_90).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Lets the next kernel in the stream begin when all thread blocks have called this function or ended (sm_90).
__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the previous kernels in the stream have ended and their writes are visible (sm_90).
__device__ __forceinline__ void wait_for_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Orders all writes that this thread has seen before its next add_count. Waits for all stores of the multiprocessor.
__device__ __forceinline__ void fence_for_counts() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Adds x to a counter in global memory.
__device__ __forceinline__ void add_count(unsigned* counter, unsigned x) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)), "r"(x) : "memory");
}
// Waits until a counter has reached x. What was written before the count is then visible to this thread and to the copy
// engine.
__device__ __forceinline__ void wait_for_count(const unsigned* counter, unsigned x) {
  unsigned count;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(count)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
  } while (count < x);
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Store to and load from shared memory with release and acquire: a thread of the block that reads x sees what was
// written before the store.
__device__ __forceinline__ void store_release(int* to, int x) {
  asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(shared_address(to)), "r"(x) : "memory");
}
__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(x) : "r"(shared_address(from)) : "memory");
  return x;
}

// Waits at the named barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads, a multiple of 32.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace efla::gpu
