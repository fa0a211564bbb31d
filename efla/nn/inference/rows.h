// The rows of a model for inference on the CPU, one per token of a call: their memory, and functions of all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "efla/base/threads.h"
#include "efla/base/view.h"
#include "efla/nn/layers/mixer_plan.h"

namespace efla::nn {

using Vector = std::vector<float>;

// A matrix whose memory only grows, with undefined elements. It is aligned to a cache line, because a load across two
// lines takes longer.
class RowBuffer {
 public:
  View<float, 2> rows(std::int64_t count, std::int64_t columns) {
    const auto size = static_cast<std::size_t>(count * columns);
    if (size > size_) {
      data_.reset(new (kCacheLine) float[size]);
      size_ = size;  // last: without memory the old size stays true
    }
    return View<float, 2>::contiguous(data_.get(), {count, columns});
  }
  float* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kCacheLine{64};
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, kCacheLine); }
  };
  std::size_t size_ = 0;
  std::unique_ptr<float[], Free> data_;
};

// Returns some columns of the rows of a view.
inline View<float, 2> columns_of(View<float, 2> view, const Columns& columns) {
  view.data += columns.first;
  view.extent[1] = columns.count;
  return view;
}

// Computes the RMS norm of every row; y may be x.
void norm_rows(const View<float, 2>& x, const Vector& weight, double eps, const View<float, 2>& y, ThreadPool& pool);

// Adds x to `to`, both contiguous.
void add_rows(const View<float, 2>& to, const View<float, 2>& x);

}  // namespace efla::nn
