// The tokenizer and the chat template in a GGUF file, as the files of Hugging Face's tokenizers and transformers would
// have them.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/io/gguf/gguf_write.h"

namespace efla::data {

// Returns whether the file at `path` has a tokenizer.
bool has_gguf_tokenizer(const std::string& path);

// Returns the tokenizer.json: BPE over bytes ("gpt2") with one of the ways to split a text that efla knows. Tokens that
// only fill the vocabulary are left out. Throws IoError(content) for other kinds of tokenizers, and where the file
// contradicts itself.
nlohmann::json gguf_tokenizer_document(const std::string& path);

// Returns the tokenizer_config.json: bos_token, eos_token, pad_token and unk_token, and chat_template, each if the file
// has it. Throws IoError(content) for an id without a token.
nlohmann::json gguf_tokenizer_config(const std::string& path);

// Makes the tokenizer of these two.
std::unique_ptr<Tokenizer> make_gguf_tokenizer(const std::string& path);

// Returns the entries of a new file for the tokenizer.json at `path` and the file beside it: tokens for all rows of the
// embeddings, their types, the merges, and the ids of pad and, if there is one, bos. Throws IoError(content) for a
// tokenizer that the functions above would not return, or with more ids than rows.
io::GgufEntries gguf_tokenizer_entries(const std::string& path, std::int64_t rows);

}  // namespace efla::data
