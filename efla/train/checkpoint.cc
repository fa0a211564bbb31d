#include "efla/train/checkpoint.h"

#include <vector>

#include "efla/base/error.h"
#include "efla/io/json.h"
#include "efla/io/safetensors/safetensors.h"

namespace efla::train {
namespace {

constexpr const char* kFormat = "efla checkpoint 2";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kTrainerFile = "trainer.json";

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw IoError(IoError::Kind::content, path, -1, what);
}

template <class T>
T field(const nlohmann::json& json, const char* name, const std::string& path) {
  try {
    return json.at(name).get<T>();
  } catch (const nlohmann::json::exception&) {
    refuse(path, std::string("has no ") + name + ", or one of another type");
  }
}

std::int64_t count_field(const nlohmann::json& json, const char* name, const std::string& path) {
  if (!json.contains(name) || !json.at(name).is_number_integer() || json.at(name) < 0) {
    refuse(path, std::string("its ") + name + " is not a count");
  }
  return json.at(name).get<std::int64_t>();
}

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
  io::write_file_atomically(folder / kTrainerFile, trainer.dump(2) + "\n");
}

TrainerState read_trainer_state(const std::filesystem::path& folder) {
  const std::string path = (folder / kTrainerFile).string();
  const nlohmann::json trainer = io::read_json(path);
  if (!trainer.is_object() || trainer.value("format", nlohmann::json()) != kFormat) {
    refuse(path, std::string("its format is not \"") + kFormat + "\"");
  }
  TrainerState state;
  state.step = count_field(trainer, "step", path);
  state.examples = count_field(trainer, "examples", path);
  state.position = field<nlohmann::json>(trainer, "position", path);
  state.config = field<nlohmann::json>(trainer, "config", path);
  if (!state.config.is_object()) refuse(path, "its config is not a JSON object");
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
  const io::SafetensorsFile file(folder / kModelFile);
  for (const auto& [name, parameter] : parameters) nn::read_tensor(file, name, parameter);
}

}  // namespace efla::train
