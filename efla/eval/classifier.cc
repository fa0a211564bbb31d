#include "efla/eval/classifier.h"

namespace efla::eval {

Batch make_batch(const data::ImageSet& images, std::span<const std::uint32_t> indices, const Perturbation& perturbation,
                 std::uint64_t seed, torch::Device device) {
  const auto count = static_cast<std::int64_t>(indices.size());
  const std::int64_t size = images.rows * images.cols;
  Batch batch{torch::empty({count, size}, torch::kFloat32), torch::empty({count}, torch::kInt64)};
  float* to = batch.pixels.data_ptr<float>();
  auto* label = batch.labels.data_ptr<std::int64_t>();
  for (const std::uint32_t index : indices) {
    const std::uint8_t* from = images.pixels.data() + index * size;
    for (std::int64_t i = 0; i < size; ++i) to[i] = static_cast<float>(from[i]) / 255.0F;
    perturb(perturbation, seed, index, {to, static_cast<std::size_t>(size)});
    *label++ = images.labels[index];
    to += size;
  }
  return {batch.pixels.to(device, /*non_blocking=*/true), batch.labels.to(device, /*non_blocking=*/true)};
}

torch::Tensor count_correct(const torch::Tensor& logits, const torch::Tensor& labels) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor smaller = logits.lt(logits.gather(1, labels.unsqueeze(1))).sum(1);  // false for a NaN
  return smaller.eq(logits.size(1) - 1).sum();
}

}  // namespace efla::eval
