// Chooses the kernel for a linear layer of a few rows (linear.h).
#include "efla/cuda/layers/linear.h"

#include "efla/cuda/common/launch.h"

namespace efla::gpu {

void linear(const LinearForward& p, cudaStream_t stream) {
  if (p.y.size() == 0) return;
  if (linear_few_refusal(p).empty()) return linear_few(p, stream);
  linear_many(p, stream);
}

std::string linear_refusal(const LinearForward& p) {
  if (!is_hopper()) return "it needs a Hopper GPU";
  if (p.byte_weight) return "it takes weights in float32 and bfloat16";
  const bool aligned = has_aligned_rows(p.x) && (!p.norm_weight || has_aligned_rows(p.norm_weight)) &&
                       (p.weight ? has_aligned_rows(p.weight) : has_aligned_rows(p.narrow_weight));
  if (!aligned) return "it needs rows that are pieces of 16 bytes";
  const std::string few = linear_few_refusal(p);
  if (few.empty() || p.weight) return few;
  return linear_many_refusal(p);
}

}  // namespace efla::gpu
