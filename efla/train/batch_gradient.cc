#include "efla/train/batch_gradient.h"

#include <torch/autograd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "efla/autograd/one_thread.h"

namespace efla::train {

BatchGradient::BatchGradient(std::vector<torch::Tensor> parameters, ThreadPool& pool)
    : parameters_(std::move(parameters)), pool_(pool) {
  std::int64_t size = 0;
  for (const auto& parameter : parameters_) size += parameter.numel();
  gradient_ = torch::zeros({size}, torch::kFloat32);
}

double BatchGradient::compute(std::int64_t parts, const std::function<torch::Tensor(std::int64_t part)>& part_loss) {
  part_.resize(static_cast<std::size_t>(parts * gradient_.numel()));
  part_losses_.assign(static_cast<std::size_t>(parts), 0.0);
  pool_.run(parts, [&](std::int64_t part, int) {
    autograd::compute_on_this_thread_only();
    const torch::Tensor loss = part_loss(part);
    part_losses_[part] = loss.item<double>();
    store_part(part, torch::autograd::grad({loss}, parameters_, /*grad_outputs=*/{}, /*retain_graph=*/false,
                                           /*create_graph=*/false, /*allow_unused=*/true));
  });
  sum_parts(parts);
  double loss = 0.0;
  for (const double x : part_losses_) loss += x;
  return loss;
}

void BatchGradient::store_part(std::int64_t part, const std::vector<torch::Tensor>& gradients) {
  float* out = part_.data() + part * gradient_.numel();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const std::int64_t size = parameters_[i].numel();
    if (gradients[i].defined()) {
      const torch::Tensor contiguous = gradients[i].contiguous();
      std::copy_n(contiguous.data_ptr<float>(), size, out);
    } else {
      std::fill_n(out, size, 0.0F);
    }
    out += size;
  }
}

void BatchGradient::sum_parts(std::int64_t parts) {
  constexpr std::int64_t kBlock = 8192;  // floats; a block of the sum stays in the first-level cache
  const std::int64_t size = gradient_.numel();
  float* sum = gradient_.data_ptr<float>();
  pool_.run((size + kBlock - 1) / kBlock, [&](std::int64_t block, int) {
    const std::int64_t first = block * kBlock;
    const std::int64_t last = std::min(first + kBlock, size);
    std::copy(part_.data() + first, part_.data() + last, sum + first);
    for (std::int64_t part = 1; part < parts; ++part) {
      const float* from = part_.data() + part * size;
      for (std::int64_t i = first; i < last; ++i) sum[i] += from[i];
    }
  });
}

double BatchGradient::norm() const {
  const float* g = gradient_.data_ptr<float>();
  double sum = 0.0;
  for (std::int64_t i = 0; i < gradient_.numel(); ++i) sum += static_cast<double>(g[i]) * g[i];
  return std::sqrt(sum);
}

double clip_factor(double norm, double limit) { return limit > 0.0 && norm > limit ? limit / norm : 1.0; }

std::vector<torch::Tensor> tensors_of(const NamedParameters& parameters) {
  std::vector<torch::Tensor> tensors;
  for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
  return tensors;
}

}  // namespace efla::train
