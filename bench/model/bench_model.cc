#include "bench/model/bench_model.h"

#include <utility>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/local_engine.h"
#include "efla/nn/model_size.h"
#include "efla/nn/models/language_model.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/rule/mixer_preset.h"

namespace efla::bench {
namespace {

// Tokens without text of their own.
class AnyTokens final : public data::Tokenizer {
 public:
  explicit AnyTokens(std::int64_t vocab_size) : Tokenizer(info_of(vocab_size)) {}

  std::vector<std::int32_t> encode_part(std::string_view /*part*/, bool /*begins*/) const override { return {}; }
  std::string_view bytes_of(std::int32_t /*id*/) const override { return "x"; }
  bool begins_with_added_space(std::int32_t /*id*/) const override { return false; }
  std::size_t last_cut(std::string_view /*part*/) const override { return 0; }

 private:
  static io::TokenizerInfo info_of(std::int64_t vocab_size) {
    auto info = data::load_tokenizer("bytes")->info();
    info.vocab_size = vocab_size;
    info.bos = info.eos = -1;
    return info;
  }
};

nn::LanguageModelConfig config_of(const BenchModel& model) {
  auto config = nn::language_model_preset(model.preset);
  if (!model.mixer.empty()) config.mixer = mixer_preset(model.mixer).name;
  return config;
}

}  // namespace

std::string BenchModel::name() const {
  return folder.empty() ? preset : std::filesystem::absolute(folder / "").parent_path().filename().string();
}

std::string BenchModel::kind() const { return folder.empty() ? config_of(*this).mixer : nn::model_size(folder).kind; }

void BenchModel::check() const { folder.empty() ? void(config_of(*this)) : void(nn::model_size(folder)); }

std::unique_ptr<engine::Engine> BenchModel::start(engine::EngineOptions options) const {
  options.ends_texts = false;
  if (!folder.empty()) {
    return engine::load_engine(folder, std::make_shared<AnyTokens>(nn::model_size(folder).vocab_size), options);
  }
  const auto config = config_of(*this);
  const auto model = std::make_shared<nn::LanguageModel>(config, nn::Initialiser(1));
  return engine::start_engine(model, std::make_shared<AnyTokens>(config.vocab_size), options);
}

}  // namespace efla::bench
