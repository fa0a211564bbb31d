#include "efla/nn/models/language_model_file.h"

#include <torch/types.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/base/error.h"
#include "efla/base/text.h"
#include "efla/io/checkpoint_folder.h"
#include "efla/io/content_error.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/io/safetensors/safetensors_folder.h"
#include "efla/nn/families/gguf_config.h"
#include "efla/nn/models/config_fields.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/nn/named_tensor.h"

namespace efla::nn {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigFile = "config.json";
constexpr const char* kGenerationFile = "generation_config.json";

// What transformers runs for this model where trust_remote_code is set, in a program that does not import efla.hf. The
// package's save_pretrained writes the same file (python/efla/hf/configuration.py).
constexpr const char* kCodeFile = "efla_model.py";
constexpr const char* kCode =
    "# Loads this model where trust_remote_code is set. Needs the Python package efla.\n"
    "from efla.hf import *  # noqa: F403\n";
constexpr const char* kEmbeddings = "model.embeddings.weight";
constexpr const char* kHead = "lm_head.weight";

// Returns the field auto_map of config.json: which classes of kCodeFile a model type has in transformers; null for
// none. The configuration of type efla refuses the mixers that the package does not have.
nlohmann::json auto_map(const std::string& model_type) {
  const std::string name = model_type == "delta_net"        ? "DeltaNet"
                           : model_type == "gated_deltanet" ? "GatedDeltaNet"
                           : model_type == "kda"            ? "KDA"
                           : model_type == "efla"           ? "Efla"
                                                            : "";
  if (name.empty()) return nullptr;
  const std::string prefix = "efla_model." + name;
  return {{"AutoConfig", prefix + "Config"},
          {"AutoModel", prefix + "Model"},
          {"AutoModelForCausalLM", prefix + "ForCausalLM"}};
}

// Checks that the model and the folder have the same tensors. A folder of tied embeddings may have the head too.
void check_names(const io::SafetensorsFolder& folder, const LanguageModel& model) {
  std::vector<std::string> names;
  for (const auto& parameter : model.named_parameters()) names.push_back(parameter.key());
  for (const auto& name : names) {
    if (!folder.file_with(name))
      io::fail_in(folder.path(), "has no tensor " + name + ", which the model of its config.json has");
  }
  for (const auto& name : folder.names()) {
    if (name == kHead && model.config().tie_word_embeddings) continue;
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      io::fail_in(folder.path(),
                  "has a tensor " + io::printable(name) +
                      ", which the model of its config.json has not (nearest: " + nearest_name(name, names) + ")");
    }
  }
}

// Refuses a head that is not the embeddings to which its config.json ties it.
void check_tied_head(const io::SafetensorsFolder& folder, const LanguageModel& model) {
  const auto* file = folder.file_with(kHead);
  if (file == nullptr || !model.config().tie_word_embeddings) return;
  const auto embeddings = model.head().detach();
  if (!torch::equal(read_tensor(*file, kHead, embeddings.sizes()), embeddings)) {
    io::fail_in(folder.path(), std::string("has a tensor ") + kHead + " that differs from " + kEmbeddings +
                                   ", although tie_word_embeddings of its config.json is true");
  }
}

}  // namespace

fs::path language_model_folder(const fs::path& path) {
  if (is_gguf(path) || fs::exists(path / kConfigFile)) return path;
  const auto checkpoints = io::CheckpointFolder(path).list();
  const auto holds_model = [](const auto& saved) { return fs::exists(saved.path / kConfigFile); };
  const auto latest = std::find_if(checkpoints.rbegin(), checkpoints.rend(), holds_model);
  if (latest == checkpoints.rend()) {
    throw IoError(IoError::Kind::missing, path.string(), -1,
                  fs::exists(path) ? "holds no language model: neither config.json nor checkpoints/step-N with one"
                                   : "no such folder");
  }
  return latest->path;
}

LanguageModelConfig load_language_model_config(const fs::path& path) {
  const auto folder = language_model_folder(path);
  const auto file = folder / kConfigFile, generation_file = folder / kGenerationFile;
  const auto content = io::read_json(file);
  auto config = language_model_config_from_json({content, io::refuse_in_file(file.string())});
  if (!fs::exists(generation_file)) return config;
  const auto generation = io::read_json(generation_file);
  const io::Fields fields(generation, io::refuse_in_file(generation_file.string()));
  if (fields.find("eos_token_id") != nullptr) read_eos_token_id(fields, config.eos_token_id);
  fields.check([&] { validate(config); });
  return config;
}

std::shared_ptr<LanguageModel> load_language_model(const fs::path& path, torch::Device device) {
  const auto folder = language_model_folder(path);
  const auto config = load_language_model_config(folder);
  const io::SafetensorsFolder weights(folder);
  auto model = std::make_shared<LanguageModel>(config, Initialiser::open());
  check_names(weights, *model);
  for (const auto& parameter : model->named_parameters()) {
    read_tensor(*weights.file_with(parameter.key()), parameter.key(), parameter.value());
  }
  check_tied_head(weights, *model);
  model->to(device);
  return model;
}

void save_language_model(const LanguageModel& model, const fs::path& folder) {
  std::vector<torch::Tensor> values;  // of the entries
  std::vector<io::NamedTensor> entries;
  for (const auto& parameter : model.named_parameters()) {
    values.push_back(parameter.value().detach().to(torch::kCPU));
    entries.push_back(named_tensor(parameter.key(), values.back()));
  }
  io::write_safetensors(folder / io::kWeightsFile, entries, {{"format", "pt"}});
  auto config = to_json(model.config());
  if (auto map = auto_map(config.at("model_type")); !map.is_null()) {
    config["auto_map"] = std::move(map);
    io::write_file_atomically(folder / kCodeFile, kCode);
  }
  io::write_file_atomically(folder / kConfigFile, config.dump(1) + "\n");
}

}  // namespace efla::nn
