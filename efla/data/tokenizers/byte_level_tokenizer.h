// The tokenizer of a tokenizer.json of Hugging Face's tokenizers whose model is BPE over bytes, like GPT-2's, Llama 3's
// and Qwen's. Used by tokenizer.cc and tokenizer_json.cc.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/io/file.h"

namespace efla::data {

// Makes a tokenizer from the bytes of the file at `path`; the tokenizer_config.json beside it names bos and eos. encode
// finds added tokens in texts, and ignores the file's post_processor. Throws IoError(content) that names what is not
// supported.
std::unique_ptr<Tokenizer> make_byte_level_tokenizer(io::ByteView bytes, const std::string& path);

// Returns the character that stands for each byte in the vocabulary: itself if it is printable in Latin-1, otherwise
// the next of U+0100, U+0101, ….
std::vector<std::string> characters_of_bytes();

}  // namespace efla::data
