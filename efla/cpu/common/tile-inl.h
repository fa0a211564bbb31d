// Register tiles for small matrix products, and the transfer of rows to and from scratch. Included once per target.
//
// A panel is a matrix slice kPanel columns wide, stored row after row: [rows, kPanel]. A tile is M rows of a panel held
// in registers. Every product is acc[m] += Σ_d a(m, d) · panel[d], with a(m, d) broadcast and a panel row of kVectors
// vectors.
#if defined(EFLA_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_TILE_INL_H_
#undef EFLA_CPU_TILE_INL_H_
#else
#define EFLA_CPU_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "efla/base/dtype.h"
#include "efla/cpu/common/element-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

inline constexpr std::int64_t kLanes = hn::MaxLanes(FloatTag());
inline constexpr int kVectors = 2;
inline constexpr std::int64_t kPanel = kVectors * kLanes;
// A tile has kRows × kVectors accumulators: 12 of 16 registers, or 16 of the 32 registers of AVX-512.
inline constexpr int kRows = HWY_TARGET <= HWY_AVX3 ? 8 : 6;

inline std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Calls f(0), …, f(N − 1) with the index as a compile-time constant, because a tile stays in registers only if every
// index into the tile is a constant.
template <int... I, class F>
HWY_INLINE void unroll_sequence(std::integer_sequence<int, I...>, [[maybe_unused]] F f) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
HWY_INLINE void unroll(F f) {
  unroll_sequence(std::make_integer_sequence<int, N>(), f);
}

// The attributes of a lambda passed to unroll.
#define EFLA_UNROLLED HWY_ATTR __attribute__((always_inline))

template <int M>
struct Tile {
  FloatVec acc[M][kVectors];

  HWY_INLINE void zero() {
    unroll<M>([this](auto m) EFLA_UNROLLED {
      acc[m][0] = hn::Zero(FloatTag());
      acc[m][1] = hn::Zero(FloatTag());
    });
  }

  HWY_INLINE void load(const float* HWY_RESTRICT panel) {
    unroll<M>([this, panel](auto m) EFLA_UNROLLED {
      acc[m][0] = hn::Load(FloatTag(), panel + m * kPanel);
      acc[m][1] = hn::Load(FloatTag(), panel + m * kPanel + kLanes);
    });
  }

  HWY_INLINE void store(float* HWY_RESTRICT panel, std::ptrdiff_t stride = kPanel) const {
    unroll<M>([this, panel, stride](auto m) EFLA_UNROLLED {
      hn::Store(acc[m][0], FloatTag(), panel + m * stride);
      hn::Store(acc[m][1], FloatTag(), panel + m * stride + kLanes);
    });
  }

  // acc[m] *= factors[m].
  HWY_INLINE void scale_rows(const float* HWY_RESTRICT factors) {
    unroll<M>([this, factors](auto m) EFLA_UNROLLED {
      const FloatVec factor = hn::Set(FloatTag(), factors[m]);
      acc[m][0] = hn::Mul(acc[m][0], factor);
      acc[m][1] = hn::Mul(acc[m][1], factor);
    });
  }

  // acc[m] *= factors[m·stride …], element by element.
  HWY_INLINE void multiply(const float* HWY_RESTRICT factors, std::ptrdiff_t stride) {
    unroll<M>([this, factors, stride](auto m) EFLA_UNROLLED {
      acc[m][0] = hn::Mul(acc[m][0], hn::Load(FloatTag(), factors + m * stride));
      acc[m][1] = hn::Mul(acc[m][1], hn::Load(FloatTag(), factors + m * stride + kLanes));
    });
  }

  // acc[m] += rows[m·stride …].
  HWY_INLINE void add_rows(const float* HWY_RESTRICT rows, std::ptrdiff_t stride) {
    unroll<M>([this, rows, stride](auto m) EFLA_UNROLLED {
      acc[m][0] = hn::Add(acc[m][0], hn::Load(FloatTag(), rows + m * stride));
      acc[m][1] = hn::Add(acc[m][1], hn::Load(FloatTag(), rows + m * stride + kLanes));
    });
  }

  // out[m·stride …] = acc[m] · x[m·stride …], or += with kAdd.
  template <bool kAdd>
  HWY_INLINE void store_product(const float* HWY_RESTRICT x, float* HWY_RESTRICT out, std::ptrdiff_t stride) const {
    unroll<M>([this, x, out, stride](auto m) EFLA_UNROLLED {
      for (int n = 0; n < kVectors; ++n) {
        const std::ptrdiff_t at = m * stride + n * kLanes;
        const FloatVec factor = hn::Load(FloatTag(), x + at);
        const FloatVec sum = kAdd ? hn::Load(FloatTag(), out + at) : hn::Zero(FloatTag());
        hn::Store(hn::MulAdd(acc[m][n], factor, sum), FloatTag(), out + at);
      }
    });
  }

  // acc[m] += x · (b0, b1).
  HWY_INLINE void add(int m, float x, FloatVec b0, FloatVec b1) {
    const FloatVec s = hn::Set(FloatTag(), x);
    acc[m][0] = hn::MulAdd(s, b0, acc[m][0]);
    acc[m][1] = hn::MulAdd(s, b1, acc[m][1]);
  }

  // acc[m] += Σ_{d < depth} a[m·a_row + d·a_depth] · b[d·b_row …].
  HWY_INLINE void multiply_add(const float* HWY_RESTRICT a, std::ptrdiff_t a_row, std::ptrdiff_t a_depth,
                               const float* HWY_RESTRICT b, std::ptrdiff_t b_row, std::int64_t depth) {
    for (std::int64_t i = 0; i < depth; ++i) {
      const FloatVec b0 = hn::Load(FloatTag(), b);
      const FloatVec b1 = hn::Load(FloatTag(), b + kLanes);
      unroll<M>([&](auto m) EFLA_UNROLLED { add(m, a[m * a_row], b0, b1); });
      a += a_depth;
      b += b_row;
    }
  }

  // Does the same and prefetches one address per kStepsPerPrefetch steps.
  template <class Prefetches>
  HWY_INLINE void multiply_add(const float* HWY_RESTRICT a, std::ptrdiff_t a_row, std::ptrdiff_t a_depth,
                               const float* HWY_RESTRICT b, std::ptrdiff_t b_row, std::int64_t depth,
                               Prefetches& prefetches) {
    constexpr std::int64_t kStepsPerPrefetch = 16;
    for (; depth >= kStepsPerPrefetch;
         depth -= kStepsPerPrefetch, a += kStepsPerPrefetch * a_depth, b += kStepsPerPrefetch * b_row) {
      prefetches.prefetch_next();
      multiply_add(a, a_row, a_depth, b, b_row, kStepsPerPrefetch);
    }
    multiply_add(a, a_row, a_depth, b, b_row, depth);
  }

  // acc[m] += Σ_{i ≤ m} a[m·a_row + i] · b[i·kPanel …]: the diagonal block of a lower triangular product.
  HWY_INLINE void multiply_add_lower(const float* HWY_RESTRICT a, std::ptrdiff_t a_row, const float* HWY_RESTRICT b) {
    unroll<M>([&](auto i) EFLA_UNROLLED {
      const FloatVec b0 = hn::Load(FloatTag(), b + i * kPanel);
      const FloatVec b1 = hn::Load(FloatTag(), b + i * kPanel + kLanes);
      unroll<M - i>([&](auto below) EFLA_UNROLLED { add(i + below, a[(i + below) * a_row + i], b0, b1); });
    });
  }
};

// Runs a tile of fewer than kRows rows.
template <int M, class Body>
HWY_INLINE void smaller_tile(std::int64_t rows, std::int64_t first, Body& body) {
  if constexpr (M > 0) {
    if (rows == M) {
      body.template run<M>(first);
    } else {
      smaller_tile<M - 1>(rows, first, body);
    }
  }
}

template <class Body>
HWY_INLINE void run_tile(std::int64_t rows, std::int64_t first, Body& body) {
  if (rows == kRows) {
    body.template run<kRows>(first);
  } else {
    smaller_tile<kRows - 1>(rows, first, body);
  }
}

// Returns the rows of the next tile if `left` rows are left: kRows, or two tiles of about the same height at the end,
// because a tile of one or two rows has too few sums to hide the latency of their additions.
HWY_INLINE std::int64_t next_tile(std::int64_t left) {
  if (left >= 2 * kRows || left == kRows) return kRows;
  return left > kRows ? (left + 1) / 2 : left;
}

// Calls body.template run<M>(first row) for tiles of M ≤ kRows rows that cover `rows` rows, in order.
template <class Body>
HWY_INLINE void for_tiles(std::int64_t rows, Body& body) {
  for (std::int64_t r = 0, count = 0; r < rows; r += count) {
    count = next_tile(rows - r);
    run_tile(count, r, body);
  }
}

// Does the same from the last row to the first.
template <class Body>
HWY_INLINE void for_tiles_reversed(std::int64_t rows, Body& body) {
  while (rows > 0) {
    const std::int64_t count = next_tile(rows);
    rows -= count;
    run_tile(count, rows, body);
  }
}

#if HWY_TARGET != HWY_SCALAR
// Four rows of kLanes columns, transposed in blocks of 4 × 4: block b of columns[i] is column 4 b + i of the rows.
struct TransposedBlocks {
  FloatVec columns[4];

  HWY_INLINE TransposedBlocks(const float* HWY_RESTRICT src, std::ptrdiff_t src_row) {
    const FloatTag d;
    const hn::Repartition<double, FloatTag> dd;
    const FloatVec r0 = hn::LoadU(d, src);
    const FloatVec r1 = hn::LoadU(d, src + src_row);
    const FloatVec r2 = hn::LoadU(d, src + 2 * src_row);
    const FloatVec r3 = hn::LoadU(d, src + 3 * src_row);
    const auto lo01 = hn::BitCast(dd, hn::InterleaveLower(d, r0, r1));
    const auto hi01 = hn::BitCast(dd, hn::InterleaveUpper(d, r0, r1));
    const auto lo23 = hn::BitCast(dd, hn::InterleaveLower(d, r2, r3));
    const auto hi23 = hn::BitCast(dd, hn::InterleaveUpper(d, r2, r3));
    columns[0] = hn::BitCast(d, hn::InterleaveLower(dd, lo01, lo23));
    columns[1] = hn::BitCast(d, hn::InterleaveUpper(dd, lo01, lo23));
    columns[2] = hn::BitCast(d, hn::InterleaveLower(dd, hi01, hi23));
    columns[3] = hn::BitCast(d, hn::InterleaveUpper(dd, hi01, hi23));
  }
};

// Blocks of four lanes of a and b in alternation: [a₀ b₀ a₂ b₂ …] and [a₁ b₁ a₃ b₃ …].
struct BlockPairs {
  FloatVec even, odd;

  HWY_INLINE BlockPairs(FloatVec a, FloatVec b)
      : even(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a)), odd(hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a))) {}
};
#endif

// Computes dst[c·dst_row + r] = src[r·src_row + c] for r < rows, c < cols (a multiple of kLanes). It is not inlined,
// because GCC 12 would then warn of rows that do not exist, and a call is cheap compared with the copy.
HWY_NOINLINE inline void transpose(const float* HWY_RESTRICT src, std::ptrdiff_t src_row, std::int64_t rows,
                                   std::int64_t cols, float* HWY_RESTRICT dst, std::ptrdiff_t dst_row) {
  std::int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  const FloatTag d;
  const hn::FixedTag<float, 4> d4;
  HWY_ALIGN float block[4 * kLanes];
  for (; kLanes == 16 && r + 16 <= rows; r += 16) {
    for (std::int64_t c = 0; c < cols; c += kLanes) {
      const float* from = src + r * src_row + c;
      const TransposedBlocks first(from, src_row), second(from + 4 * src_row, src_row),
          third(from + 8 * src_row, src_row), last(from + 12 * src_row, src_row);
      float* out = dst + c * dst_row + r;
      unroll<4>([&](auto i) EFLA_UNROLLED {
        const BlockPairs upper(first.columns[i], second.columns[i]), lower(third.columns[i], last.columns[i]);
        hn::StoreU(hn::ConcatLowerLower(d, lower.even, upper.even), d, out + i * dst_row);
        hn::StoreU(hn::ConcatLowerLower(d, lower.odd, upper.odd), d, out + (i + 4) * dst_row);
        hn::StoreU(hn::ConcatUpperUpper(d, lower.even, upper.even), d, out + (i + 8) * dst_row);
        hn::StoreU(hn::ConcatUpperUpper(d, lower.odd, upper.odd), d, out + (i + 12) * dst_row);
      });
    }
  }
  for (; kLanes == 8 && r + 8 <= rows; r += 8) {
    for (std::int64_t c = 0; c < cols; c += kLanes) {
      const TransposedBlocks top(src + r * src_row + c, src_row), bottom(src + (r + 4) * src_row + c, src_row);
      float* out = dst + c * dst_row + r;
      unroll<4>([&](auto i) EFLA_UNROLLED {
        const FloatVec above = top.columns[i], below = bottom.columns[i];
        hn::StoreU(hn::ConcatLowerLower(d, below, above), d, out + i * dst_row);
        hn::StoreU(hn::ConcatUpperUpper(d, below, above), d, out + (i + 4) * dst_row);
      });
    }
  }
  for (; r + 4 <= rows; r += 4) {
    for (std::int64_t c = 0; c < cols; c += kLanes) {
      const TransposedBlocks blocks(src + r * src_row + c, src_row);
      unroll<4>([&](auto i) EFLA_UNROLLED { hn::Store(blocks.columns[i], d, block + i * kLanes); });
      for (std::int64_t i = 0; i < kLanes; ++i) {
        hn::StoreU(hn::Load(d4, block + (i % 4) * kLanes + i / 4 * 4), d4, dst + (c + i) * dst_row + r);
      }
    }
  }
#endif
  for (; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) dst[c * dst_row + r] = src[r * src_row + c];
  }
}

// Reads `count` elements `stride` apart as float32, and fills with zeros up to `padded`.
template <class T>
HWY_INLINE void load_row(const T* HWY_RESTRICT src, std::int64_t stride, std::int64_t count, std::int64_t padded,
                         float* HWY_RESTRICT dst) {
  const FloatTag d;
  std::int64_t i = 0;
  if (stride == 1) {
    for (; i + kLanes <= count; i += kLanes) hn::StoreU(load(d, src + i), d, dst + i);
  }
  for (; i < count; ++i) dst[i] = to_float(src[i * stride]);
  for (; i < padded; ++i) dst[i] = 0.0F;
}

// Writes `count` float32 elements times `factor` as elements of type T, `stride` apart.
template <class T>
HWY_INLINE void store_row(const float* HWY_RESTRICT src, float factor, std::int64_t count, T* HWY_RESTRICT dst,
                          std::int64_t stride) {
  const FloatTag d;
  std::int64_t i = 0;
  if (stride == 1) {
    const FloatVec f = hn::Set(d, factor);
    for (; i + kLanes <= count; i += kLanes) store(d, hn::Mul(f, hn::LoadU(d, src + i)), dst + i);
  }
  for (; i < count; ++i) dst[i * stride] = from_state<T>(factor * src[i]);
}

// Computes y += x over a multiple of kLanes elements.
HWY_INLINE void add_rows(const float* HWY_RESTRICT x, std::int64_t count, float* HWY_RESTRICT y) {
  const FloatTag d;
  for (std::int64_t i = 0; i < count; i += kLanes) hn::Store(hn::Add(hn::Load(d, x + i), hn::Load(d, y + i)), d, y + i);
}

// Returns Σ x[i]·y[i] over a multiple of kLanes elements.
HWY_INLINE float dot(const float* HWY_RESTRICT x, const float* HWY_RESTRICT y, std::int64_t count) {
  const FloatTag d;
  FloatVec sum = hn::Zero(d);
  for (std::int64_t i = 0; i < count; i += kLanes) sum = hn::MulAdd(hn::Load(d, x + i), hn::Load(d, y + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

#if HWY_TARGET != HWY_SCALAR
// Returns the sum of the blocks of 128 bits.
template <class D>
HWY_INLINE hn::Vec<hn::Full128<float>> add_blocks(D d, hn::Vec<D> x) {
  if constexpr (hn::MaxLanes(d) == 4) {
    return x;
  } else {
    const hn::Half<D> half;
    return add_blocks(half, hn::Add(hn::LowerHalf(half, x), hn::UpperHalf(half, x)));
  }
}
#endif

// Stores the sums of the lanes of four vectors: out[n] is the sum of x[n].
HWY_INLINE void store_lane_sums(const FloatVec (&x)[4], float* out) {
#if HWY_TARGET == HWY_SCALAR
  for (int n = 0; n < 4; ++n) out[n] = hn::GetLane(x[n]);
#else
  const FloatTag d;
  const hn::Repartition<double, FloatTag> dd;
  const auto pair = [&](FloatVec a, FloatVec b) HWY_ATTR {
    return hn::BitCast(dd, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  };
  const auto a = pair(x[0], x[1]), b = pair(x[2], x[3]);
  const auto blocks =
      hn::Add(hn::BitCast(d, hn::InterleaveLower(dd, a, b)), hn::BitCast(d, hn::InterleaveUpper(dd, a, b)));
  hn::StoreU(add_blocks(d, blocks), hn::Full128<float>(), out);
#endif
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
