// Matrix products of float32 on Intel AMX, which multiplies tiles of bfloat16 and adds in float32. A float32 is split
// into bfloat16 numbers of decreasing size, x = x₀ + x₁ + x₂, its splits. Of the products x_i y_j of two such sums,
// only the largest are computed. With three splits (i + j < 3, six products) the result is about as exact as in
// float32. With two splits (three products) the result keeps 16 bits, more than the 8 bits of bfloat16 inputs and
// outputs. Included by the kernels for AVX-512, which every processor with AMX has.
//
// A left operand lies in tiles of [16 rows, 16 pairs of the depth, 2], a right one in tiles of [16 pairs of the depth,
// 16 columns, 2], as AMX requires. Any two of 32 elements may be a pair if both operands agree: here i and i + 16,
// which come from two vectors without a permutation. Tiles of 1 KB follow each other without gaps, first along the
// depth.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "efla/cpu/common/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

using Bf16Bits = std::uint16_t;  // the bits of a bfloat16
inline constexpr std::int64_t kTileRows =
    16;  // rows of a left operand and of a sum, columns of a right one and of a sum
inline constexpr std::int64_t kTileDepth = 32;          // depth of one product
inline constexpr std::int64_t kTileElements = 16 * 32;  // elements of an operand's tile
inline constexpr std::int64_t kTileBytes = 64;          // bytes per row of a tile
static_assert(kPanel == 2 * kTileRows);

// Number of splits of states, updates, scores and their gradients, for any number of splits of the keys.
template <class T>
inline constexpr int kStateSplits = std::is_same_v<T, float> ? 3 : 2;

// An operand of `blocks` blocks of 16 rows (left) or columns (right) and `depth` tiles along the depth, one split after
// the other.
struct SplitTiles {
  Bf16Bits* data = nullptr;
  std::int64_t blocks = 0, depth = 0;

  void lay_out(Arena& arena, int splits, std::int64_t block_count, std::int64_t depth_tiles) {
    blocks = block_count;
    depth = depth_tiles;
    data = reinterpret_cast<Bf16Bits*>(arena.floats(splits * split_stride() / 2));
  }
  std::int64_t block_stride() const { return depth * kTileElements; }
  std::int64_t split_stride() const { return blocks * block_stride(); }
  Bf16Bits* tile(int split, std::int64_t block, std::int64_t along) const {
    return data + split * split_stride() + block * block_stride() + along * kTileElements;
  }
  // Return a left operand from row r on, and a right operand from tile `along` of the depth on. The results are only
  // for writing, because they keep the sizes of the whole operand.
  SplitTiles rows_from(std::int64_t r) const {
    SplitTiles rest = *this;
    rest.data += r / kTileRows * block_stride();
    return rest;
  }
  SplitTiles depth_from(std::int64_t along) const {
    SplitTiles rest = *this;
    rest.data += along * kTileElements;
    return rest;
  }
  // Returns split 0 of a row of a left operand.
  Bf16Bits* row(std::int64_t r, std::int64_t along) const {
    return tile(0, r / kTileRows, along) + r % kTileRows * kTileDepth;
  }
};

// The shapes of all eight tile registers: 16 rows of 64 bytes.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The AMX instructions. The compilers' own functions are not used: GCC's do not declare that they read memory, and
// Clang's are not available in a function for AVX-512 alone.
template <int kTile>
HWY_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
HWY_INLINE void load_tile(const void* from, std::int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kTile) : "memory");
}
template <int kTile>
HWY_INLINE void store_tile(void* to, std::int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(kTile) : "memory");
}
// Computes tile kSum += tile kLeft · tile kRight.
template <int kSum, int kLeft, int kRight>
HWY_INLINE void add_tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

// Reserves the tile registers of the calling thread during its lifetime.
class TilesInUse {
 public:
  TilesInUse() {
    static constexpr TileShapes kShapes;
    asm volatile("ldtilecfg (%0)" ::"r"(&kShapes) : "memory");
  }
  ~TilesInUse() { asm volatile("tilerelease" ::); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};

// Sets the sums of a product to zero: 32 rows of 32 columns in tile registers 0 to 3.
HWY_INLINE void zero_sums() {
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
}

// Loads the sums from 32 rows of 32 floats, `row_floats` apart.
HWY_INLINE void load_sums(const float* panel, std::int64_t row_floats) {
  const std::int64_t bytes = row_floats * static_cast<std::int64_t>(sizeof(float));
  load_tile<0>(panel, bytes);
  load_tile<1>(panel + kTileRows, bytes);
  load_tile<2>(panel + kTileRows * row_floats, bytes);
  load_tile<3>(panel + kTileRows * row_floats + kTileRows, bytes);
}

// Stores the sums to such rows.
HWY_INLINE void store_sums(float* panel, std::int64_t row_floats) {
  const std::int64_t bytes = row_floats * static_cast<std::int64_t>(sizeof(float));
  store_tile<0>(panel, bytes);
  store_tile<1>(panel + kTileRows, bytes);
  store_tile<2>(panel + kTileRows * row_floats, bytes);
  store_tile<3>(panel + kTileRows * row_floats + kTileRows, bytes);
}

// Prefetches rows line by line while AMX works, because prefetching all lines at once would stall the core. Kernels on
// vector units have a prefetch list instead (prefetch_list.h), because the integer instructions of this class would
// slow them.
class RowPrefetches {
 public:
  void clear() { count_ = next_ = 0; }

  // Adds `rows` rows of `count` elements, `stride` elements apart. Ignores all calls after the first kMaxBlocks.
  template <class T>
  HWY_INLINE void add(const T* first, std::int64_t stride, std::int64_t rows, std::int64_t count) {
    if (count_ == kMaxBlocks) return;
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
    blocks_[count_++] = {reinterpret_cast<const std::byte*>(first), stride * kSize, rows, (count * kSize + 63) / 64};
    if (count_ == 1) start();
  }

  // Prefetches the next kLines lines.
  template <int kLines>
  HWY_INLINE void prefetch_next() {
    for (int i = 0; i < kLines && next_ < count_; ++i) {
      __builtin_prefetch(line_, 0, 2);
      line_ += 64;
      if (--lines_ == 0) next_row();
    }
  }

 private:
  struct Block {
    const std::byte* row;
    std::int64_t stride, rows, lines;
  };

  HWY_INLINE void start() {
    line_ = blocks_[next_].row;
    lines_ = blocks_[next_].lines;
  }
  HWY_INLINE void next_row() {
    Block& block = blocks_[next_];
    block.row += block.stride;
    if (--block.rows == 0) ++next_;
    if (next_ < count_) start();
  }

  static constexpr int kMaxBlocks = 10;
  Block blocks_[kMaxBlocks];
  int count_ = 0, next_ = 0;
  const std::byte* line_ = nullptr;  // the next line
  std::int64_t lines_ = 0;           // lines left of its row
};

// Adds a product to the sums: tiles 4 and 5, one above the other, times tiles 6 and 7, side by side. With kLower the
// block above the diagonal is left out.
template <bool kLower>
HWY_INLINE void add_tile_products() {
  add_tile_product<0, 4, 6>();
  if constexpr (!kLower) add_tile_product<1, 4, 7>();
  add_tile_product<2, 5, 6>();
  add_tile_product<3, 5, 7>();
}

// A product of split i of the left operand and split j of the right one. Neighbouring pairs of a list share a split,
// which is then loaded once.
struct SplitPair {
  int i, j;
};
template <int L, int R>
inline constexpr auto kSplitPairs = std::to_array<SplitPair>({{0, 0}});
template <>
inline constexpr auto kSplitPairs<1, 2> = std::to_array<SplitPair>({{0, 0}, {0, 1}});
template <>
inline constexpr auto kSplitPairs<2, 1> = std::to_array<SplitPair>({{0, 0}, {1, 0}});
template <>
inline constexpr auto kSplitPairs<2, 2> = std::to_array<SplitPair>({{0, 1}, {0, 0}, {1, 0}});
// All four products of two splits each.
inline constexpr auto kAllPairs = std::to_array<SplitPair>({{0, 1}, {0, 0}, {1, 0}, {1, 1}});
template <>
inline constexpr auto kSplitPairs<3, 3> = std::to_array<SplitPair>({{0, 2}, {0, 1}, {1, 1}, {1, 0}, {0, 0}, {2, 0}});

// Which elements of a product are computed, and how exactly.
enum class Product {
  whole,
  lower,  // without the block above the diagonal
  exact   // with two splits each: all four products, as exact as the splits
};

// Adds the product of 32 rows of `left`, in L splits, and 32 columns of `right`, in R splits, to the sums; prefetches
// rows.
template <int L, int R, Product kProduct = Product::whole>
HWY_INLINE void add_products(SplitTiles left, std::int64_t left_block, SplitTiles right, std::int64_t right_block,
                             RowPrefetches& prefetches) {
  static_assert(L == R || L + R == 3);
  constexpr auto kPairs = [] {
    if constexpr (kProduct == Product::exact && L == 2 && R == 2) {
      return kAllPairs;
    } else {
      return kSplitPairs<L, R>;
    }
  }();
  constexpr int kLines = L == 3 ? 6 : 8;  // with fewer products per tile, more lines per product
  const Bf16Bits* a = left.tile(0, left_block, 0);
  const Bf16Bits* b = right.tile(0, right_block, 0);
  const std::int64_t next_a = left.block_stride(), split_a = left.split_stride();
  const std::int64_t next_b = right.block_stride(), split_b = right.split_stride();
  for (std::int64_t along = 0; along < left.depth; ++along, a += kTileElements, b += kTileElements) {
    unroll<static_cast<int>(kPairs.size())>([&](auto step) EFLA_UNROLLED {
      constexpr SplitPair now = kPairs[step], before = step == 0 ? SplitPair{-1, -1} : kPairs[step - 1];
      if constexpr (now.i != before.i) {
        load_tile<4>(a + now.i * split_a, kTileBytes);
        load_tile<5>(a + now.i * split_a + next_a, kTileBytes);
      }
      if constexpr (now.j != before.j) {
        load_tile<6>(b + now.j * split_b, kTileBytes);
        load_tile<7>(b + now.j * split_b + next_b, kTileBytes);
      }
      add_tile_products<kProduct == Product::lower>();
      prefetches.prefetch_next<kLines>();
    });
  }
}

// Splits two vectors of float32 into P splits and calls f(split, bits of x0, bits of x1) for each, which uses the upper
// half of every element. One split and three splits are truncated, because one split is only used for exact bfloat16
// numbers, and three splits hold all 24 bits. Two splits are rounded, except a NaN, because a carry might turn a NaN
// into a number.
template <int P, class F>
HWY_INLINE void cut(__m512 x0, __m512 x1, const F& f) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  unroll<P>([&](auto split) EFLA_UNROLLED {
    __m512i bits0 = _mm512_castps_si512(x0), bits1 = _mm512_castps_si512(x1);
    if constexpr (P == 2) {
      const __m512i half = _mm512_set1_epi32(0x8000);
      const __mmask16 numbers0 = split == 0 ? _mm512_cmp_ps_mask(x0, x0, _CMP_ORD_Q) : 0xffff;
      const __mmask16 numbers1 = split == 0 ? _mm512_cmp_ps_mask(x1, x1, _CMP_ORD_Q) : 0xffff;
      bits0 = _mm512_mask_add_epi32(bits0, numbers0, bits0, half);
      bits1 = _mm512_mask_add_epi32(bits1, numbers1, bits1, half);
    }
    f(split, bits0, bits1);
    if constexpr (split + 1 < P) {
      x0 = _mm512_sub_ps(x0, _mm512_castsi512_ps(_mm512_and_si512(bits0, upper)));
      x1 = _mm512_sub_ps(x1, _mm512_castsi512_ps(_mm512_and_si512(bits1, upper)));
    }
  });
}

// Returns the sum of the P splits of a vector, which is its value in products.
template <int P>
HWY_INLINE __m512 sum_of_splits(__m512 x) {
  if constexpr (P == 3) return x;
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  __m512 sum = _mm512_setzero_ps();
  cut<P>(x, x, [&](auto, __m512i bits, __m512i) EFLA_UNROLLED {
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(bits, upper)));
  });
  return sum;
}

// Join the upper, or the lower, halves of 16 pairs of elements.
HWY_INLINE __m512i join_upper(__m512i x0, __m512i x1) {
  constexpr int kFirstOrBothOthers = 0xf8;
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(x0, 16), x1, _mm512_set1_epi32(static_cast<int>(0xffff0000U)),
                                   kFirstOrBothOthers);
}
HWY_INLINE __m512i join_lower(__m512i x0, __m512i x1) {
  constexpr int kFirstOrBothOthers = 0xf8;
  return _mm512_ternarylogic_epi32(_mm512_slli_epi32(x1, 16), x0, _mm512_set1_epi32(0xffff), kFirstOrBothOthers);
}

// Splits 16 pairs of the depth, x0[i] with x1[i], into one row of 32 elements per split: a row of a left tile, or a
// pair of rows of a right tile.
template <int P>
HWY_INLINE void split_pairs(__m512 x0, __m512 x1, Bf16Bits* to, std::int64_t split_stride) {
  cut<P>(x0, x1, [&](auto split, __m512i bits0, __m512i bits1) EFLA_UNROLLED {
    _mm512_store_si512(to + split * split_stride, join_upper(bits0, bits1));
  });
}
// Splits 32 floats of a row into one row of a left tile per split.
template <int P>
HWY_INLINE void split_row(const float* from, Bf16Bits* to, std::int64_t split_stride) {
  split_pairs<P>(_mm512_load_ps(from), _mm512_load_ps(from + kLanes), to, split_stride);
}

// Splits rows i and i + 16 of a panel, 32 floats each, in P splits: into rows i and i + 16 of left tiles, and into row
// i of two neighbouring right tiles. The same matrix is then both a left and a right operand.
template <int P>
HWY_INLINE void split_row_pair(const float* row0, const float* row1, Bf16Bits* left, std::int64_t left_block,
                               std::int64_t left_stride, Bf16Bits* right, std::int64_t right_block,
                               std::int64_t right_stride) {
  __m512i first[P], second[P];
  cut<P>(_mm512_loadu_ps(row0), _mm512_loadu_ps(row0 + kLanes), [&](auto split, __m512i x0, __m512i x1) EFLA_UNROLLED {
    first[split] = x0;
    second[split] = x1;
    _mm512_store_si512(left + split * left_stride, join_upper(x0, x1));
  });
  cut<P>(_mm512_loadu_ps(row1), _mm512_loadu_ps(row1 + kLanes), [&](auto split, __m512i x0, __m512i x1) EFLA_UNROLLED {
    _mm512_store_si512(left + split * left_stride + left_block, join_upper(x0, x1));
    _mm512_store_si512(right + split * right_stride, join_upper(first[split], x0));
    _mm512_store_si512(right + split * right_stride + right_block, join_upper(second[split], x1));
  });
}

// Splits `count` rows of float32 [count, depth · 32], `stride` apart, into left tiles from row `first` on.
template <int P>
HWY_INLINE void split_rows(const float* rows, std::int64_t stride, std::int64_t first, std::int64_t count,
                           SplitTiles out) {
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t along = 0; along < out.depth; ++along) {
      split_row<P>(rows + r * stride + along * kTileDepth, out.row(first + r, along), out.split_stride());
    }
  }
}

// Splits the rows of a panel [kChunk, kPanel] into column tile `along` of `left`.
template <int P>
HWY_INLINE void split_panel_rows(const float* rows, std::int64_t along, SplitTiles left) {
  for (std::int64_t r = 0; r < kChunk; ++r) split_row<P>(rows + r * kPanel, left.row(r, along), left.split_stride());
}

// Splits `count` rows (a multiple of 32) of 32 floats, `stride` apart, into column tile `along` of `left` and into
// `right`, which has only these 32 columns.
template <int P>
HWY_INLINE void split_panel(const float* rows, std::int64_t stride, std::int64_t count, std::int64_t along,
                            SplitTiles left, SplitTiles right) {
  for (std::int64_t first = 0; first < count; first += kTileDepth) {
    Bf16Bits *to_left = left.row(first, along), *to_right = right.tile(0, 0, first / kTileDepth);
    for (std::int64_t i = first; i < first + kTileRows; ++i, to_left += kTileDepth, to_right += kTileDepth) {
      split_row_pair<P>(rows + i * stride, rows + (i + kTileRows) * stride, to_left, left.block_stride(),
                        left.split_stride(), to_right, right.block_stride(), right.split_stride());
    }
  }
}

// Computes out = factors ⊙ the rows of a panel.
HWY_INLINE void scale_rows(const float* panel, const float* factors, float* out) {
  for (std::int64_t r = 0; r < kChunk; ++r) {
    const __m512 factor = _mm512_set1_ps(factors[r]);
    for (std::int64_t i = r * kPanel; i < (r + 1) * kPanel; i += kLanes) {
      _mm512_store_ps(out + i, _mm512_mul_ps(factor, _mm512_load_ps(panel + i)));
    }
  }
}

// Sets rows [first, last) of left tiles to zero.
template <int P>
HWY_INLINE void clear_rows(std::int64_t first, std::int64_t last, SplitTiles out) {
  for (std::int64_t r = first; r < last; ++r) {
    for (int split = 0; split < P; ++split) {
      for (std::int64_t along = 0; along < out.depth; ++along) {
        _mm512_store_si512(out.row(r, along) + split * out.split_stride(), _mm512_setzero_si512());
      }
    }
  }
}

// Transposes 16 × 16 elements of four bytes in rows of 64 bytes. Such an element is a pair of the depth, so that a left
// tile of M becomes a right tile of Mᵀ, or back; or it is a float.
HWY_INLINE void transpose_tile(const Bf16Bits* from, Bf16Bits* to) {
  __m512i r[16], t[16];
  unroll<16>([&](auto i) EFLA_UNROLLED { r[i] = _mm512_load_si512(from + i * 32); });
  unroll<8>([&](auto i) EFLA_UNROLLED {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  });
  unroll<4>([&](auto i) EFLA_UNROLLED {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  });
  // r[4 b + c] holds column c of each group of four columns, for rows 4 b … 4 b + 3.
  unroll<4>([&](auto c) EFLA_UNROLLED {
    const __m512i even01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88),
                  odd01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    _mm512_store_si512(to + c * 32, _mm512_shuffle_i32x4(even01, even23, 0x88));
    _mm512_store_si512(to + (c + 8) * 32, _mm512_shuffle_i32x4(even01, even23, 0xdd));
    _mm512_store_si512(to + (c + 4) * 32, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
    _mm512_store_si512(to + (c + 12) * 32, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
  });
}

// Turns two right tiles, which have 32 neighbouring columns, into 32 rows of left tiles of the same matrix.
HWY_INLINE void pairs_to_rows(const Bf16Bits* columns0, const Bf16Bits* columns1, Bf16Bits* rows0, Bf16Bits* rows1) {
  for (std::int64_t i = 0; i < kTileElements; i += kTileDepth) {
    const __m512i x0 = _mm512_load_si512(columns0 + i), x1 = _mm512_load_si512(columns1 + i);
    _mm512_store_si512(rows0 + i, join_lower(x0, x1));
    _mm512_store_si512(rows1 + i, join_upper(x0, x1));
  }
}

// Turns left tiles of a matrix M in P splits into right tiles of Mᵀ, for 32 rows of M from block `block` on and the
// tiles [first, last) of its columns. The columns of Mᵀ are then blocks 0 and 1.
template <int P>
HWY_INLINE void transpose_rows(SplitTiles left, std::int64_t block, SplitTiles right, std::int64_t first,
                               std::int64_t last) {
  for (int split = 0; split < P; ++split) {
    for (std::int64_t along = first; along < last; ++along) {
      for (std::int64_t i = 0; i < 2; ++i)
        transpose_tile(left.tile(split, block + i, along), right.tile(split, i, along));
    }
  }
}

// Turns right tiles with 32 columns into left tiles of the same matrix.
template <int P>
HWY_INLINE void transpose_columns(SplitTiles right, SplitTiles left) {
  for (int split = 0; split < P; ++split) {
    for (std::int64_t along = 0; along < right.depth; ++along) {
      pairs_to_rows(right.tile(split, 0, along), right.tile(split, 1, along), left.tile(split, 2 * along, 0),
                    left.tile(split, 2 * along + 1, 0));
    }
  }
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
