// The asynchronous products of Hopper's tensor cores (wgmma).
//
// A warpgroup of 128 threads multiplies. The accumulators are in registers, in the layout of state.cuh. The first
// operand is in registers or in tiles (tile.cuh), the second in tiles. A descriptor is the 64-bit number that says
// where an operand lies in tiles and how. Operands have elements E, bfloat16 or float16. A template cannot change the
// text of an instruction, so every product defines a macro EFLA_MULTIPLY of its text, with the names of the types as
// the argument.
#pragma once

#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {

// Returns the descriptor of an operand with 64 rows per tile, in which the elements of the common dimension are
// neighbours. Adding kRowStep to a descriptor moves it by 16 elements of the common dimension.
__device__ __forceinline__ std::uint64_t row_operand(std::uint32_t tile) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{1} << 16) |
         ((tile & 0x3ffffU) >> 4);
}
inline constexpr int kRowStep = 32 >> 4;

// Returns the descriptor of an operand whose rows are the common dimension, with 64 columns per tile. Adding
// kColumnStep to a descriptor moves it by 16 rows.
__device__ __forceinline__ std::uint64_t column_operand(std::uint32_t tile) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{kTileBytes >> 4} << 16) |
         ((tile & 0x3ffffU) >> 4);
}
inline constexpr int kColumnStep = 2048 >> 4;

// Orders accesses to registers before the products that follow.
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products of this warpgroup.
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed groups of products are in progress.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The accumulators of an instruction: their names in its text, and d as their operands.
#define EFLA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define EFLA_NAMES_32 EFLA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EFLA_NAMES_64                                                                  \
  EFLA_NAMES_32                                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define EFLA_D_8(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define EFLA_D_16 EFLA_D_8(0), EFLA_D_8(8)
#define EFLA_D_32 EFLA_D_16, EFLA_D_8(16), EFLA_D_8(24)
#define EFLA_D_64 EFLA_D_32, EFLA_D_8(32), EFLA_D_8(40), EFLA_D_8(48), EFLA_D_8(56)

// Expands to EFLA_MULTIPLY with the name of type E.
#define EFLA_MULTIPLY_BY_TYPE                  \
  if constexpr (std::is_same_v<E, bfloat16>) { \
    EFLA_MULTIPLY("bf16.bf16");                \
  } else {                                     \
    static_assert(std::is_same_v<E, float16>); \
    EFLA_MULTIPLY("f16.f16");                  \
  }

// d [64, 64] = a b, plus d if `add` is set, for one step of 16 of the common dimension. `b` is the row_operand of a
// tile that holds bᵀ, or the column_operand of a tile that holds b if kTransposed is set.
template <class E, bool kTransposed>
__device__ __forceinline__ void multiply_64(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
#define EFLA_MULTIPLY(types)                                                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." types \
               " {" EFLA_NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }"                         \
               : EFLA_D_32                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),          \
                 "n"(static_cast<int>(kTransposed)))
  EFLA_MULTIPLY_BY_TYPE
#undef EFLA_MULTIPLY
}

// As multiply_64, with 32 columns.
template <class E, bool kTransposed>
__device__ __forceinline__ void multiply_32(float (&d)[16], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
#define EFLA_MULTIPLY(types)                                                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." types \
               " {" EFLA_NAMES_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22; }"                         \
               : EFLA_D_16                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),          \
                 "n"(static_cast<int>(kTransposed)))
  EFLA_MULTIPLY_BY_TYPE
#undef EFLA_MULTIPLY
}

// As multiply_64, with the first operand in tiles too: the row_operand of a tile that holds a, or the column_operand of
// a tile that holds aᵀ if kTransposedA is set.
template <class E, bool kTransposedA = false, bool kTransposed = false>
__device__ __forceinline__ void multiply_tiles(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add) {
#define EFLA_MULTIPLY(types)                                                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." types \
               " {" EFLA_NAMES_32 "}, %32, %33, p, 1, 1, %35, %36; }"                                     \
               : EFLA_D_32                                                                                \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kTransposedA)),         \
                 "n"(static_cast<int>(kTransposed)))
  EFLA_MULTIPLY_BY_TYPE
#undef EFLA_MULTIPLY
}

// As multiply_64, with 128 columns in two tiles.
template <class E, bool kTransposed>
__device__ __forceinline__ void multiply_128(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
#define EFLA_MULTIPLY(types)                                                                               \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." types \
               " {" EFLA_NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70; }"                          \
               : EFLA_D_64                                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),           \
                 "n"(static_cast<int>(kTransposed)))
  EFLA_MULTIPLY_BY_TYPE
#undef EFLA_MULTIPLY
}

// As multiply_tiles, with 128 columns in two tiles.
template <class E, bool kTransposedA = false, bool kTransposed = false>
__device__ __forceinline__ void multiply_tiles(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add) {
#define EFLA_MULTIPLY(types)                                                                               \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." types \
               " {" EFLA_NAMES_64 "}, %64, %65, p, 1, 1, %67, %68; }"                                      \
               : EFLA_D_64                                                                                 \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kTransposedA)),          \
                 "n"(static_cast<int>(kTransposed)))
  EFLA_MULTIPLY_BY_TYPE
#undef EFLA_MULTIPLY
}

#undef EFLA_MULTIPLY_BY_TYPE
#undef EFLA_D_64
#undef EFLA_D_32
#undef EFLA_D_16
#undef EFLA_D_8
#undef EFLA_NAMES_64
#undef EFLA_NAMES_32
#undef EFLA_NAMES_16

// d = Sᵀ bᵀ, with the transposed state as operands s, and b the 64 rows of `tiles`.
template <class E, int kTiles>
__device__ __forceinline__ void multiply_state(float (&d)[32], const std::uint32_t (&s)[4 * kTiles][4],
                                               std::uint32_t tiles) {
  const std::uint64_t operand = row_operand(tiles);
#pragma unroll
  for (int step = 0; step < 4 * kTiles; ++step) {
    multiply_64<E, false>(d, s[step], operand + step / 4 * (kTileBytes >> 4) + step % 4 * kRowStep, step > 0);
  }
}

// d = a bᵀ, plus d if `add` is set, with b [64, 64].
template <class E>
__device__ __forceinline__ void multiply_chunk(float (&d)[32], const std::uint32_t (&a)[4][4], const unsigned char* b,
                                               bool add) {
  const std::uint64_t operand = row_operand(shared_address(b));
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_64<E, false>(d, a[step], operand + step * kRowStep, add || step > 0);
}

// d += a bᵀ, with b 32 rows of a 64 × 64 matrix.
template <class E>
__device__ __forceinline__ void multiply_half_chunk(float (&d)[16], const std::uint32_t (&a)[4][4],
                                                    const unsigned char* b) {
  const std::uint64_t operand = row_operand(shared_address(b));
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_32<E, false>(d, a[step], operand + step * kRowStep, true);
}

// d = a b, with b [64, 64].
template <class E>
__device__ __forceinline__ void multiply_chunk_rows(float (&d)[32], const std::uint32_t (&a)[4][4],
                                                    const unsigned char* b) {
  const std::uint64_t operand = column_operand(shared_address(b));
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_64<E, true>(d, a[step], operand + step * kColumnStep, step > 0);
}

// s += a b, with b the 64 rows of `tiles`.
template <class E, int kTiles>
__device__ __forceinline__ void update_state(float (&s)[32 * kTiles], const std::uint32_t (&a)[4][4],
                                             std::uint32_t tiles) {
  const std::uint64_t b = column_operand(tiles);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if constexpr (kTiles == 2) {
      multiply_128<E, true>(s, a[step], b + step * kColumnStep, true);
    } else {
      multiply_64<E, true>(s, a[step], b + step * kColumnStep, true);
    }
  }
}

// Gives every element a register without a defined value and without an instruction. Products have accumulators as
// operands that are read and written, even if `add` is not set.
template <int kCount>
__device__ __forceinline__ void leave_undefined(float (&d)[kCount]) {
#pragma unroll
  for (float& x : d) asm volatile("" : "=f"(x));
}

// Set the registers per thread of this warpgroup to kCount: take_registers to more than before, give_registers to
// fewer.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace efla::gpu
