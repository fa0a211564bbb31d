// The model that a benchmark generates with.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "efla/engine/engine.h"

namespace efla::bench {

// A preset with random weights, or the model of a folder.
struct BenchModel {
  std::string preset, mixer;
  std::filesystem::path folder = {};  // instead of the preset, unless it is empty

  // Returns the preset, or the folder's own name.
  std::string name() const;
  // Returns the mixer, or a family's model_type.
  std::string kind() const;
  // Throws Error for an unknown preset or mixer, and IoError for a folder without a model.
  void check() const;
  // Starts an engine over the model, with ids as tokens, of which none ends a text.
  std::unique_ptr<engine::Engine> start(engine::EngineOptions options) const;
};

}  // namespace efla::bench
