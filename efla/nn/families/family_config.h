// The configuration of a model of a family (family.h): config.json and generation_config.json as transformers writes
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "efla/io/fields.h"
#include "efla/nn/families/family.h"
#include "efla/nn/layers/mixer_plan.h"

namespace efla::nn {

// Of the layers with a mixture of experts.
struct ExpertsConfig {
  std::int64_t count = 0, per_token = 0;     // 0: no layer has experts
  std::int64_t width = 0, shared_width = 0;  // intermediate sizes of an expert, and of the one of all tokens
  bool normalised = true;                    // a token's weights are divided by their sum
};

struct FamilyConfig {
  const Family* family = nullptr;
  std::int64_t vocab_size = 0;  // rows of the embeddings; the tokenizer may have fewer ids
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;  // of an MLP; 0: all layers have experts
  ExpertsConfig experts;
  std::vector<bool> sparse;                                   // per layer: experts instead of an MLP
  std::vector<bool> attends;                                  // per layer: softmax attention instead of the delta rule
  MixerConfig mixer;                                          // of the delta layers
  std::int64_t heads = 0, key_value_heads = 0, head_dim = 0;  // of the attention layers
  std::int64_t rotary = 0;                                    // rotated elements of each head
  double rope_theta = 10000.0;
  double norm_eps = 1e-6;
  bool tied = false;  // the head has the weight of the embeddings
  std::optional<std::int64_t> bos = {};
  std::vector<std::int64_t> eos = {};  // ids that end a text

  std::int64_t layers() const { return std::ssize(attends); }
  std::int64_t attention_layers() const { return std::count(attends.begin(), attends.end(), true); }
};

// Returns whether the folder's config.json has the model_type of a family. Throws IoError for one that cannot be read.
bool is_family_folder(const std::filesystem::path& folder);

// Reads config.json and the eos_token_id of generation_config.json. Throws IoError(content) that names the field: for a
// family whose layers efla does not have, a value that is not supported, and an unknown field, which may change what
// the model computes.
FamilyConfig load_family_config(const std::filesystem::path& folder);

// Reads the object of a config.json.
FamilyConfig family_config_from_json(const io::Fields& fields);

}  // namespace efla::nn
