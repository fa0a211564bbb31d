#include "efla/train/flat_parameters.h"

#include <torch/version.h>

#include <algorithm>
#include <cmath>

#include "efla/base/error.h"

namespace efla::train {
namespace {

constexpr std::int64_t kBlock = 1 << 15;  // floats of a task: long enough to be worth handing out

std::int64_t blocks_of(Range range) { return (range.size() + kBlock - 1) / kBlock; }

Range block_of(Range range, std::int64_t block) {
  return {range.begin + block * kBlock, std::min(range.begin + (block + 1) * kBlock, range.end)};
}

}  // namespace

bool weight_decays(const std::string& name, const torch::Tensor& parameter) {
  return parameter.dim() >= 2 && !name.ends_with("A_log") && !name.ends_with("dt_bias") &&
         name.find("position") == std::string::npos;
}

FlatParameters::FlatParameters(const nn::NamedParameters& parameters, torch::Device device) {
  std::int64_t size = 0;
  for (const auto& [name, parameter] : parameters) {
    entries_.push_back(
        {name, parameter.sizes().vec(), {size, size + parameter.numel()}, weight_decays(name, parameter)});
    size += parameter.numel();
  }
  values_ = torch::empty({size}, torch::TensorOptions(torch::kFloat32).device(device));
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < entries_.size(); ++i) view(values_, entries_[i]).copy_(parameters[i].second);
  share(parameters);
}

void FlatParameters::share(const nn::NamedParameters& copy) const {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    torch::Tensor parameter = copy[i].second;
    parameter.set_data(view(values_, entries_[i]));
  }
}

torch::Tensor FlatParameters::view(const torch::Tensor& flat, const Entry& entry) const {
  return flat.narrow(0, entry.range.begin, entry.range.size()).view(entry.shape);
}

FlatAdamW::FlatAdamW(const FlatParameters& parameters, const AdamWSettings& settings, Range range)
    : parameters_(parameters), settings_(settings), range_(range) {
  exp_avg_ = torch::zeros({range.size()}, parameters.values().options());
  exp_avg_sq_ = torch::zeros({range.size()}, parameters.values().options());
  for (const auto& entry : parameters.entries()) {
    const Range part{std::max(entry.range.begin, range.begin), std::min(entry.range.end, range.end)};
    if (part.size() <= 0) continue;
    if (stretches_.empty() || stretches_.back().decays != entry.decays) stretches_.push_back({part, entry.decays});
    stretches_.back().range.end = part.end;
  }
  for (const Stretch& stretch : stretches_) {
    for (std::int64_t i = 0; i < blocks_of(stretch.range); ++i) {
      blocks_.push_back({block_of(stretch.range, i), stretch.decays});
    }
  }
}

void FlatAdamW::step(const torch::Tensor& gradient, double scale, double lr, ThreadPool& pool) {
  ++steps_;
  const auto power = static_cast<double>(steps_);
  const double correction1 = 1.0 - std::pow(settings_.beta1, power);
  const double correction2 = 1.0 - std::pow(settings_.beta2, power);
  Factors plain{};
  plain.gradient = static_cast<float>(scale);
  plain.decay = 1.0F;
  plain.keep1 = static_cast<float>(settings_.beta1);
  plain.add1 = static_cast<float>(1.0 - settings_.beta1);
  plain.keep2 = static_cast<float>(settings_.beta2);
  plain.add2 = static_cast<float>(1.0 - settings_.beta2);
  plain.step = static_cast<float>(lr / correction1);
  plain.correction2 = static_cast<float>(1.0 / std::sqrt(correction2));
  plain.eps = static_cast<float>(settings_.eps);
  Factors decaying = plain;
  decaying.decay = static_cast<float>(1.0 - lr * settings_.weight_decay);
  if (gradient.is_cpu()) {
    step_on_cpu(gradient, decaying, plain, pool);
  } else {
    step_on_device(gradient, scale, lr);
  }
}

void FlatAdamW::step_on_cpu(const torch::Tensor& gradient, const Factors& decaying, const Factors& plain,
                            ThreadPool& pool) {
  pool.run(static_cast<std::int64_t>(blocks_.size()), [&](std::int64_t task, int) {
    const Stretch& block = blocks_[task];
    const Factors f = block.decays ? decaying : plain;
    const std::int64_t first = block.range.begin, size = block.range.size();
    const float* __restrict g = gradient.data_ptr<float>() + first;
    float* __restrict p = parameters_.values().data_ptr<float>() + first;
    float* __restrict m = exp_avg_.data_ptr<float>() + (first - range_.begin);
    float* __restrict v = exp_avg_sq_.data_ptr<float>() + (first - range_.begin);
    for (std::int64_t i = 0; i < size; ++i) {
      const float x = g[i] * f.gradient;
      m[i] = f.keep1 * m[i] + f.add1 * x;
      v[i] = f.keep2 * v[i] + f.add2 * x * x;
      p[i] = f.decay * p[i] - f.step * m[i] / (std::sqrt(v[i]) * f.correction2 + f.eps);
    }
  });
}

FlatAdamW::Views FlatAdamW::views(const torch::Tensor& gradient, bool decay) const {
  Views of;
  for (const Stretch& stretch : stretches_) {
    if (stretch.decays != decay) continue;
    const std::int64_t begin = stretch.range.begin, size = stretch.range.size();
    of.values.push_back(parameters_.values().narrow(0, begin, size));
    of.gradients.push_back(gradient.narrow(0, begin, size));
    of.exp_avg.push_back(exp_avg_.narrow(0, begin - range_.begin, size));
    of.exp_avg_sq.push_back(exp_avg_sq_.narrow(0, begin - range_.begin, size));
  }
  return of;
}

void FlatAdamW::step_on_device([[maybe_unused]] const torch::Tensor& gradient, [[maybe_unused]] double scale,
                               [[maybe_unused]] double lr) {
#if TORCH_VERSION_MAJOR >= 2
  const torch::NoGradGuard no_grad;
  const auto options = parameters_.values().options();
  const torch::Tensor steps = torch::full({}, static_cast<double>(steps_), options);
  const torch::Tensor divisor = torch::full({}, 1.0 / scale, options);  // of the gradient
  if (!gradient.is_same(gradient_)) {
    decaying_ = views(gradient, true);
    plain_ = views(gradient, false);
    gradient_ = gradient;
  }
  for (Views* of : {&plain_, &decaying_}) {
    if (of->values.empty()) continue;
    const std::vector<torch::Tensor> counts(of->values.size(), steps);
    at::_fused_adamw_(of->values, of->gradients, of->exp_avg, of->exp_avg_sq, {}, counts, lr, settings_.beta1,
                      settings_.beta2, of == &decaying_ ? settings_.weight_decay : 0.0, settings_.eps,
                      /*amsgrad=*/false, /*maximize=*/false, divisor);
  }
#else
  throw Error("train", "device", "cuda with LibTorch " TORCH_VERSION, "LibTorch 2 or later");
#endif
}

torch::Tensor sum_of_squares(const torch::Tensor& flat, Range range, ThreadPool& pool) {
  if (!flat.is_cpu()) {  // in float32, because LibTorch would first copy the gradient for sums in float64
    return at::norm(flat.narrow(0, range.begin, range.size())).to(torch::kDouble).square();
  }
  std::vector<double> sums(static_cast<std::size_t>(blocks_of(range)));
  pool.run(blocks_of(range), [&](std::int64_t task, int) {
    const Range block = block_of(range, task);
    const float* x = flat.data_ptr<float>();
    double sum = 0.0;
    for (std::int64_t i = block.begin; i < block.end; ++i) sum += static_cast<double>(x[i]) * x[i];
    sums[task] = sum;
  });
  double sum = 0.0;
  for (const double part : sums) sum += part;
  return torch::full({}, sum, torch::kDouble);
}

}  // namespace efla::train
