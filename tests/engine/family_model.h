// Engines over small models of families with random weights, whose texts take pages.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/engine.h"
#include "tests/nn/random_family.h"
#include "tests/support/temp_folder.h"

namespace efla::engine {

// A folder with a model of olmo_hybrid or of qwen3_5_text, whose tokens are bytes and some rows of padding. The latter
// may have a head for drafts.
class FamilyFolder {
 public:
  explicit FamilyFolder(bool olmo,
                        const std::vector<std::string>& layers = {"linear_attention", "full_attention",
                                                                  "linear_attention", "full_attention"},
                        bool draft_head = false) {
    auto config = nn::random_family_config(olmo, 11);
    config["vocab_size"] = 300;
    config["layer_types"] = layers;
    config["num_hidden_layers"] = layers.size();
    auto tensors = nn::random_family_tensors(config, "model.", 12);
    if (draft_head) nn::add_draft_head(tensors, config);
    nn::write_family_folder(folder_.path(), config, tensors, false, false);
  }
  std::unique_ptr<Engine> engine(const EngineOptions& options = {}) const {
    return load_engine(folder_.path(), data::load_tokenizer("bytes"), options);
  }

  const std::filesystem::path& path() const { return folder_.path(); }

 private:
  const test::TempFolder folder_;
};

}  // namespace efla::engine
