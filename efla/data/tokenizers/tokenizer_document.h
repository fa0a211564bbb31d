// The parts of a tokenizer.json, for tokenizers that have no such file. Used by tokenizer_json.cc and
// gguf_tokenizer.cc.
#pragma once

#include <nlohmann/json.hpp>

#include "efla/data/tokenizers/added_tokens.h"

namespace efla::data {

// Returns an entry of the field added_tokens.
nlohmann::json added_token_json(const AddedToken& token);

// Returns the field model: BPE. unknown: the text of the token for unknown characters, or null.
nlohmann::json bpe_model(nlohmann::json vocabulary, nlohmann::json merges, nlohmann::json unknown, bool byte_fallback);

// Returns the whole document.
nlohmann::json tokenizer_document(nlohmann::json added, nlohmann::json normalizer, nlohmann::json pre_tokenizer,
                                  nlohmann::json decoder, nlohmann::json model);

}  // namespace efla::data
