// The gradient of a batch, computed in parts that run side by side on a pool's threads.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "efla/base/threads.h"
#include "efla/train/flat_parameters.h"

namespace efla::train {

// Each part's graph is built and differentiated on one thread, so its activations stay in that core's cache, and its
// gradient goes into a slot of its own; the slots are summed in the order of the parts. The result has the same bits
// for any number of threads.
class BatchGradient {
 public:
  // parameters: float32 leaves on the CPU. pool outlives this object.
  BatchGradient(std::vector<torch::Tensor> parameters, ThreadPool& pool);

  // gradient() = Σ_i ∂ part_loss(i) / ∂ parameters over i in [0, parts); part_loss builds a scalar's graph, is called
  // from the pool's threads, and only reads the parameters. A parameter without a path to a loss gets zeros. Returns
  // Σ_i part_loss(i).
  double compute(std::int64_t parts, const std::function<torch::Tensor(std::int64_t part)>& part_loss);

  // All parameters' gradients behind one another, in their order.
  const torch::Tensor& gradient() const { return gradient_; }

  // The gradient's Euclidean norm.
  double norm() const;

 private:
  void store_part(std::int64_t part, const std::vector<torch::Tensor>& gradients);
  void sum_parts(std::int64_t parts);

  std::vector<torch::Tensor> parameters_;
  ThreadPool& pool_;
  torch::Tensor gradient_;           // [N]
  std::vector<float> part_;          // [parts, N]
  std::vector<double> part_losses_;  // [parts]
};

// Returns the factor that brings a gradient of this norm down to the limit; 1 where it is below, and for limit 0.
double clip_factor(double norm, double limit);

// Returns the parameters without their names.
std::vector<torch::Tensor> tensors_of(const NamedParameters& parameters);

}  // namespace efla::train
