// Texts that are hard for tokenizers, and texts and ids that are given to a tokenizer in parts.
#pragma once

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

// encode of the parts that last_cut makes of a text.
inline std::vector<std::int32_t> encode_in_parts(const data::Tokenizer& tokenizer, std::string_view text,
                                                 std::size_t reach) {
  std::vector<std::int32_t> ids;
  while (text.size() > reach) {
    auto cut = tokenizer.last_cut(text.substr(0, reach));
    if (cut.end == 0) cut = tokenizer.last_cut(text);
    if (cut.end == 0) break;
    const auto part = tokenizer.encode(text.substr(0, cut.end));
    ids.insert(ids.end(), part.begin(), part.end());
    text.remove_prefix(cut.next);
  }
  const auto rest = tokenizer.encode(text);
  ids.insert(ids.end(), rest.begin(), rest.end());
  return ids;
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
