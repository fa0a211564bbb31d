// The tokens that end a text.
#pragma once

#include <cstdint>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/nn/models/language_model_config.h"

namespace efla::generate {

// Returns the tokenizer's eos, and the eos_token_id of the model if the tokenizer has none or the model has several:
// the one token of a model may be a default that nobody chose.
std::vector<std::int32_t> end_ids(const data::Tokenizer& tokenizer, const nn::LanguageModelConfig& config);

}  // namespace efla::generate
