// Chooses the kernel for a linear layer of a few rows (linear.h).
#include "efla/cuda/layers/linear.h"

#include <algorithm>

#include "efla/cuda/common/launch.h"

namespace efla::gpu {
namespace {

constexpr std::int64_t kBand = 64, kMostParts = 8;  // columns of which a part has a multiple; parts of a product

// Returns the product with `count` columns from column `first` on.
LinearForward columns_of(LinearForward p, std::int64_t first, std::int64_t count) {
  const auto part = [&](auto& view) {
    if (!view) return;
    view.data += first;
    view.extent[1] = count;
  };
  part(p.x);
  part(p.weight);
  part(p.narrow_weight);
  return p;
}

// Returns what both kernels refuse of a product, or "".
std::string refusal_of(const LinearForward& p) {
  const std::string few = linear_few_refusal(p);
  return few.empty() || p.weight ? few : linear_many_refusal(p);
}

// Returns the columns of the parts that a kernel takes one after the other: all columns, if a kernel takes them, or as
// many as the fewest equal parts have. A norm and SwiGLU need all columns at once. 0: no kernel takes the parts.
std::int64_t part_columns(const LinearForward& p) {
  const std::int64_t columns = p.x.extent[1], most = p.norm_weight || p.swiglu ? 1 : kMostParts;
  for (std::int64_t parts = 1; parts <= most; ++parts) {
    const std::int64_t count = std::min(columns, (columns + parts * kBand - 1) / (parts * kBand) * kBand);
    if (refusal_of(columns_of(p, 0, count)).empty()) return count;
  }
  return 0;
}

}  // namespace

void linear(const LinearForward& p, cudaStream_t stream) {
  if (p.y.size() == 0) return;
  const std::int64_t columns = p.x.extent[1], count = part_columns(p);
  for (std::int64_t first = 0; first < columns; first += count) {
    LinearForward part = columns_of(p, first, std::min(count, columns - first));
    if (first > 0) part.residual = p.y;
    linear_few_refusal(part).empty() ? linear_few(part, stream) : linear_many(part, stream);
  }
}

std::string linear_refusal(const LinearForward& p) {
  if (!is_hopper()) return "it needs a Hopper GPU";
  if (p.byte_weight || p.quant_weight) return "it takes weights in float32 and bfloat16";
  const bool aligned = has_aligned_rows(p.x) && (!p.norm_weight || has_aligned_rows(p.norm_weight)) &&
                       (p.weight ? has_aligned_rows(p.weight) : has_aligned_rows(p.narrow_weight));
  if (!aligned) return "it needs rows that are pieces of 16 bytes";
  return part_columns(p) > 0 ? "" : refusal_of(p);
}

}  // namespace efla::gpu
