// The tokens that end a text.
#pragma once

#include <cstdint>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/nn/models/language_model_config.h"

namespace efla::engine {

// Returns the tokenizer's eos, if it has one, and the tokens of the model's eos_token_id.
std::vector<std::int32_t> end_ids(const data::Tokenizer& tokenizer, const nn::LanguageModelConfig& config);

}  // namespace efla::engine
