// The first two stages of a tokenizer.json: what its normalizer and pre_tokenizer do to a text.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "efla/data/tokenizers/expression_borders.h"
#include "efla/io/fields.h"

namespace efla::data {

// Normalizes and splits texts. The const functions may be called by several threads at once.
class PreTokenizer {
 public:
  // Takes the values of the keys `normalizer` (null, NFC, NFD, NFKC, NFKD or a Sequence of them) and `pre_tokenizer`
  // (ByteLevel, Split with a regular expression, Digits, or a Sequence of them that ends in ByteLevel). Throws
  // IoError(content) that names any other value. path is for messages.
  PreTokenizer(const nlohmann::json& normalizer, const nlohmann::json& pre_tokenizer, const std::string& path);
  ~PreTokenizer();
  PreTokenizer(PreTokenizer&&) noexcept;

  // Returns the text in its normal form. The text must be UTF-8 and have less than 2 GiB.
  std::string normalized(std::string_view text) const;

  // Calls f(piece) for the pieces of a normalized text, in order. No token spans two pieces.
  void split(std::string_view text, const std::function<void(std::string_view)>& f) const;

  // Returns the last place at which a text can be cut and `allowed(place)` holds; 0: none. The pieces of the text
  // before the place, followed by the pieces of the text behind it, are then the pieces of the whole text, whatever
  // follows it.
  std::size_t last_border(std::string_view text, const std::function<bool(std::size_t)>& allowed) const;

  // Returns whether there is a normalizer.
  bool normalizes() const { return !forms_.empty(); }

  // Returns whether a character begins at a place and the two sides of the place can be normalized apart: their normal
  // forms, concatenated, are the normal form of the text, whatever text precedes and follows.
  bool normalizes_apart(std::string_view text, std::size_t place) const;

 private:
  class Pattern;
  class BorderFinder;

  void add_normalizer(const io::Fields& normalizer, const std::string& path);
  void add_step(const io::Fields& fields, bool last, const std::string& path);
  void split_from(std::size_t step, std::string_view text, const std::function<void(std::string_view)>& f) const;

  std::vector<int> forms_;  // utf8proc's options, one after the other
  std::vector<std::unique_ptr<Pattern>> patterns_;
  std::vector<ExpressionBorders> borders_;  // of the patterns
};

}  // namespace efla::data
