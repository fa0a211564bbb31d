// Reading and writing rows of elements in pieces of kVector elements, widened to float32.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "efla/base/dtype.h"

namespace efla::gpu {

// Elements of a piece of 16 bytes.
template <class T>
inline constexpr int kPieceElements = 16 / sizeof(T);

// kVector elements that are read or written together, 16 bytes at a time.
template <class T, int kVector>
struct alignas(sizeof(T) * kVector < 16 ? sizeof(T) * kVector : 16) Piece {
  T element[kVector];
};

template <int kVector, class T>
__device__ __forceinline__ Piece<T, kVector> read_piece(const T* from) {
  return *reinterpret_cast<const Piece<T, kVector>*>(from);
}

template <class T, int kVector>
__device__ __forceinline__ void widen(const Piece<T, kVector>& piece, float (&to)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i] = to_float(piece.element[i]);
}

template <class T, int kVector>
__device__ __forceinline__ void load_piece(const T* from, float (&to)[kVector]) {
  widen(read_piece<kVector>(from), to);
}

template <class T, int kVector>
__device__ __forceinline__ void store_piece(T* to, const float (&from)[kVector]) {
  Piece<T, kVector> piece;
  if constexpr (std::is_same_v<T, bfloat16> && kVector % 2 == 0) {  // two at once
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(from[i], from[i + 1]);
      piece.element[i].bits = __bfloat16_as_ushort(pair.x);
      piece.element[i + 1].bits = __bfloat16_as_ushort(pair.y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) piece.element[i] = from_state<T>(from[i]);
  }
  *reinterpret_cast<Piece<T, kVector>*>(to) = piece;
}

}  // namespace efla::gpu
