// Which tokenizer a language model goes with.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "efla/data/tokenizer.h"

namespace efla::cli {

// A model's tokenizer as a file in its folder.
inline constexpr const char* kTokenizerFile = "tokenizer.model";

// `given` unless empty; else the file beside the model, or what the training run that the folder holds names ("bytes",
// or a SentencePiece model's path); "" where there is none. Throws IoError where there is no model, and for a run.json
// that cannot be read.
std::string find_tokenizer(const std::string& model, const std::string& given = "");

// The same. Throws Error naming --tokenizer where there is none.
std::string require_tokenizer(const std::string& command, const std::string& model, const std::string& given);

// What run.json keeps of a tokenizer: {name, fingerprint, vocab_size}.
nlohmann::json tokenizer_of_run(const io::TokenizerInfo& tokenizer);

// Throws Error naming --tokenizer where the run in the folder was trained with another than the one at `path`.
void require_tokenizer_of_run(const std::string& command, const std::string& model, const std::string& path,
                              const io::TokenizerInfo& tokenizer);

}  // namespace efla::cli
