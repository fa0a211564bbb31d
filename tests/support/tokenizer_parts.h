// Texts that are hard for tokenizers, and texts and ids that are given to a tokenizer in parts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "efla/base/random.h"
#include "efla/base/utf8.h"
#include "efla/data/tokenizers/tokenizer.h"

namespace efla::test {

// Letters, spaces in runs, characters of two to four bytes, and the character that stands for a space in pieces.
inline std::string random_text(Random& random, std::size_t characters) {
  static const std::vector<std::string> kCharacters{"a",  "b",  "c", "d",  " ",    " ", " ",
                                                    "  ", "\n", "é", "東", "🦙", "▁", "ab"};
  std::string text;
  for (std::size_t i = 0; i < characters; ++i) {
    text += kCharacters[random.below(static_cast<std::uint32_t>(kCharacters.size()))];
  }
  return text;
}

// The ids of a text that was encoded in parts, and the number of parts.
struct EncodedParts {
  std::vector<std::int32_t> ids;
  std::size_t parts = 0;
};

// Encodes a text in parts, each cut at the last place within `reach` bytes, or within twice as many until there is one.
inline EncodedParts encode_in_parts(const data::Tokenizer& tokenizer, std::string_view text, std::size_t reach) {
  EncodedParts all;
  for (std::size_t begin = 0; begin < text.size() || begin == 0;) {
    const auto rest = text.substr(begin);
    std::size_t cut = rest.size();
    for (std::size_t size = reach; size < rest.size(); size *= 2) {
      if ((cut = tokenizer.last_cut(rest.substr(0, size))) > 0) break;
      cut = rest.size();
    }
    const auto part = tokenizer.encode_part(rest.substr(0, cut), begin == 0);
    all.ids.insert(all.ids.end(), part.begin(), part.end());
    ++all.parts;
    begin += std::max<std::size_t>(cut, 1);
  }
  return all;
}

inline std::string decode_in_parts(const data::Tokenizer& tokenizer, const std::vector<std::int32_t>& ids) {
  data::StreamDecoder decoder(tokenizer);
  std::string text;
  for (const auto id : ids) {
    const auto part = decoder.push(id);
    EXPECT_EQ(utf8_prefix(part), part.size());
    text += part;
  }
  return text + decoder.finish();
}

}  // namespace efla::test
