// Numbers that the thread blocks of one kernel hand to each other through global memory, without a barrier: a place
// holds kNothing until its number has been written.
#pragma once

#include <cstdint>

namespace efla::gpu {

inline constexpr std::uint32_t kNothing = 0xffffffffU;  // a NaN that no operation returns

// Read what is there now, past the caches of a multiprocessor.
__device__ __forceinline__ float read_place(const float* from) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(__cvta_generic_to_global(from)) : "memory");
  return x;
}
__device__ __forceinline__ float4 read_places(const float* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return x;
}

__device__ __forceinline__ bool is_written(float x) { return __float_as_uint(x) != kNothing; }
__device__ __forceinline__ bool is_written(const float4& x) {
  return is_written(x.x) && is_written(x.y) && is_written(x.z) && is_written(x.w);
}

__device__ __forceinline__ void write_place(float* to, float x) {
  if (!is_written(x)) x = __uint_as_float(0x7fffffffU);  // another NaN
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "f"(x) : "memory");
}

// Reads numbers at several places, all before any is used. awaited: waits until all of them have been written.
template <int kCount>
__device__ __forceinline__ void read_places(const float* const (&from)[kCount], float (&to)[kCount], bool awaited) {
  bool complete;
  do {
    complete = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = read_place(from[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) complete = complete && is_written(to[i]);
  } while (awaited && !complete);
}

}  // namespace efla::gpu
