#include "efla/nn/inference/rows.h"

#include "efla/ops/layers/rms_norm.h"

namespace efla::nn {

void norm_rows(const View<float, 2>& x, const Vector& weight, double eps, const View<float, 2>& y, ThreadPool& pool) {
  RmsNormForward<float> p;
  p.x = x;
  p.weight = View<const float, 1>::contiguous(weight.data(), {std::ssize(weight)});
  p.eps = static_cast<float>(eps);
  p.y = y;
  rms_norm_forward(p, {.context = {.pool = &pool}});
}

void add_rows(const View<float, 2>& to, const View<float, 2>& x) {
  for (std::int64_t i = 0; i < to.size(); ++i) to.data[i] += x.data[i];
}

}  // namespace efla::nn
