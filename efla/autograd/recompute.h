// Activation checkpointing: needs less memory and more time.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

namespace efla::autograd {

// Returns f(x). Only x is kept for the backward, which computes f again. f must depend only on x and on parameters
// (leaves of the graph) and give the same bits every time. `parameters` must have every leaf whose gradient is wanted.
// Chen et al., "Training deep nets with sublinear memory cost", 2016.
at::Tensor recompute(const std::function<at::Tensor(const at::Tensor&)>& f, const at::Tensor& x,
                     const std::vector<at::Tensor>& parameters);

}  // namespace efla::autograd
