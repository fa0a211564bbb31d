#include "efla/train/task.h"

#include "efla/io/safetensors/safetensors_folder.h"
#include "efla/train/checkpoint.h"

namespace efla::train {

void Task::write_model(const std::filesystem::path& folder, const FlatParameters& parameters) const {
  const torch::Tensor values = parameters.values().to(torch::kCPU);
  std::vector<io::NamedTensor> entries;
  for (const auto& entry : parameters.entries()) {
    entries.push_back(nn::named_tensor(entry.name, parameters.view(values, entry)));
  }
  io::write_safetensors(folder / io::kWeightsFile, entries);
}

void Task::read_model(const std::filesystem::path& folder, const FlatParameters& parameters) {
  nn::NamedParameters views;
  for (const auto& entry : parameters.entries()) {
    views.emplace_back(entry.name, parameters.view(parameters.values(), entry));
  }
  read_parameters(folder, views);
}

}  // namespace efla::train
