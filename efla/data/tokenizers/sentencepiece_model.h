// The file of a SentencePiece model: a protocol buffer, sentencepiece_model.proto of github.com/google/sentencepiece.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "efla/io/file.h"

namespace efla::data {

struct SentencePieceModel {
  enum class Type { unigram = 1, bpe, word, character };
  enum class Kind { normal = 1, unknown, control, user_defined, unused, byte };

  struct Piece {
    std::string text;  // UTF-8; kSpaceMark (pieces.h) stands for a space
    float score = 0.0F;
    Kind kind = Kind::normal;
  };

  std::vector<Piece> pieces;  // the index is the id
  Type type = Type::unigram;
  bool byte_fallback = false, whitespace_as_suffix = false;
  std::string unknown_surface = " \u2047 ", bos_piece = "<s>", eos_piece = "</s>";
  bool normalizes = false, denormalizes = false;  // whether characters are mapped to others
  bool add_dummy_prefix = true, remove_extra_whitespaces = true, escape_whitespaces = true;
};

// Parses a model. Throws IoError(content) for bytes that are not this protocol buffer, for no pieces, a piece that is
// empty, not UTF-8 or given twice, a score that is not finite, and an unknown kind or type. path is for messages.
SentencePieceModel parse_sentencepiece_model(io::ByteView bytes, const std::string& path);

}  // namespace efla::data
