#include "efla/engine/end_ids.h"

#include <algorithm>

namespace efla::engine {

std::vector<std::int32_t> end_ids(const data::Tokenizer& tokenizer, const nn::LanguageModelConfig& config) {
  std::vector<std::int32_t> ids;
  if (tokenizer.eos() >= 0) ids.push_back(tokenizer.eos());
  for (const auto wide : config.eos_token_id) {
    const auto id = static_cast<std::int32_t>(wide);
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  }
  return ids;
}

}  // namespace efla::engine
