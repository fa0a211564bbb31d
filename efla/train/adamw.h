// LibTorch's AdamW over named parameters, and access to its moments for checkpoints.
#pragma once

#include <torch/optim/adamw.h>

#include <string>
#include <utility>
#include <vector>

#include "efla/train/options.h"

namespace efla::train {

using NamedParameters = std::vector<std::pair<std::string, torch::Tensor>>;

// Without their names.
std::vector<torch::Tensor> tensors_of(const NamedParameters& parameters);

// betas 0.9 and 0.999, eps 1e-8. Weight decay acts on parameters of two and more dimensions except position tables;
// biases and the scales of norms have one dimension.
torch::optim::AdamW make_adamw(const NamedParameters& parameters, const TrainOptions& options);

void set_learning_rate(torch::optim::AdamW& optimizer, double lr);

// The state of one parameter: exp_avg, exp_avg_sq and step; zeros where it has not been updated yet.
torch::optim::AdamWParamState& adamw_state(torch::optim::AdamW& optimizer, const torch::Tensor& parameter);

}  // namespace efla::train
