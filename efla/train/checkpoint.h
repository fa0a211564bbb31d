// A checkpoint: a folder with everything that the next step depends on.
//   model.safetensors      the parameters (a task may add files that belong to its model)
//   optimizer.safetensors  adamw.exp_avg.NAME and adamw.exp_avg_sq.NAME of every parameter
//   trainer.json           {"format", "step", "examples", "position", "config"}
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/train/flat_parameters.h"

namespace efla::train {

struct TrainerState {
  std::int64_t step = 0;      // updates made
  std::int64_t examples = 0;  // examples that the updates saw
  nlohmann::json position;    // Task::position
  nlohmann::json config;      // what is trained: must be the same to resume
};

// Writes everything but the model, whose files the task writes. exp_avg and exp_avg_sq have the size of parameters and
// are on the CPU. The bytes depend on the arguments alone. Throws IoError.
void write_checkpoint(const std::filesystem::path& folder, const TrainerState& state, const FlatParameters& parameters,
                      const torch::Tensor& exp_avg, const torch::Tensor& exp_avg_sq);

// Returns a configuration without the places where its data lies, "data.train", "data.validation", "data.tokenizer" and
// "data.source": a run may be resumed with the same data at another place. A place that is "" says that there is no
// such data and stays.
nlohmann::json without_places(nlohmann::json config);

// Returns the path of a checkpoint's trainer.json, which errors name.
std::string trainer_file(const std::filesystem::path& folder);

// Reads trainer.json. Throws IoError(content) if it is not a checkpoint's.
TrainerState read_trainer_state(const std::filesystem::path& folder);

// Reads AdamW's moments into two flat buffers of the size of parameters. Throws IoError(content).
void read_moments(const std::filesystem::path& folder, const FlatParameters& parameters, const torch::Tensor& exp_avg,
                  const torch::Tensor& exp_avg_sq);

// Reads model.safetensors into the parameters. Throws IoError(content).
void read_parameters(const std::filesystem::path& folder, const nn::NamedParameters& parameters);

}  // namespace efla::train
