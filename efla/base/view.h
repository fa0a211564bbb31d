// Strided views: a pointer, extents and strides, without ownership. Every function is constexpr, so that CUDA kernels
// can call it.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

namespace efla {

// A view of a Rank-dimensional array. Strides are in elements, may have any sign and need not be contiguous.
template <class T, int Rank>
struct View {
  T* data = nullptr;
  std::array<std::int64_t, Rank> extent{};
  std::array<std::int64_t, Rank> stride{};

  // Returns a row-major contiguous view.
  static constexpr View contiguous(T* data, const std::array<std::int64_t, Rank>& extent) {
    View view{data, extent, {}};
    std::int64_t step = 1;
    for (int d = Rank - 1; d >= 0; --d) {
      view.stride[d] = step;
      step *= extent[d];
    }
    return view;
  }

  constexpr explicit operator bool() const { return data != nullptr; }

  template <class... Index>
  requires(sizeof...(Index) == Rank) constexpr T& operator()(Index... index) const { return data[offset(index...)]; }

  // Returns the address of the element at the given leading indices; the other indices are 0.
  template <class... Index>
  requires(sizeof...(Index) <= Rank) constexpr T* at(Index... index) const { return data + offset(index...); }

  constexpr std::int64_t size() const {
    std::int64_t n = 1;
    for (const auto e : extent) n *= e;
    return n;
  }

  // Converts to a view of constant elements.
  constexpr operator View<const T, Rank>() const requires(!std::is_const_v<T>) { return {data, extent, stride}; }

 private:
  template <class... Index>
  constexpr std::int64_t offset(Index... index) const {
    std::int64_t sum = 0;
    int d = 0;
    ((sum += static_cast<std::int64_t>(index) * stride[d++]), ...);
    return sum;
  }
};

}  // namespace efla
