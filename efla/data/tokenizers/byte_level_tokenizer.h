// BPE over bytes, like the tokenizers of GPT-2, Llama 3 and Qwen. Used by json_tokenizer.cc and tokenizer_json.cc.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "efla/data/tokenizers/json_tokenizer.h"

namespace efla::data {

// Makes the tokenizer of a file whose decoder is ByteLevel. Throws IoError(content) that names what is not supported.
std::unique_ptr<Tokenizer> make_byte_level_tokenizer(const TokenizerFile& file);

// Returns the character that stands for each byte in the vocabulary: itself if it is printable in Latin-1, otherwise
// the next of U+0100, U+0101, ….
std::vector<std::string> characters_of_bytes();

}  // namespace efla::data
