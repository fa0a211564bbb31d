// Checkpoints: one safetensors file with all that the next step depends on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/io/safetensors.h"
#include "efla/train/flat_parameters.h"

namespace efla::train {

// Writes model.NAME, adamw.exp_avg.NAME and adamw.exp_avg_sq.NAME of every parameter, and the metadata format, step and
// run. The bytes depend on the arguments alone. Throws IoError; the file is whole or as before.
void write_checkpoint(const std::filesystem::path& path, const FlatParameters& parameters, const FlatAdamW& optimizer,
                      std::int64_t step, const nlohmann::json& run);

// An open checkpoint. Every function throws IoError(content) for what write_checkpoint would not have written.
class Checkpoint {
 public:
  explicit Checkpoint(const std::filesystem::path& path);

  std::int64_t step() const { return step_; }         // updates made
  const nlohmann::json& run() const { return run_; }  // what was trained, as given to write_checkpoint

  void read_parameters(const NamedParameters& parameters) const;
  void read_moments(const FlatParameters& parameters, FlatAdamW& optimizer) const;

 private:
  io::SafetensorsFile file_;
  std::int64_t step_ = 0;
  nlohmann::json run_;
};

}  // namespace efla::train
