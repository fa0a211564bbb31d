// BPE over characters, with pieces as SentencePiece writes them: the tokenizer.json of Llama 2, Mistral and Gemma. Used
// by json_tokenizer.cc.
#pragma once

#include <memory>

#include "efla/data/tokenizers/json_tokenizer.h"

namespace efla::data {

// Makes the tokenizer of a file whose decoder is Replace, ByteFallback, Fuse and perhaps Strip. Spaces become
// kSpaceMark by the normalizer (Replace, and perhaps Prepend) or by the pre_tokenizer (Metaspace). Throws
// IoError(content) that names what is not supported.
std::unique_ptr<Tokenizer> make_piece_tokenizer(const TokenizerFile& file);

}  // namespace efla::data
