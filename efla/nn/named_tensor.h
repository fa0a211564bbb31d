// Names the parameters of a model, and converts tensors to and from entries of safetensors files.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

#include "efla/io/safetensors/safetensors.h"

namespace efla::nn {

using NamedParameters = std::vector<std::pair<std::string, torch::Tensor>>;

// Returns the parameters of a model, in the order in which they were registered.
NamedParameters named_parameters(const torch::nn::Module& model);

// Returns the device of a model's parameters; the CPU if there are none.
torch::Device device_of(const NamedParameters& parameters);

// Moves the parameters to a device. The tensors stay the same objects.
void move_to(const NamedParameters& parameters, torch::Device device);

// Returns an entry that shares the tensor's bytes. The tensor is float32 or int64, contiguous, on the CPU and outlives
// the entry.
io::NamedTensor named_tensor(const std::string& name, const torch::Tensor& tensor);

// Copies an entry of the file into a float32 tensor, which must have the entry's shape, or into a new one of these
// sizes on the CPU. Widens half precision (F16, BF16). Throws IoError(content) if there is no such entry, or if it has
// another type or shape.
void read_tensor(const io::SafetensorsFile& file, const std::string& name, const torch::Tensor& into);
torch::Tensor read_tensor(const io::SafetensorsFile& file, const std::string& name, at::IntArrayRef sizes);

}  // namespace efla::nn
