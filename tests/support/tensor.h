// Arrays for the operators' tests, in any memory layout. Elements start as NaN, with sentinels around and between them
// that are NaN too. A kernel that reads a neighbour gets a wrong result, and one that writes there is detected.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla::test {

enum class Layout {
  contiguous,    // row-major
  sliced,        // a slice of a wider array: foreign elements between rows and between tokens
  head_major,    // dimensions 1 and 2 swapped in memory: [B, H, T, D]
  column_major,  // the first dimension is the fastest: no row has stride 1
  reversed,      // dimension 1 runs backwards
};

inline const char* name_of(Layout layout) {
  constexpr std::array<const char*, 5> names{"contiguous", "sliced", "head_major", "column_major", "reversed"};
  return names[static_cast<std::size_t>(layout)];
}

// Rounds a float64 to T (for bfloat16 through float32).
template <class T>
T rounded(double x) {
  return from_state<T>(static_cast<State<T>>(x));
}

template <class T, int Rank>
class Tensor {
 public:
  using Extent = std::array<std::int64_t, Rank>;

  Tensor() = default;
  explicit Tensor(const Extent& extent, Layout layout = Layout::contiguous) : extent_(extent) {
    lay_out(layout);
    poison();
  }

  // Returns the view; without elements if the tensor is empty, like an absent argument.
  View<T, Rank> view() {
    if (memory_.empty()) return {};
    return {memory_.data() + first_, extent_, stride_};
  }

  // Return all memory of the tensor including the sentinels, and the place of the view in it.
  std::vector<T>& memory() { return memory_; }
  std::int64_t first() const { return first_; }

  // Sets every element to NaN and everything around the elements to the sentinel.
  void poison() {
    if (memory_.empty()) return;
    std::memset(static_cast<void*>(memory_.data()), 0xff, memory_.size() * sizeof(T));
    for_each_offset([this](std::int64_t at) { memory_[at] = rounded<T>(std::numeric_limits<double>::quiet_NaN()); });
  }

  // Returns the elements in row-major order.
  std::vector<double> values() const {
    std::vector<double> values;
    for_each_offset([&](std::int64_t at) { values.push_back(static_cast<double>(to_float(memory_[at]))); });
    return values;
  }
  void assign(const std::vector<double>& values) {
    std::size_t i = 0;
    for_each_offset([&](std::int64_t at) { memory_[at] = rounded<T>(values.at(i++)); });
  }

  bool sentinels_intact() const {
    std::vector<T> memory = memory_;
    for_each_offset([&](std::int64_t at) { std::memset(static_cast<void*>(&memory[at]), 0xff, sizeof(T)); });
    const auto* bytes = reinterpret_cast<const unsigned char*>(memory.data());
    return std::all_of(bytes, bytes + memory.size() * sizeof(T), [](unsigned char byte) { return byte == 0xff; });
  }

  bool same_bits(const Tensor& other) const {
    return memory_.size() == other.memory_.size() &&
           (memory_.empty() || std::memcmp(memory_.data(), other.memory_.data(), memory_.size() * sizeof(T)) == 0);
  }

 private:
  static constexpr std::int64_t kFence = 37;  // sentinels at either end; odd, so that rows are not aligned

  void lay_out(Layout layout) {
    std::array<int, Rank> order{};  // dimensions from the slowest to the fastest
    std::iota(order.begin(), order.end(), 0);
    if (layout == Layout::head_major) std::swap(order[1], order[2]);
    if (layout == Layout::column_major) std::reverse(order.begin(), order.end());
    std::int64_t step = 1;
    for (int i = Rank - 1; i >= 0; --i) {
      stride_[order[i]] = step;
      step *= extent_[order[i]];
      if (layout == Layout::sliced) step += i == Rank - 1 ? 5 : 3;
    }
    memory_.resize(step + 2 * kFence);
    first_ = kFence;
    if (layout == Layout::reversed) {
      first_ += (extent_[1] - 1) * stride_[1];
      stride_[1] = -stride_[1];
    }
  }

  template <class F>
  void for_each_offset(F&& f) const {
    if (memory_.empty()) return;
    Extent index{};
    std::int64_t at = first_;
    for (;;) {
      f(at);
      int d = Rank - 1;
      for (; d >= 0; --d) {
        at += stride_[d];
        if (++index[d] < extent_[d]) break;
        at -= extent_[d] * stride_[d];
        index[d] = 0;
      }
      if (d < 0) return;
    }
  }

  Extent extent_{}, stride_{};
  std::int64_t first_ = 0;
  std::vector<T> memory_;
};

}  // namespace efla::test
