#include "efla/nn/layers/parameters.h"

#include <torch/types.h>

#include <cmath>

#include "efla/base/random.h"

namespace efla::nn {
namespace {

// FNV-1a, 64 bits: the same on every machine.
std::uint64_t hash(const std::string& name) {
  std::uint64_t h = 0xcbf29ce484222325U;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return h;
}

template <class Draw>
torch::Tensor filled(at::IntArrayRef sizes, Draw&& draw) {
  torch::Tensor tensor = torch::empty(sizes, torch::kFloat);
  float* values = tensor.data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) values[i] = static_cast<float>(draw());
  return tensor;
}

}  // namespace

torch::Tensor Initialiser::uniform(const std::string& name, at::IntArrayRef sizes, double bound) const {
  Random random(seed_, hash(prefix_ + name));
  return filled(sizes, [&] { return random.uniform(-bound, bound); });
}

torch::Tensor Initialiser::normal(const std::string& name, at::IntArrayRef sizes, double deviation) const {
  Random random(seed_, hash(prefix_ + name));
  return filled(sizes, [&] { return deviation * random.normal(); });
}

torch::Tensor linear_weight(const Initialiser& init, std::int64_t out, std::int64_t in) {
  return init.uniform("weight", {out, in}, 1.0 / std::sqrt(static_cast<double>(in)));
}

}  // namespace efla::nn
