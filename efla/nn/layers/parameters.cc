#include "efla/nn/layers/parameters.h"

#include <torch/types.h>

#include <cmath>

#include "efla/base/fnv1a.h"
#include "efla/base/random.h"

namespace efla::nn {
namespace {

template <class Draw>
torch::Tensor filled(at::IntArrayRef sizes, Draw&& draw) {
  torch::Tensor tensor = torch::empty(sizes, torch::kFloat);
  float* values = tensor.data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) values[i] = static_cast<float>(draw());
  return tensor;
}

}  // namespace

Initialiser Initialiser::within(const std::string& part) const {
  Initialiser inner = *this;
  inner.prefix_ += part + ".";
  return inner;
}

Initialiser Initialiser::with_deviation(double deviation) const {
  Initialiser normal = *this;
  normal.deviation_ = deviation;
  return normal;
}

Initialiser Initialiser::open() {
  Initialiser init(0);
  init.open_ = true;
  return init;
}

torch::Tensor Initialiser::uniform(const std::string& name, at::IntArrayRef sizes, double bound) const {
  if (open_) return torch::empty(sizes, torch::kFloat);
  Random random(seed_, fnv1a(prefix_ + name));
  return filled(sizes, [&] { return random.uniform(-bound, bound); });
}

torch::Tensor Initialiser::normal(const std::string& name, at::IntArrayRef sizes, double deviation) const {
  if (open_) return torch::empty(sizes, torch::kFloat);
  Random random(seed_, fnv1a(prefix_ + name));
  return filled(sizes, [&] { return deviation * random.normal(); });
}

torch::Tensor Initialiser::weight(at::IntArrayRef sizes, std::int64_t inputs) const {
  if (deviation_) return normal("weight", sizes, *deviation_);
  return uniform("weight", sizes, 1.0 / std::sqrt(static_cast<double>(inputs)));
}

std::shared_ptr<Weight> add_projection(torch::nn::Module& owner, const Initialiser& init, const std::string& name,
                                       std::int64_t out, std::int64_t in) {
  torch::nn::Module* parent = &owner;
  const auto dot = name.find('.');
  if (dot != std::string::npos) {
    const std::string outer = name.substr(0, dot);
    const auto children = owner.named_children();
    parent = children.contains(outer) ? children[outer].get()
                                      : owner.register_module(outer, std::make_shared<torch::nn::Module>()).get();
  }
  const std::string inner = name.substr(dot == std::string::npos ? 0 : dot + 1);
  return parent->register_module(inner, std::make_shared<Weight>(linear_weight(init.within(name), out, in)));
}

std::shared_ptr<Weight> add_norm(torch::nn::Module& owner, const std::string& name, std::int64_t width) {
  return owner.register_module(name, std::make_shared<Weight>(torch::ones({width})));
}

}  // namespace efla::nn
