// Prefetch lists of the kernels on vector units. Rows of a head lie far apart in memory, so no hardware prefetcher
// finds the next row. Prefetching many rows at once would stall the core, because a core can wait for only a few cache
// lines at once.
#pragma once

#include <hwy/base.h>

#include <cstddef>
#include <cstdint>

#include "efla/cpu/common/workspace.h"

namespace efla::cpu {

// A prefetch list. Each address stands for 256 bytes, or for 128 bytes if no row is longer. The list is planned
// beforehand, because integer instructions between the multiplications of a kernel would compete with these for the
// processor's ports.
class PrefetchList {
 public:
  // Returns the number of addresses that `rows` rows of `count` elements need at most (in float32).
  static std::int64_t of_rows(std::int64_t rows, std::int64_t count) {
    return rows * ((count * static_cast<std::int64_t>(sizeof(float)) + kBytes - 1) / kBytes);
  }

  // Without memory nothing may be added.
  explicit PrefetchList(float* memory = nullptr)
      : first_(reinterpret_cast<const std::byte**>(memory)), next_(first_), end_(first_) {}

  // Allocates the memory of a list of `addresses` addresses.
  static float* lay_out(Arena& arena, std::int64_t addresses) { return arena.floats(2 * addresses); }

  void clear() {
    next_ = end_ = first_;
    wide_ = false;
  }

  // Adds `rows` rows of `count` elements, `stride` elements apart.
  template <class T>
  HWY_INLINE void add(const T* first, std::int64_t stride, std::int64_t rows, std::int64_t count) {
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
    const auto* row = reinterpret_cast<const std::byte*>(first);
    wide_ = wide_ || count * kSize > kBytes / 2;
    if (count * kSize <= kBytes) {
      for (std::int64_t r = 0; r < rows; ++r) *end_++ = row + r * stride * kSize;
      return;
    }
    for (; rows > 0; --rows, row += stride * kSize) {
      for (std::int64_t i = 0; i < count * kSize; i += kBytes) *end_++ = row + i;
    }
  }

  // Returns the number of addresses that are left.
  std::int64_t count() const { return end_ - next_; }

  HWY_INLINE void prefetch_next() {
    if (next_ == end_) return;
    const std::byte* address = *next_++;
    prefetch(address);
    if (wide_) prefetch(address + kBytes / 2);
  }

  void prefetch_all() {
    while (next_ != end_) prefetch_next();
  }

 private:
  static constexpr std::int64_t kBytes = 256;

  HWY_INLINE static void prefetch(const std::byte* address) {
    for (std::int64_t i = 0; i < kBytes / 2; i += 64) __builtin_prefetch(address + i, 0, 2);
  }

  const std::byte** first_;
  const std::byte** next_;
  const std::byte** end_;
  bool wide_ = false;  // whether any row is longer than half of the bytes of an address
};

}  // namespace efla::cpu
