// Tokenizers as Hugging Face's tokenizers and transformers read them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "efla/data/tokenizers/sentencepiece_model.h"
#include "efla/data/tokenizers/tokenizer_config.h"

namespace efla::data {

struct TokenizerJson {
  nlohmann::json tokenizer;  // tokenizer.json
  nlohmann::json config;     // tokenizer_config.json
};

// Converts the tokenizer that load_tokenizer makes of a name: "bytes", or the path of a SentencePiece model or of a
// GGUF file. The ids of a text are the same, except where the text contains the name of a control token of a
// SentencePiece model such as "</s>". Throws what load_tokenizer throws.
TokenizerJson tokenizer_json(const std::string& name);

// Converts a SentencePiece model that load_tokenizer takes, with the tokens that the files beside it add.
TokenizerJson tokenizer_json(const SentencePieceModel& model, const TokenizerConfig& beside);

}  // namespace efla::data
