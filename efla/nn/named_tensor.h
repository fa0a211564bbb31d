// Tensors to and from the entries of safetensors files.
#pragma once

#include <torch/types.h>

#include <string>

#include "efla/io/safetensors.h"

namespace efla::nn {

// An entry whose bytes are the tensor's, which is contiguous, on the CPU and outlives it. float32 or int64.
io::NamedTensor named_tensor(const std::string& name, const torch::Tensor& tensor);

// Copies an entry of the file into the float32 tensor, which has its shape. Half precision (F16, BF16) is widened.
// Throws IoError(content) where the file has no such entry, or one of another type or shape.
void read_tensor(const io::SafetensorsFile& file, const std::string& name, const torch::Tensor& into);

}  // namespace efla::nn
