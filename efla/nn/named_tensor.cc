#include "efla/nn/named_tensor.h"

#include <torch/types.h>

#include <cstring>

#include "efla/base/text.h"
#include "efla/io/content_error.h"

namespace efla::nn {
namespace {

using io::TensorType;

bool is_half(TensorType type) { return type == TensorType::F16 || type == TensorType::BF16; }

// Returns an entry of the file. Throws IoError(content) unless it is one of float32 or half precision of these sizes.
const io::NamedTensor& entry_of(const io::SafetensorsFile& file, const std::string& name, at::IntArrayRef sizes) {
  const io::NamedTensor* entry = file.find(name);
  if (!entry) io::fail_in(file.path(), "has no tensor " + name);
  if ((!is_half(entry->type) && entry->type != TensorType::F32) || entry->shape != sizes.vec()) {
    const auto text = [](at::IntArrayRef shape) { return shape_text(shape.data(), static_cast<int>(shape.size())); };
    io::fail_in(file.path(), name + " is " + std::string(io::type_name(entry->type)) + " " + text(entry->shape) +
                                 ", expected F32 " + text(sizes));
  }
  return *entry;
}

}  // namespace

NamedParameters named_parameters(const torch::nn::Module& model) {
  NamedParameters parameters;
  for (const auto& parameter : model.named_parameters()) parameters.emplace_back(parameter.key(), parameter.value());
  return parameters;
}

void move_to(const NamedParameters& parameters, torch::Device device) {
  for (auto [name, parameter] : parameters) parameter.set_data(parameter.detach().to(device));
}

torch::Device device_of(const NamedParameters& parameters) {
  return parameters.empty() ? torch::Device(torch::kCPU) : parameters.front().second.device();
}

io::NamedTensor named_tensor(const std::string& name, const torch::Tensor& tensor) {
  return {name,
          tensor.scalar_type() == torch::kLong ? TensorType::I64 : TensorType::F32,
          tensor.sizes().vec(),
          {static_cast<const std::uint8_t*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.nbytes())}};
}

void read_tensor(const io::SafetensorsFile& file, const std::string& name, const torch::Tensor& into) {
  const io::NamedTensor& from = entry_of(file, name, into.sizes());
  if (!is_half(from.type) && into.device().is_cpu()) {
    std::memcpy(into.data_ptr(), from.bytes.data(), from.bytes.size());
    return;
  }
  const auto read = torch::empty(into.sizes(), from.type == TensorType::F32   ? torch::kFloat
                                               : from.type == TensorType::F16 ? torch::kHalf
                                                                              : torch::kBFloat16);
  std::memcpy(read.data_ptr(), from.bytes.data(), from.bytes.size());
  const torch::NoGradGuard no_grad;
  into.copy_(read);
}

torch::Tensor read_tensor(const io::SafetensorsFile& file, const std::string& name, at::IntArrayRef sizes) {
  entry_of(file, name, sizes);  // before memory is allocated for sizes that the file may not have
  const auto tensor = torch::empty(sizes);
  read_tensor(file, name, tensor);
  return tensor;
}

}  // namespace efla::nn
