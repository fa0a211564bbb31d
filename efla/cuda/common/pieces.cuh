// Reads and writes kVector elements of a row at once, widened to float32.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "efla/base/dtype.h"
#include "efla/cuda/common/ptx.cuh"

namespace efla::gpu {

// The number of elements of a piece of 16 bytes.
template <class T>
inline constexpr int kPieceElements = 16 / sizeof(T);

// kVector elements that are read or written together, 16 bytes at a time. Elements of 16 bits are held in pairs,
// because registers have 32 bits.
template <class T, int kVector>
struct alignas(sizeof(T) * kVector < 16 ? sizeof(T) * kVector : 16) Piece {
  static constexpr bool kPairs = sizeof(T) == 2 && kVector % 2 == 0;
  std::conditional_t<kPairs, std::uint32_t, T> part[kPairs ? kVector / 2 : kVector];
};

// Returns the piece at an aligned address.
template <int kVector, class T>
__device__ __forceinline__ Piece<T, kVector> read_piece(const T* from) {
  return *reinterpret_cast<const Piece<T, kVector>*>(from);
}

// Converts a piece to float32.
template <class T, int kVector>
__device__ __forceinline__ void widen(const Piece<T, kVector>& piece, float (&to)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if constexpr (Piece<T, kVector>::kPairs) {
      const std::uint32_t pair = piece.part[i / 2];
      to[i] = i % 2 == 0 ? low_of<T>(pair) : high_of<T>(pair);
    } else {
      to[i] = to_float(piece.part[i]);
    }
  }
}

// Reads a piece and converts it to float32.
template <class T, int kVector>
__device__ __forceinline__ void load_piece(const T* from, float (&to)[kVector]) {
  widen(read_piece<kVector>(from), to);
}

// Rounds float32 numbers to T and writes them as a piece.
template <class T, int kVector>
__device__ __forceinline__ void store_piece(T* to, const float (&from)[kVector]) {
  Piece<T, kVector> piece;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if constexpr (!Piece<T, kVector>::kPairs) {
      piece.part[i] = from_state<T>(from[i]);
    } else if constexpr (std::is_same_v<T, float16>) {
      if (i % 2 == 0) piece.part[i / 2] = pack<T>(from[i], from[i + 1]);
    } else if (i % 2 == 0) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(from[i], from[i + 1]);
      piece.part[i / 2] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  }
  *reinterpret_cast<Piece<T, kVector>*>(to) = piece;
}

}  // namespace efla::gpu
