// The tokenizer that belongs to a language model.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"

namespace efla::cli {

// A model's tokenizer as a file in its folder: a SentencePiece model, or the format of Hugging Face's tokenizers. If a
// folder has both, the second one is the tokenizer, as for transformers.
inline constexpr const char* kTokenizerFile = "tokenizer.model";
inline constexpr const char* kTokenizerJsonFile = "tokenizer.json";

// Returns `given` unless it is empty; otherwise the model's GGUF file if it has a tokenizer, the file beside the model,
// or the tokenizer that the folder's run.json names ("bytes", or a file's path), or "". If that file is gone, a
// tokenizer.json beside the model with the same fingerprint takes its place. Throws IoError if there is no model, and
// for a run.json that cannot be read.
std::string find_tokenizer(const std::string& model, const std::string& given = "");

// Returns the same as find_tokenizer. Throws Error naming --tokenizer if there is none.
std::string require_tokenizer(const std::string& command, const std::string& model, const std::string& given);

// Returns the names and contents of a tokenizer's files, as a model's folder has them: the file `path`, and the files
// beside it that belong to it; for a GGUF file those that it is converted to.
std::vector<std::pair<std::string, std::string>> files_of_tokenizer(const std::string& path);

// Returns the names and contents of a tokenizer's files for transformers, where `name` is "bytes", the path of a
// tokenizer.json, of a SentencePiece model or of a GGUF file. Throws IoError for a model that transformers cannot read.
std::vector<std::pair<std::string, std::string>> files_for_transformers(const std::string& name);

// Returns the entry of a tokenizer in run.json: {name, fingerprint, vocab_size}.
nlohmann::json tokenizer_of_run(const io::TokenizerInfo& tokenizer);

// Throws Error naming --tokenizer if the run in the folder was trained with another tokenizer than the one at `path`.
void require_tokenizer_of_run(const std::string& command, const std::string& model, const std::string& path,
                              const io::TokenizerInfo& tokenizer);

}  // namespace efla::cli
