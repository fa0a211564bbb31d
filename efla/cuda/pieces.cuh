// Reading and writing rows of elements in pieces of kVector elements, widened to float32.
#pragma once

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

template <class T, int kVector>
__device__ __forceinline__ void load_piece(const T* from, float (&to)[kVector]) {
  const auto piece = *reinterpret_cast<const Piece<T, kVector>*>(from);
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i] = to_float(piece.element[i]);
}

template <class T, int kVector>
__device__ __forceinline__ void store_piece(T* to, const float (&from)[kVector]) {
  Piece<T, kVector> piece;
#pragma unroll
  for (int i = 0; i < kVector; ++i) piece.element[i] = from_state<T>(from[i]);
  *reinterpret_cast<Piece<T, kVector>*>(to) = piece;
}

}  // namespace efla::gpu
