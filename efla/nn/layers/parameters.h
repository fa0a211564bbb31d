// Parameters with the names of checkpoints, and initial values that depend only on a seed and the name.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace efla::nn {

// Draws the initial values of parameters. Each parameter has its own stream of random numbers, selected by the seed and
// its full name, so that models that differ in one part have equal initial values in all other parts.
class Initialiser {
 public:
  explicit Initialiser(std::uint64_t seed) : seed_(seed) {}

  // Returns an initialiser with the same seed for a part of the model. Full names then begin with "part.".
  Initialiser within(const std::string& part) const;

  // Returns an initialiser with the same seed whose function weight draws normal numbers with this standard deviation.
  Initialiser with_deviation(double deviation) const;

  // Returns an initialiser that sets no values, for parameters that are read from a file.
  static Initialiser open();

  // Return float32 tensors of random numbers: uniform in [−bound, bound), and normal with mean 0.
  torch::Tensor uniform(const std::string& name, at::IntArrayRef sizes, double bound) const;
  torch::Tensor normal(const std::string& name, at::IntArrayRef sizes, double deviation) const;

  // Returns the initial values of the parameter "weight" of a part that sums over `inputs` values: uniform in
  // ±1/√inputs like PyTorch's Linear and Conv1d, or normal if a deviation is set.
  torch::Tensor weight(at::IntArrayRef sizes, std::int64_t inputs) const;

 private:
  std::uint64_t seed_;
  std::string prefix_;
  std::optional<double> deviation_;
  bool open_ = false;
};

// A module with one parameter, "weight": a projection, a convolution or a norm, with its name in checkpoints.
class Weight : public torch::nn::Module {
 public:
  explicit Weight(torch::Tensor initial) : value(register_parameter("weight", std::move(initial))) {}

  torch::Tensor value;
};

// Returns the initial values of a projection [out, in].
inline torch::Tensor linear_weight(const Initialiser& init, std::int64_t out, std::int64_t in) {
  return init.weight({out, in}, in);
}

// Registers a projection [out, in] in a module. A dot in the name separates modules: "f_proj.0" is registered in the
// module f_proj, which is added if it is missing.
std::shared_ptr<Weight> add_projection(torch::nn::Module& owner, const Initialiser& init, const std::string& name,
                                       std::int64_t out, std::int64_t in);

// Registers the weight [width] of a norm, with ones, in a module.
std::shared_ptr<Weight> add_norm(torch::nn::Module& owner, const std::string& name, std::int64_t width);

}  // namespace efla::nn
