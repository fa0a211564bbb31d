// Rows that the vector kernels will need soon. Rows of a head lie far apart in memory, where no hardware prefetcher
// finds the next; all asked for at once they would keep the core waiting, which has about 16 lines under way.
#pragma once

#include <hwy/base.h>

#include <cstddef>
#include <cstdint>

#include "efla/cpu/workspace.h"
#include "efla/rule/problem.h"

namespace efla::cpu {

// A list of addresses, 64 elements each, which is made ahead: what is left to do between multiplications takes hardly
// any of the processor's ports from them.
template <class T>
class AddressesAhead {
 public:
  // For a chunk of g, q, k, v and o. Takes the same memory for all types; g may be twice as wide as T.
  void lay_out(Arena& arena, const DeltaShape& shape) {
    const auto addresses = [](std::int64_t dim) { return kChunk * ((dim + 63) / 64); };
    first_ = next_ = end_ = reinterpret_cast<const std::byte**>(arena.floats(
        2 * (addresses(2 * shape.key_dim) + 2 * addresses(shape.key_dim) + 2 * addresses(shape.value_dim))));
  }

  void clear() { next_ = end_ = first_; }

  // `rows` rows of `count` elements, `stride` elements apart.
  template <class Element>
  HWY_INLINE void add(const Element* first, std::int64_t stride, std::int64_t rows, std::int64_t count) {
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(Element));
    const auto* row = reinterpret_cast<const std::byte*>(first);
    if (count * kSize <= kBytes) {
      for (std::int64_t r = 0; r < rows; ++r) *end_++ = row + r * stride * kSize;
      return;
    }
    for (; rows > 0; --rows, row += stride * kSize) {
      for (std::int64_t i = 0; i < count * kSize; i += kBytes) *end_++ = row + i;
    }
  }

  std::int64_t count() const { return end_ - next_; }

  HWY_INLINE void ask() {
    if (next_ == end_) return;
    const std::byte* address = *next_++;
    for (std::int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(address + i, 0, 2);
  }

 private:
  static constexpr auto kBytes = static_cast<std::int64_t>(64 * sizeof(T));
  const std::byte** first_ = nullptr;
  const std::byte** next_ = nullptr;
  const std::byte** end_ = nullptr;
};

}  // namespace efla::cpu
