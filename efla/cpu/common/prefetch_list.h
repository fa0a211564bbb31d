// Prefetch lists of the vector kernels. Rows of a head lie far apart in memory, so no hardware prefetcher finds the
// next one. Prefetching many rows at once would stall the core, which has only about 16 cache lines in flight.
#pragma once

#include <hwy/base.h>

#include <cstddef>
#include <cstdint>

#include "efla/cpu/common/workspace.h"

namespace efla::cpu {

// A prefetch list: addresses of 256 bytes each, or of 128 if all rows are that short. Planning the list beforehand
// leaves hardly any integer instructions between multiplications, which would compete with them for the processor's
// ports.
class PrefetchList {
 public:
  // Returns the number of addresses for `rows` rows of `count` elements.
  static std::int64_t of_rows(std::int64_t rows, std::int64_t count) {
    return rows * ((count * static_cast<std::int64_t>(sizeof(float)) + kBytes - 1) / kBytes);
  }

  // Without memory the list stays empty.
  explicit PrefetchList(float* memory = nullptr)
      : first_(reinterpret_cast<const std::byte**>(memory)), next_(first_), end_(first_) {}

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
