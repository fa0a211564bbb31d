// Products of rows of x with rows of a weight, on vector units. A tile, a few rows of x by a few rows of the weight,
// keeps one vector of partial sums per output in registers while it goes through the columns. Products of bfloat16 with
// bfloat16 add the products of two neighbouring columns to each partial sum (VDPBF16PS). Included once per target.
#if defined(EFLA_CPU_LINEAR_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_LINEAR_TILES_INL_H_
#undef EFLA_CPU_LINEAR_TILES_INL_H_
#else
#define EFLA_CPU_LINEAR_TILES_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "efla/cpu/common/element-inl.h"
#include "efla/cpu/linear_block.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// The greatest number of vectors of sums that a tile keeps in registers. With scales each sum needs two vectors. If
// these are too many, the totals are kept in memory.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
inline constexpr int kSumRegisters = 24;
#else
inline constexpr int kSumRegisters = 16;
#endif

// A tile of kTileRows rows of x and three rows of the weight needs the fewest loads per product.
template <bool kScaled>
inline constexpr int kTileRows = kSumRegisters >= 24 && !kScaled ? 8 : 4;

// A row of the weight. at() returns a vector of the row, without the scale of its block.
template <class W>
struct WeightRow {
  const W* data = nullptr;
  const float* scales = nullptr;  // one per kScaleBlock columns, or none

  template <class D>
  HWY_INLINE hn::Vec<D> at(D d, std::size_t c) const {
    if constexpr (std::is_same_v<W, std::int8_t>) {
      const hn::Rebind<std::int8_t, D> d8;
      const hn::Rebind<std::int32_t, D> d32;
      return hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, data + c)));
    } else {
      return load(d, data + c);
    }
  }
};

// Returns a vector of a row of x or of the weight: of floats, or of pairs of bfloat16 numbers.
template <bool kPairs, class D, class T>
HWY_INLINE hn::Vec<D> vector_of(D d, const T* row, std::size_t c) {
  if constexpr (kPairs) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row + c));
  } else {
    return load(d, row + c);
  }
}
template <bool kPairs, class D, class W>
HWY_INLINE hn::Vec<D> vector_of(D d, const WeightRow<W>& row, std::size_t c) {
  if constexpr (kPairs) {
    return vector_of<kPairs>(d, row.data, c);
  } else {
    return row.at(d, c);
  }
}

// Returns sum + w · x, in every lane the products of two numbers with kPairs. The compilers' own function for pairs is
// not available in a function for AVX-512 alone.
template <bool kPairs, class V>
HWY_INLINE V add_product(V w, V x, V sum) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if constexpr (kPairs) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(w.raw), "v"(x.raw));
    return sum;
  }
#endif
  return hn::MulAdd(w, x, sum);
}

// Prefetches the columns of a block in the row that begins `bytes` bytes after this row: every kParts-th cache line.
template <int kPart, int kParts, class W>
HWY_INLINE void prefetch(const WeightRow<W>& row, std::size_t block, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  const auto* from = reinterpret_cast<const char*>(row.data + block) + bytes;
  for (std::size_t i = kPart * kLine; i < kScaleBlock * sizeof(W); i += kParts * kLine) hwy::Prefetch(from + i);
}

#if HWY_TARGET != HWY_SCALAR
// Returns, in every group of 2·kSpan lanes, the sums of the group's halves: of a in the first kSpan lanes, of b in the
// others.
template <std::size_t kSpan, class D, class V = hn::Vec<D>>
HWY_INLINE V add_halves(D d, V a, V b) {
  if constexpr (kSpan == 1) {
    return hn::Add(hn::OddEven(b, a), hn::Shuffle2301(hn::OddEven(a, b)));
  } else if constexpr (kSpan == 2) {
    const hn::RepartitionToWide<D> pairs;
    const auto outer = hn::BitCast(d, hn::OddEven(hn::BitCast(pairs, b), hn::BitCast(pairs, a)));
    return hn::Add(outer, hn::CombineShiftRightBytes<2 * sizeof(float)>(d, b, a));
  } else if constexpr (2 * kSpan < hn::MaxLanes(d)) {
    return hn::Add(hn::OddEvenBlocks(b, a), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b)));
  } else {
    return hn::Add(hn::ConcatUpperLower(d, b, a), hn::ConcatLowerUpper(d, b, a));
  }
}
#endif

// Returns the sums of the lanes of the vectors at(0) to at(kCount − 1), one per lane, which takes fewer additions than
// one sum after another. A sum adds the halves of its vector, then the halves of the result, and so on. With kSpan > 1
// the result has kSpan lanes of each of at(kFirst), at(kFirst + kSpan), …, which are still to be added.
template <std::size_t kCount, std::size_t kSpan = 1, std::size_t kFirst = 0, class D, class F>
HWY_INLINE hn::Vec<D> sums_of_lanes(D d, const F& at) {
  if constexpr (kSpan == hn::MaxLanes(d)) {
    return at(kFirst);
  } else {
    const auto a = sums_of_lanes<kCount, 2 * kSpan, kFirst>(d, at);
    auto b = a;
    if constexpr (kFirst + kSpan < kCount) b = sums_of_lanes<kCount, 2 * kSpan, kFirst + kSpan>(d, at);
    return add_halves<kSpan>(d, a, b);
  }
}

// Stores the sums of the lanes of kCount vectors. `to` has room for whole vectors.
template <std::size_t kCount, std::size_t kFirst = 0, class D, class F>
HWY_INLINE void store_sums(D d, const F& at, float* to) {
  constexpr std::size_t kLanes = hn::MaxLanes(d), kNext = kFirst + kLanes;
  hn::Store(sums_of_lanes<std::min(kCount, kNext), 1, kFirst>(d, at), d, to + kFirst);
  if constexpr (kNext < kCount) store_sums<kCount, kNext>(d, at, to);
}

// The columns that a tile goes through. The sums over the columns before them are in `kept`, and the tile leaves its
// own sums there unless `last`.
struct ColumnPart {
  std::size_t begin, end;
  bool last;
  float* kept;
};

// Computes M rows of x with N rows of the weight, and prefetches the rows of the weight that begin `ahead` bytes later;
// 0: none. Each output has one vector of partial sums, whatever M and N are. The columns that fill no vector are added
// at the end. With scales the partial sums of a block are multiplied by the scale of the block. This is tile kPart of
// kParts tiles with the same rows of the weight, which share the prefetches, because a core can wait for only a few
// cache lines at once.
template <int M, int N, bool kScaled, int kPart, int kParts, class X, class W>
HWY_INLINE void tile(const LinearRows<X>& p, const WeightRow<W>* weight, std::size_t ahead, std::int64_t m,
                     std::int64_t n, const ColumnPart& part) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  using Vec = hn::Vec<decltype(d)>;
  constexpr bool kPairs = std::is_same_v<X, bfloat16>;
  constexpr std::size_t kLanes = hn::MaxLanes(d);
  const std::size_t size = part.end, lanes = hn::Lanes(d), step = kPairs ? 2 * lanes : lanes;
  const X* x[M];
  // With scales `sum` is the sum over one block. The sum over the blocks so far is in `total`, or in `stored` if
  // registers have no room.
  constexpr bool kInMemory = kScaled && 2 * M * N > kSumRegisters;
  HWY_ALIGN float stored[kInMemory ? M * N * hn::MaxLanes(d) : 1] = {};
  Vec sum[M][N], total[M][N];
  for (int i = 0; i < M; ++i) {
    x[i] = p.x.at(m + i);
    for (int j = 0; j < N; ++j) sum[i][j] = total[i][j] = hn::Zero(d);
  }
  const auto kept = [&](int i, int j) { return part.kept + (i * N + j) * lanes; };
  for (int i = 0; i < M && !kScaled && part.begin > 0; ++i) {
    for (int j = 0; j < N; ++j) sum[i][j] = hn::Load(d, kept(i, j));
  }
  std::size_t at = part.begin;
  for (std::size_t block = part.begin; block + step <= size; block += kScaleBlock) {
    const std::size_t end = std::min(block + kScaleBlock, size);
    for (int j = 0; j < N && ahead > 0; ++j) prefetch<kPart, kParts>(weight[j], block, ahead);
    for (int i = 0; i < M && kScaled; ++i) {
      for (int j = 0; j < N; ++j) sum[i][j] = hn::Zero(d);
    }
    for (; at + step <= end; at += step) {
      if constexpr (M == 1) {  // in this order no vector of the weight waits for its product in a register
        const auto v = vector_of<kPairs>(d, x[0], at);
        for (int j = 0; j < N; ++j) {
          sum[0][j] = add_product<kPairs>(vector_of<kPairs>(d, weight[j], at), v, sum[0][j]);
        }
        continue;
      }
      Vec w[N];
      for (int j = 0; j < N; ++j) w[j] = vector_of<kPairs>(d, weight[j], at);
      for (int i = 0; i < M; ++i) {
        auto v = vector_of<kPairs>(d, x[i], at);
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
        // Keeps v in one of 32 registers. GCC would read it from memory for each product, and reads bound this loop.
        asm("" : "+v"(v.raw));
#endif
        for (int j = 0; j < N; ++j) sum[i][j] = add_product<kPairs>(w[j], v, sum[i][j]);
      }
    }
    if constexpr (kScaled) {
      for (int j = 0; j < N; ++j) {
        const auto scale = hn::Set(d, weight[j].scales[block / kScaleBlock]);
        for (int i = 0; i < M; ++i) {
          if constexpr (kInMemory) {
            float* const to = stored + (i * N + j) * lanes;
            hn::Store(hn::MulAdd(scale, sum[i][j], hn::Load(d, to)), d, to);
          } else {
            total[i][j] = hn::MulAdd(scale, sum[i][j], total[i][j]);
          }
        }
      }
    }
  }
  if (!kScaled && !part.last) {
    for (int i = 0; i < M; ++i) {
      for (int j = 0; j < N; ++j) hn::Store(sum[i][j], d, kept(i, j));
    }
    return;
  }
  HWY_ALIGN float sums[(M * N + kLanes - 1) / kLanes * kLanes];
  if constexpr (kInMemory) {  // one after another, because GCC would keep `stored` in registers, which it lacks
    for (std::size_t k = 0; k < M * N; ++k) {
      sums[k] = hn::GetLane(sums_of_lanes<1>(d, [&](std::size_t) HWY_ATTR { return hn::Load(d, stored + k * lanes); }));
    }
  } else {
    store_sums<M * N>(
        d, [&](std::size_t k) HWY_ATTR { return (kScaled ? total : sum)[k / N][k % N]; }, sums);
  }
  HWY_UNROLL(8)  // only this loop: with the inner one too the product of one row is slower
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) {
      auto rest = hn::Set(d1, sums[i * N + j]);
      for (std::size_t c = at; c < size; ++c) {
        auto w = weight[j].at(d1, c);
        if constexpr (kScaled) w = hn::Mul(hn::Set(d1, weight[j].scales[c / kScaleBlock]), w);
        rest = hn::MulAdd(w, load(d1, x[i] + c), rest);
      }
      p.y(m + i, n + j) = hn::GetLane(rest);
    }
  }
}

// The rows of a weight.
template <class W>
struct WeightRows {
  View<const W, 2> data;
  View<const float, 2> scales;
  bool far;     // in memory rather than in a cache
  bool stream;  // in a call with kStreamBytes of weights

  HWY_INLINE WeightRow<W> row(std::int64_t n) const { return {data.at(n), scales ? scales.at(n) : nullptr}; }
};

// Computes M rows of x from row m on, and the next kMore rows, with a block's rows of the weight.
template <int M, bool kScaled, int kMore = 0, bool kStream = false, class X, class W>
HWY_INLINE void tiles(const LinearRows<X>& p, const LinearBlock& block, std::int64_t m, const WeightRows<W>& weight,
                      ColumnPart part) {
  // With fewer rows of x a tile has more rows of the weight, because an addition waits for the previous one of its sum.
  constexpr bool kWide = kTileRows<kScaled> == 8;
  constexpr int N = kStream ? 1 : M == 1 ? 6 : M == 2 ? 5 : M == 3 ? 4 : M == 4 || kWide ? 3 : 2;
  constexpr int kParts = kMore > 0 ? 2 : 1;
  std::int64_t n = block.n_begin;
  const std::int64_t bytes =
      std::max<std::int64_t>(1, N * weight.data.stride[0] * static_cast<std::int64_t>(sizeof(W)));
  const auto ahead = static_cast<std::size_t>(weight.far ? (kParts * kPrefetchBytes + bytes - 1) / bytes * bytes : 0);
  for (; n + N <= block.n_end; n += N) {
    WeightRow<W> rows[N];
    for (int j = 0; j < N; ++j) rows[j] = weight.row(n + j);
    tile<M, N, kScaled, 0, kParts>(p, rows, ahead, m, n, part);
    if constexpr (kMore > 0) tile<kMore, N, kScaled, 1, kParts>(p, rows, ahead, m + M, n, part);
    if (part.kept != nullptr) part.kept += M * N * hn::MaxLanes(hn::ScalableTag<float>());
  }
  for (; n < block.n_end; ++n) {
    const WeightRow<W> only = weight.row(n);
    tile<M, 1, kScaled, 0, kParts>(p, &only, 0, m, n, part);
    if constexpr (kMore > 0) tile<kMore, 1, kScaled, 1, kParts>(p, &only, 0, m + M, n, part);
    if (part.kept != nullptr) part.kept += M * hn::MaxLanes(hn::ScalableTag<float>());
  }
}

// Computes kTileRows rows of x from row m on with a block's rows of the weight, some columns at a time if they are
// many.
template <bool kScaled, class X, class W>
HWY_INLINE void tiles_of_many(const LinearRows<X>& p, const LinearBlock& block, std::int64_t m,
                              const WeightRows<W>& weight) {
  constexpr int kRows = kTileRows<kScaled>;
  constexpr std::size_t kPassColumns = kPassBytes / sizeof(X);
  const auto size = static_cast<std::size_t>(p.x.extent[1]);
  if (kScaled || size <= kPassColumns || block.n_end - block.n_begin > kPassOutputs) {
    return tiles<kRows, kScaled>(p, block, m, weight, {0, size, true, nullptr});
  }
  HWY_ALIGN float kept[kRows * kPassOutputs * hn::MaxLanes(hn::ScalableTag<float>())];
  for (std::size_t begin = 0; begin < size; begin += kPassColumns) {
    const std::size_t end = std::min<std::size_t>(begin + kPassColumns, size);
    tiles<kRows, kScaled>(p, block, m, weight, {begin, end, end == size, kept});
  }
}

// Computes M rows of x, which are all rows of a block, with the block's rows of the weight.
template <int M, bool kScaled, class X, class W>
HWY_INLINE void tiles_of_few(const LinearRows<X>& p, const LinearBlock& block, std::int64_t m,
                             const WeightRows<W>& weight, const ColumnPart& part) {
  // With more rows of x the products of one row of the weight take longer than reading it.
  if constexpr (M <= (std::is_same_v<X, bfloat16> ? 4 : 2)) {
    if (weight.far && weight.stream) return tiles<M, kScaled, 0, true>(p, block, m, weight, part);
  }
  tiles<M, kScaled>(p, block, m, weight, part);
}

// Computes a block: kTileRows rows of x at a time, and the last kPassRows rows or fewer together. The weight is read
// from memory by the first of them.
template <bool kScaled, class X, class W>
HWY_INLINE void all_tiles(const LinearRows<X>& p, const LinearBlock& block, WeightRows<W> weight) {
  constexpr int kRows = kTileRows<kScaled>;
  const ColumnPart all{0, static_cast<std::size_t>(p.x.extent[1]), true, nullptr};
  std::int64_t m = block.m_begin;
  for (; m + kPassRows < block.m_end; m += kRows) {
    tiles_of_many<kScaled>(p, block, m, weight);
    weight.far = false;
  }
  switch (block.m_end - m) {
    case 1:
      return tiles_of_few<1, kScaled>(p, block, m, weight, all);
    case 2:
      return tiles_of_few<2, kScaled>(p, block, m, weight, all);
    case 3:
      return tiles_of_few<3, kScaled>(p, block, m, weight, all);
    case 4:
      return tiles_of_few<4, kScaled>(p, block, m, weight, all);
    case 5:
      return tiles<5, kScaled>(p, block, m, weight, all);
    case 6:
      return tiles<6, kScaled>(p, block, m, weight, all);
    case 7:
      return tiles<std::min(kRows, 7), kScaled, std::max(0, 7 - kRows)>(p, block, m, weight, all);
    default:
      return tiles<kRows, kScaled, 8 - kRows>(p, block, m, weight, all);
  }
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // EFLA_CPU_LINEAR_TILES_INL_H_
