// The parameters of a module by name.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <map>
#include <string>

namespace efla::nn {

inline std::map<std::string, torch::Tensor> parameters_of(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> parameters;
  for (const auto& item : module.named_parameters()) parameters[item.key()] = item.value();
  return parameters;
}

}  // namespace efla::nn
