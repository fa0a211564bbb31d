// Register tiles for the two products of attention: a few rows, of queries or of weights, by a matrix whose rows lie in
// memory as float32 or bfloat16. Included once per target.
#if defined(EFLA_CPU_ROW_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_ROW_TILE_INL_H_
#undef EFLA_CPU_ROW_TILE_INL_H_
#else
#define EFLA_CPU_ROW_TILE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "efla/cpu/common/tile-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Rows of a tile at most, and vectors of columns of a slice, which a tile computes together if it has registers for
// them, otherwise in two halves.
inline constexpr int kTileRows = 6;
inline constexpr int kSliceVectors = 4;
inline constexpr std::int64_t kSlice = kSliceVectors * kLanes;
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
inline constexpr int kRegisters = 16;
#else
inline constexpr int kRegisters = 32;
#endif
template <int M>
inline constexpr int kTileVectors = (M + 1) * kSliceVectors + 1 <= kRegisters ? kSliceVectors : kSliceVectors / 2;

// A matrix that is read next. Tiles prefetch as many bytes of it as they read of their own matrix, so that memory is
// read while they compute.
struct Ahead {
  const std::byte* at = nullptr;
  const std::byte* end = nullptr;

  Ahead() = default;
  template <class B>
  Ahead(const B* from, std::int64_t count)
      : at(reinterpret_cast<const std::byte*>(from)),
        end(from ? at + count * static_cast<std::int64_t>(sizeof(B)) : at) {}

  template <std::size_t kBytes>
  HWY_INLINE void prefetch() {
    constexpr std::size_t kLine = 64;
    if (at >= end) return;
    for (std::size_t i = 0; i < kBytes; i += kLine) hwy::Prefetch(at + i);
    at += std::max(kBytes, kLine);
  }
};

// M rows of N vectors of sums. Every sum adds its products one after the other, in the order of the depth, so that its
// bits do not depend on M and N.
template <int M, int N>
struct RowTile {
  FloatVec sum[M][N];

  HWY_INLINE void zero() {
    unroll<M>([&](auto m)
                  EFLA_UNROLLED { unroll<N>([&](auto n) EFLA_UNROLLED { sum[m][n] = hn::Zero(FloatTag()); }); });
  }

  HWY_INLINE void load(const float* HWY_RESTRICT from, std::ptrdiff_t stride) {
    unroll<M>([&](auto m) EFLA_UNROLLED {
      unroll<N>([&](auto n) EFLA_UNROLLED { sum[m][n] = hn::Load(FloatTag(), from + m * stride + n * kLanes); });
    });
  }

  HWY_INLINE void store(float* HWY_RESTRICT to, std::ptrdiff_t stride) const {
    unroll<M>([&](auto m) EFLA_UNROLLED {
      unroll<N>([&](auto n) EFLA_UNROLLED { hn::Store(sum[m][n], FloatTag(), to + m * stride + n * kLanes); });
    });
  }

  // sum[m] *= factors[m].
  HWY_INLINE void scale(const float* HWY_RESTRICT factors) {
    unroll<M>([&](auto m) EFLA_UNROLLED {
      const FloatVec factor = hn::Set(FloatTag(), factors[m]);
      unroll<N>([&](auto n) EFLA_UNROLLED { sum[m][n] = hn::Mul(sum[m][n], factor); });
    });
  }

  // sum[m] += Σ_{i < depth} a[m·a_row + i] · b[i·b_row …].
  template <class B>
  HWY_INLINE void multiply_add(const float* HWY_RESTRICT a, std::ptrdiff_t a_row, const B* HWY_RESTRICT b,
                               std::ptrdiff_t b_row, std::int64_t depth, Ahead& ahead) {
    for (std::int64_t i = 0; i < depth; ++i, b += b_row) {
      ahead.template prefetch<N * kLanes * sizeof(B)>();
      FloatVec v[N];
      load_vectors(b, v);
      unroll<M>([&](auto m) EFLA_UNROLLED {
        const FloatVec factor = hn::Set(FloatTag(), a[m * a_row + i]);
        unroll<N>([&](auto n) EFLA_UNROLLED { sum[m][n] = hn::MulAdd(factor, v[n], sum[m][n]); });
      });
    }
  }

  // Does the same for i in [begin, depths[m]) of each row.
  template <class B>
  HWY_INLINE void multiply_add_rest(const float* HWY_RESTRICT a, std::ptrdiff_t a_row, const B* HWY_RESTRICT b,
                                    std::ptrdiff_t b_row, std::int64_t begin, const std::int32_t* HWY_RESTRICT depths) {
    for (std::int64_t i = begin; i < depths[M - 1]; ++i) {
      FloatVec v[N];
      load_vectors(b + i * b_row, v);
      unroll<M>([&](auto m) EFLA_UNROLLED {
        if (i >= depths[m]) return;
        const FloatVec factor = hn::Set(FloatTag(), a[m * a_row + i]);
        unroll<N>([&](auto n) EFLA_UNROLLED { sum[m][n] = hn::MulAdd(factor, v[n], sum[m][n]); });
      });
    }
  }

 private:
  template <class B>
  static HWY_INLINE void load_vectors(const B* HWY_RESTRICT b, FloatVec (&v)[N]) {
    unroll<N>([&](auto n) EFLA_UNROLLED { v[n] = cpu::HWY_NAMESPACE::load(FloatTag(), b + n * kLanes); });
  }
};

// Calls body.template run<M>(first) for tiles of M ≤ kTileRows rows that cover rows [begin, end), in order.
template <int M, class Body>
HWY_INLINE void run_row_tile(std::int64_t rows, std::int64_t first, const Body& body) {
  if constexpr (M > 0) {
    if (rows == M) {
      body.template run<M>(first);
    } else {
      run_row_tile<M - 1>(rows, first, body);
    }
  }
}
template <class Body>
HWY_INLINE void for_row_tiles(std::int64_t begin, std::int64_t end, const Body& body) {
  for (std::int64_t first = begin, rows = 0; first < end; first += rows) {
    const std::int64_t left = end - first;
    // Two tiles of about the same height at the end, because the sums of one or two rows wait for one another.
    rows = left >= 2 * kTileRows || left <= kTileRows ? std::min<std::int64_t>(left, kTileRows) : (left + 1) / 2;
    run_row_tile<kTileRows>(rows, first, body);
  }
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
