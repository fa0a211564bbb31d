// Parameters with the names of checkpoints and initial values that depend on a seed and the name alone.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace efla::nn {

// Where the initial values of parameters come from. Each parameter draws from a stream of its own, chosen by the seed
// and its full name, so that models that differ in one part start alike in all others.
class Initialiser {
 public:
  explicit Initialiser(std::uint64_t seed, std::string prefix = {}) : seed_(seed), prefix_(std::move(prefix)) {}

  // The same seed for a part of the model: names below it are "part.name".
  Initialiser within(const std::string& part) const;

  // The same with weights (below) that are normal.
  Initialiser with_deviation(double deviation) const;

  // Leaves every value open, for parameters that are read from a file.
  static Initialiser open();

  // float32 tensors. uniform: in [−bound, bound); normal: mean 0.
  torch::Tensor uniform(const std::string& name, at::IntArrayRef sizes, double bound) const;
  torch::Tensor normal(const std::string& name, at::IntArrayRef sizes, double deviation) const;

  // The parameter "weight" of a part that sums over so many inputs: uniform in ±1/√inputs as PyTorch's Linear and
  // Conv1d start, or normal where a deviation is set.
  torch::Tensor weight(at::IntArrayRef sizes, std::int64_t inputs) const;

 private:
  std::uint64_t seed_;
  std::string prefix_;
  std::optional<double> deviation_;
  bool open_ = false;
};

// A module with one parameter, "weight": a projection, a convolution or a norm as checkpoints name them.
class Weight : public torch::nn::Module {
 public:
  explicit Weight(torch::Tensor initial) : value(register_parameter("weight", std::move(initial))) {}

  torch::Tensor value;
};

// A projection [out, in].
inline torch::Tensor linear_weight(const Initialiser& init, std::int64_t out, std::int64_t in) {
  return init.weight({out, in}, in);
}

}  // namespace efla::nn
