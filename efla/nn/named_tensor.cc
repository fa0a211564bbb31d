#include "efla/nn/named_tensor.h"

#include <torch/types.h>

#include <cstring>

#include "efla/autograd/tensor_view.h"
#include "efla/io/content_error.h"
#include "efla/rule/validate.h"

namespace efla::nn {
namespace {

using io::TensorType;

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
  const io::NamedTensor* from = file.find(name);
  if (!from) io::fail_in(file.path(), "has no tensor " + name);
  const auto type = from->type;
  const bool half = type == TensorType::F16 || type == TensorType::BF16;
  if ((!half && type != TensorType::F32) || from->shape != into.sizes().vec()) {
    io::fail_in(file.path(), name + " is " + std::string(io::type_name(type)) + " " +
                                 efla::shape_text(from->shape.data(), static_cast<int>(from->shape.size())) +
                                 ", expected F32 " + autograd::shape_text(into));
  }
  if (!half && into.device().is_cpu()) {
    std::memcpy(into.data_ptr(), from->bytes.data(), from->bytes.size());
    return;
  }
  const auto read = torch::empty(into.sizes(), type == TensorType::F32   ? torch::kFloat
                                               : type == TensorType::F16 ? torch::kHalf
                                                                         : torch::kBFloat16);
  std::memcpy(read.data_ptr(), from->bytes.data(), from->bytes.size());
  const torch::NoGradGuard no_grad;
  into.copy_(read);
}

}  // namespace efla::nn
