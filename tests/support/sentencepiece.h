// Writes small SentencePiece models for tests that have no real one.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "efla/data/tokenizers/sentencepiece_model.h"

namespace efla::test {

// Encode a field of a protocol buffer: a number (wire type 0), bytes (2) or four bytes (5).
inline std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}
inline std::string number_field(int field, std::uint64_t value) {
  return varint(static_cast<std::uint64_t>(field) << 3) + varint(value);
}
inline std::string bytes_field(int field, std::string_view bytes) {
  return varint(static_cast<std::uint64_t>(field) << 3 | 2) + varint(bytes.size()) + std::string(bytes);
}
inline std::string float_field(int field, float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  std::string bytes = varint(static_cast<std::uint64_t>(field) << 3 | 5);
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(bits >> (8 * i));
  return bytes;
}

inline std::string piece_field(std::string_view text, float score, data::SentencePieceModel::Kind kind) {
  return bytes_field(1,
                     bytes_field(1, text) + float_field(2, score) + number_field(3, static_cast<std::uint64_t>(kind)));
}

struct ModelOptions {
  std::uint64_t type = 2;  // BPE
  bool byte_fallback = true, add_dummy_prefix = true;
  std::string more = "";  // bytes at the end of the file
};

// Returns a model with <unk>, <s>, </s>, the 256 bytes with byte_fallback, and the pieces in decreasing order of score.
inline std::string sentencepiece_model(const std::vector<std::string>& pieces, const ModelOptions& options = {}) {
  using Kind = data::SentencePieceModel::Kind;
  std::string file = piece_field("<unk>", 0.0F, Kind::unknown) + piece_field("<s>", 0.0F, Kind::control) +
                     piece_field("</s>", 0.0F, Kind::control);
  for (int byte = 0; byte < 256 && options.byte_fallback; ++byte) {
    file += piece_field(fmt::format("<0x{:02X}>", byte), 0.0F, Kind::byte);
  }
  float score = 0.0F;
  for (const auto& piece : pieces) file += piece_field(piece, score -= 1.0F, Kind::normal);
  file += bytes_field(2, number_field(3, options.type) + number_field(35, options.byte_fallback));
  file += bytes_field(3, bytes_field(1, "identity") + number_field(3, options.add_dummy_prefix) + number_field(4, 0));
  return file + options.more;
}

}  // namespace efla::test
