// The added tokens of a tokenizer.json: texts that are one token wherever they occur.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/io/fields.h"

namespace efla::data {

struct AddedToken {
  std::int32_t id;  // −1: not known yet
  std::string text;
  bool special, normalized;  // normalized: its normalized text is to be found in the normalized text

  bool operator==(const AddedToken&) const = default;
};

// Reads a token without its id. Throws IoError(content) for what is not supported. path is for messages.
AddedToken read_added_token(const io::Fields& token, const std::string& path);

// Reads the tokens of the field `added_tokens`, which may be missing, without their ids.
std::vector<AddedToken> read_added_tokens(const io::Fields& document, const std::string& path);

// Returns added tokens with the ids that Hugging Face's tokenizers give them, which ignore the ids in files: a text of
// the vocabulary keeps its id, and the other texts are numbered in order, from the number of texts in the vocabulary. A
// text that is given twice becomes one token: special if either is, and normalized if the last one is.
std::vector<AddedToken> number_added_tokens(const std::vector<AddedToken>& given, const nlohmann::json& vocabulary);

// Finds added tokens in a text: the leftmost first; where several begin at one place, the longest.
class AddedTokens {
 public:
  enum class Which { all, not_special };

  void add(const AddedToken& token);

  // Returns whether a token may begin before a place and reach it, also with the help of text that follows.
  bool touches(std::string_view text, std::size_t place) const;

  std::size_t longest() const { return longest_; }  // bytes of the longest token

  // Calls token(id) for each token and text(part) for each non-empty text between tokens, in the order of the text.
  // found: which tokens are found.
  template <class Text, class Token>
  void split(std::string_view all, const Text& text, const Token& token, Which found = Which::all) const {
    std::size_t done = 0;
    for (std::size_t at = 0; at < all.size();) {
      const AddedToken* const first = at_start_of(all.substr(at), found);
      if (first == nullptr) {
        ++at;
        continue;
      }
      if (at > done) text(all.substr(done, at - done));
      token(first->id);
      at += first->text.size();
      done = at;
    }
    if (done < all.size()) text(all.substr(done));
  }

 private:
  const AddedToken* at_start_of(std::string_view text, Which found) const;

  std::array<std::vector<AddedToken>, 256> by_first_;  // by the first byte, the longest first
  std::size_t longest_ = 0;
};

}  // namespace efla::data
