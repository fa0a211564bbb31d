// The PTX instructions that CUDA C++ has no names for, one function each. Addresses in shared memory are 32 bits wide.
#pragma once

#include <cstdint>
#include <type_traits>

#include "efla/base/dtype.h"

namespace efla::gpu {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory without waiting; `bytes` (0 or 16) of them, the rest become zeros.
__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` committed groups of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8 × 8 matrices of 16-bit elements, whose rows lane i addresses; register m gets, of matrix m, the elements
// (lane / 4, 2 (lane % 4)) and the one after it in the row.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// The same of the transposed matrices.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// Stores four 8 × 8 matrices, the reverse of load_matrices (sm_90).
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

// d += a b: a [16, 16] and b [16, 8] of elements E, which is bfloat16 or float16, d [16, 8] in float32.
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

// d = a b, plus d where `add` is set: a [16, 8] and b [8, 8] in TF32, d [16, 8] in float32. The operands are float32,
// of which the tensor cores drop the bits that TF32 does not have. Element k of a's columns and b's rows is k / 2 + 4
// (k % 2), so that an accumulator of mma is an operand: a takes its four registers in the order 0, 2, 1, 3.
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

// Two float32 rounded to E, bfloat16 or float16: `low` in the lower half. Volatile, because a state converted twice is
// meant to be: kept converted it would need registers that are not there.
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
// Return the halves of a pair, widened.
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

// Returns x as a value of which the compiler knows nothing, so that what is computed from it is computed where it is
// used, instead of before a loop, where it would take registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <class T>
__device__ __forceinline__ T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns 1 where a = b, 0 elsewhere.
__device__ __forceinline__ float one_if_equal(int a, int b) {
  float y;
  asm("set.eq.f32.s32 %0, %1, %2;" : "=f"(y) : "r"(a), "r"(b));
  return y;
}

// Starts and commits a copy of `bytes` bytes, a multiple of 16, from shared to global memory.
__device__ __forceinline__ void store_bulk(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all bulk copies of this thread have read their source.
__device__ __forceinline__ void store_bulk_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until at most `kPending` bulk copies of this thread, the last ones, have not written their destination.
template <int kPending>
__device__ __forceinline__ void store_bulk_finish() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Makes writes to shared memory by this thread visible to wgmma and bulk copies.
__device__ __forceinline__ void fence_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Lets the kernel after this one begin, once all thread blocks have said so or ended (sm_90).
__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the kernels before this one have ended and their writes are visible (sm_90).
__device__ __forceinline__ void wait_for_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Orders all writes that this thread knows of before what it counts next. Waits for the stores of the multiprocessor.
__device__ __forceinline__ void fence_for_counts() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Adds to a counter.
__device__ __forceinline__ void add_count(unsigned* counter, unsigned x) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)), "r"(x) : "memory");
}
// Waits until a counter has reached `x`; what was written before is then visible, to the copy engine too.
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

// Stores to and loads from shared memory that order what the thread block's threads write before the store and read
// after the load.
__device__ __forceinline__ void store_release(int* to, int x) {
  asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(shared_address(to)), "r"(x) : "memory");
}
__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(x) : "r"(shared_address(from)) : "memory");
  return x;
}

// A barrier of `threads` threads, a multiple of 32; ids 1 to 15 (0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace efla::gpu
