#include "efla/train/checkpoint.h"

#include <vector>

#include "efla/io/checkpoint_folder.h"
#include "efla/io/fields.h"
#include "efla/io/json.h"
#include "efla/io/safetensors/safetensors_folder.h"

namespace efla::train {
namespace {

constexpr const char* kFormat = "efla checkpoint 2";
constexpr const char* kOptimizerFile = "optimizer.safetensors";

}  // namespace

void write_checkpoint(const std::filesystem::path& folder, const TrainerState& state, const FlatParameters& parameters,
                      const torch::Tensor& exp_avg, const torch::Tensor& exp_avg_sq) {
  std::vector<io::NamedTensor> entries;
  for (const auto& entry : parameters.entries()) {
    entries.push_back(nn::named_tensor("adamw.exp_avg." + entry.name, parameters.view(exp_avg, entry)));
    entries.push_back(nn::named_tensor("adamw.exp_avg_sq." + entry.name, parameters.view(exp_avg_sq, entry)));
  }
  io::write_safetensors(folder / kOptimizerFile, entries, {{"format", kFormat}});
  const nlohmann::ordered_json trainer = {{"format", kFormat},
                                          {"step", state.step},
                                          {"examples", state.examples},
                                          {"position", state.position},
                                          {"config", state.config}};
  io::write_file_atomically(folder / io::kTrainerFile, trainer.dump(2) + "\n");
}

nlohmann::json without_places(nlohmann::json config) {
  if (!config.is_object() || !config.contains("data") || !config["data"].is_object()) return config;
  for (const char* place : {"train", "validation", "tokenizer", "source"}) {
    const auto found = config["data"].find(place);
    if (found != config["data"].end() && found->is_string() && *found != "") config["data"].erase(found);
  }
  return config;
}

std::string trainer_file(const std::filesystem::path& folder) { return (folder / io::kTrainerFile).string(); }

TrainerState read_trainer_state(const std::filesystem::path& folder) {
  const std::string path = trainer_file(folder);
  const nlohmann::json trainer = io::read_json(path);
  const io::Fields fields(trainer, io::refuse_in_file(path));
  if (fields.get<std::string>("format") != kFormat) fields.refuse("format", io::shown(kFormat));
  TrainerState state;
  state.step = fields.get<std::int64_t>("step", 0, INT64_MAX);
  state.examples = fields.get<std::int64_t>("examples", 0, INT64_MAX);
  state.position = fields.object("position").content();
  state.config = fields.object("config").content();
  return state;
}

void read_moments(const std::filesystem::path& folder, const FlatParameters& parameters, const torch::Tensor& exp_avg,
                  const torch::Tensor& exp_avg_sq) {
  const io::SafetensorsFile file(folder / kOptimizerFile);
  for (const auto& entry : parameters.entries()) {
    nn::read_tensor(file, "adamw.exp_avg." + entry.name, parameters.view(exp_avg, entry));
    nn::read_tensor(file, "adamw.exp_avg_sq." + entry.name, parameters.view(exp_avg_sq, entry));
  }
}

void read_parameters(const std::filesystem::path& folder, const nn::NamedParameters& parameters) {
  const io::SafetensorsFile file(folder / io::kWeightsFile);
  for (const auto& [name, parameter] : parameters) nn::read_tensor(file, name, parameter);
}

}  // namespace efla::train
