// Products of float32 matrices by mma.sync in TF32. Each operand is the sum of two TF32 numbers: its value rounded
// (big) and the rest (small). A product of two operands is the sum of three of the four products of these numbers,
// without small times small. The tensor cores round sums towards zero. So every sum over eight elements starts at zero
// there, and an ordinary addition adds it to the other sums.
//
// A warp holds matrices as accumulators of mma: 16 rows and 8 columns per group of four elements of a lane. Elements 0
// and 1 are row lane / 4, columns 2 (lane % 4) and 2 (lane % 4) + 1. Elements 2 and 3 are these columns of row lane / 4
// + 8.
//
// In loops `lane` is a value about which the compiler knows nothing (opaque). Addresses are then computed where they
// are used, and not before the loop, where they would occupy registers.
#pragma once

#include "efla/cuda/common/accumulators.cuh"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/float32/tile.cuh"

namespace efla::gpu {

// A number as the sum of two TF32 numbers. The hardware drops the bits of `small` that TF32 does not have.
struct Split {
  std::uint32_t big, small;
};

__device__ __forceinline__ Split split(float x) {
  const std::uint32_t big = (__float_as_uint(x) + 0x1000U) & 0xffffe000U;
  return {big, __float_as_uint(x - __uint_as_float(big))};
}

// A matrix of 16 rows and 8 columns as the first operand of mma_tf32.
struct Operand {
  std::uint32_t big[4], small[4];
};

// Converts accumulators to an operand.
__device__ __forceinline__ Operand operand_of(const float* x) {
  Operand operand;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Split parts = split(x[i % 2 * 2 + i / 2]);
    operand.big[i] = parts.big;
    operand.small[i] = parts.small;
  }
  return operand;
}

// d [16, 8] += a b, with b0 and b1 the elements (2 (lane % 4), lane / 4) and (2 (lane % 4) + 1, lane / 4) of b [8, 8].
__device__ __forceinline__ void multiply(float* d, const Operand& a, float b0, float b1) {
  const Split first = split(b0), second = split(b1);
  float sum[4];
  mma_tf32(sum, a.small, false, first.big, second.big);
  mma_tf32(sum, a.big, true, first.small, second.small);
  mma_tf32(sum, a.big, true, first.big, second.big);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] += sum[i];
}

// d [16, 8] += a bᵀ, with b rows [row, row + 8) and columns [column, column + 8) of a tile.
template <int kColumns>
__device__ __forceinline__ void multiply_rows(float* d, const Operand& a, std::uint32_t tile, int row, int column,
                                              int lane) {
  const float2 b = read_shared_pair(element_address<kColumns>(tile, row + lane / 4, column + 2 * (lane % 4)));
  multiply(d, a, b.x, b.y);
}

// d [16, 8] += a b, with b as in multiply_rows.
template <int kColumns>
__device__ __forceinline__ void multiply_columns(float* d, const Operand& a, std::uint32_t tile, int row, int column,
                                                 int lane) {
  const int at = row + 2 * (lane % 4), own = column + lane / 4;
  const float first = read_shared(element_address<kColumns>(tile, at, own)),
              second = read_shared(element_address<kColumns>(tile, at + 1, own));
  multiply(d, a, first, second);
}

// Reads rows [row, row + 16) and columns [column, column + 8) of a tile as an operand.
template <int kColumns>
__device__ __forceinline__ Operand row_operand(std::uint32_t tile, int row, int column, int lane) {
  const int at = row + lane / 4, own = column + 2 * (lane % 4);
  const float2 low = read_shared_pair(element_address<kColumns>(tile, at, own)),
               high = read_shared_pair(element_address<kColumns>(tile, at + 8, own));
  const float x[4] = {low.x, low.y, high.x, high.y};
  return operand_of(x);
}

// Reads the transposed of rows [row, row + 8) and columns [column, column + 16) of a tile as an operand.
template <int kColumns>
__device__ __forceinline__ Operand column_operand(std::uint32_t tile, int row, int column, int lane) {
  const int at = row + 2 * (lane % 4), own = column + lane / 4;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = read_shared(element_address<kColumns>(tile, at + i % 2, own + i / 2 * 8));
  return operand_of(x);
}

// Multiplies column j of x by factors[j], which is in shared memory. Addresses are computed here.
template <int kCount>
__device__ __forceinline__ void scale_by_column(float (&x)[kCount], const float* factors, int lane) {
  scale_columns(x, factors, opaque(lane) & 31);
}

}  // namespace efla::gpu
