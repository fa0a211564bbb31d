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
  return {batch.pixels.to(device), batch.labels.to(device)};
}

std::int64_t count_correct(const torch::Tensor& logits, const torch::Tensor& labels) {
  const torch::Tensor values = logits.detach().to(torch::kCPU).contiguous(), expected = labels.to(torch::kCPU);
  const float* row = values.data_ptr<float>();
  const auto* label = expected.data_ptr<std::int64_t>();
  const std::int64_t classes = values.size(1);
  std::int64_t correct = 0;
  for (std::int64_t b = 0; b < values.size(0); ++b, row += classes) {
    bool largest = true;  // every comparison with a NaN is false
    for (std::int64_t c = 0; c < classes; ++c) largest = largest && (c == label[b] || row[c] < row[label[b]]);
    correct += largest;
  }
  return correct;
}

}  // namespace efla::eval
