// The tokenizer of a SentencePiece model. For tokenizer.cc.
#pragma once

#include <memory>
#include <string>

#include "efla/data/tokenizer.h"
#include "efla/io/file.h"

namespace efla::data {

// bytes are those of the model's file; path is for messages and gives the tokenizer its name.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(io::ByteView bytes, const std::string& path);

}  // namespace efla::data
