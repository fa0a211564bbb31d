// Engines over models from their folders.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "efla/base/check.h"
#include "efla/engine/local_engine.h"
#include "efla/nn/models/language_model_file.h"

namespace efla::engine {

std::unique_ptr<LocalEngine> start_engine(const std::shared_ptr<nn::LanguageModel>& model,
                                          std::shared_ptr<const data::Tokenizer> tokenizer,
                                          const EngineOptions& options) {
  const auto weights = nn::parse_weight_type(options.weights);
  std::string sha256 = options.keep_sessions ? fingerprint(*model) : "";  // before the weights are rounded
  const auto drawable = tokenizer->vocab_size();
  const bool grows = model->config().has_attention();
  std::unique_ptr<EngineModel> made;
  if (options.on_gpu) {
    model->to(torch::kCUDA);
    nn::round_weights(*model, weights);
    made = grows ? make_torch_model(model, std::make_shared<nn::GpuDecoder>(*model, weights, drawable))
                 : make_gpu_model(model, weights, drawable);
  } else if (weights != nn::WeightType::float32 || nn::InferenceModel::refusal(model->config()).empty()) {
    made = make_cpu_model(*model, weights);
  } else {
    made = make_torch_model(model);
  }
  return std::make_unique<LocalEngine>(std::move(made), std::move(sha256), model->parameter_count(),
                                       std::move(tokenizer), options);
}

namespace {

// Starts an engine over a model of a family (nn/families).
std::unique_ptr<Engine> start_family_engine(const std::filesystem::path& folder,
                                            std::shared_ptr<const data::Tokenizer> tokenizer,
                                            const EngineOptions& options) {
  const auto weights = nn::parse_weight_type(options.weights);
  std::optional<nn::KeyValueType> kv_cache_type;
  if (options.kv_cache_type != "auto") kv_cache_type = nn::parse_kv_cache_type(options.kv_cache_type);
  const auto start = [&](const auto& model, std::unique_ptr<EngineModel> made) {
    return std::make_unique<LocalEngine>(std::move(made), options.keep_sessions ? model->fingerprint() : "",
                                         model->parameters(), tokenizer, options);
  };
  if (options.on_gpu) {
    Require("engine")(options.draft_head == 0, "draft_head", options.draft_head, "0 on a GPU");
    const auto model =
        std::make_shared<nn::GpuFamilyModel>(folder, weights, tokenizer->vocab_size(), torch::kCUDA, kv_cache_type);
    return start(model, make_family_model(model));
  }
  const auto model = std::make_shared<nn::FamilyModel>(
      folder, weights, kv_cache_type.value_or(nn::KeyValueType::float32), options.draft_head > 0);
  return start(model, make_family_model(model, weights));
}

}  // namespace

std::unique_ptr<Engine> load_engine(const std::filesystem::path& model,
                                    std::shared_ptr<const data::Tokenizer> tokenizer, const EngineOptions& options) {
  if (nn::is_family_folder(model)) return start_family_engine(model, std::move(tokenizer), options);
  Require("engine")(options.kv_cache_type == "auto", "kv_cache_type", options.kv_cache_type,
                    "auto for a model that is not a hybrid from Hugging Face");
  Require("engine")(options.draft_head == 0, "draft_head", options.draft_head,
                    "0 for a model without a head for drafts");
  return start_engine(nn::load_language_model(model), std::move(tokenizer), options);
}

}  // namespace efla::engine
