// The tokenizer of a SentencePiece model. Used by tokenizer.cc.
#pragma once

#include <memory>
#include <string>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/io/file.h"

namespace efla::data {

// Makes a tokenizer from the bytes of the model's file at `path`. If the files beside it add tokens or name another bos
// or eos, they are found in texts as for a tokenizer.json (json_tokenizer.h). Throws IoError(content) for a model that
// is broken or not supported.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(io::ByteView bytes, const std::string& path);

}  // namespace efla::data
