// Where the tokens of a text begin in it.
#include "efla/data/tokenizers/token_offsets.h"

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "efla/base/random.h"
#include "efla/base/utf8.h"
#include "efla/data/tokenizers/tokenizer_json.h"
#include "tests/support/byte_level.h"
#include "tests/support/sentencepiece.h"
#include "tests/support/special_tokens.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tokenizer_parts.h"

namespace efla::data {
namespace {

using Offsets = std::vector<std::size_t>;
using Texts = std::vector<std::string>;

// Returns the byte at which a character of a text begins.
std::size_t byte_of_character(std::string_view text, std::size_t character) {
  std::size_t at = 0;
  for (; character > 0; --character) at += static_cast<std::size_t>(utf8_character(text.substr(at)));
  return at;
}

// Cuts a text where its tokens begin.
Texts cut_at_tokens(const Tokenizer& tokenizer, const std::string& text) {
  const auto offsets = token_offsets(tokenizer, text, tokenizer.encode(text), 0);
  Texts parts;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const auto begin = byte_of_character(text, offsets[i]);
    const auto end = i + 1 < offsets.size() ? byte_of_character(text, offsets[i + 1]) : text.size();
    parts.push_back(text.substr(begin, end - begin));
  }
  return parts;
}

std::unique_ptr<Tokenizer> load_file(const char* name, const std::string& content) {
  const test::TempFolder folder;
  return load_tokenizer(test::write_text(folder / name, content));
}

std::unique_ptr<Tokenizer> with_normalizer(const char* form) {
  auto document = test::byte_level_json(test::byte_level_step(true));
  if (form != nullptr) document["normalizer"] = {{"type", form}};
  return load_file("tokenizer.json", document.dump());
}

std::string small_model(const test::ModelOptions& options = {}) {
  return test::sentencepiece_model({"th", "the", "▁the", "in", "▁in", "▁", "t", "h", "e", "i", "n"}, options);
}

TEST(TokenOffsets, LeaveOutTheSpaceThatEncodeAdds) {
  const auto tokenizer = load_file("small.model", small_model());
  EXPECT_EQ(cut_at_tokens(*tokenizer, "the in the"), (Texts{"the", " in", " the"}));
  EXPECT_EQ(cut_at_tokens(*tokenizer, " the"), (Texts{"", " the"}));
  EXPECT_EQ(cut_at_tokens(*tokenizer, "  the  the"), (Texts{"", " ", " the", " ", " the"}));
  EXPECT_EQ(cut_at_tokens(*tokenizer, "the▁in"), (Texts{"the", "▁in"}));
  EXPECT_EQ(cut_at_tokens(*tokenizer, "é in"), (Texts{"", "é", "", " in"}));  // the added space, two bytes
  const std::vector<std::int32_t> ids{tokenizer->bos(), tokenizer->encode("the")[0], tokenizer->encode("the in")[1]};
  EXPECT_EQ(token_offsets(*tokenizer, "the in", ids, 1), (Offsets{0, 0, 3}));
}

TEST(TokenOffsets, SpecialTokensHaveTheirTexts) {
  const auto chat = test::tokenizer_with_special_tokens();
  EXPECT_EQ(cut_at_tokens(*chat, "<|im_start|>hi<|im_end|>"), (Texts{"<|im_start|>", "h", "i", "<|im_end|>"}));
  const test::TempFolder folder;
  const auto exported = tokenizer_json(test::write_text(folder / "small.model", small_model())).tokenizer;
  auto with_added = exported;
  with_added["added_tokens"].push_back(test::added_token(270, "<think>", false, false));
  const auto pieces = load_file("tokenizer.json", with_added.dump());
  EXPECT_EQ(cut_at_tokens(*pieces, "<think>the in"), (Texts{"<think>", "the", " in"}));
  EXPECT_EQ(cut_at_tokens(*pieces, "<s>the in</s>in"), (Texts{"<s>", "the", " in", "</s>", "in"}));
  EXPECT_EQ(cut_at_tokens(*pieces, "<s> the"), (Texts{"<s>", "", " the"}));
}

TEST(TokenOffsets, OfNormalFormsBelongToTheText) {
  const std::string accent = "\u0301", jamo = "\u1112\u1161\u11ab";
  EXPECT_EQ(cut_at_tokens(*with_normalizer("NFC"), "e" + accent + " the"), (Texts{"e" + accent, " the"}));
  EXPECT_EQ(cut_at_tokens(*with_normalizer("NFC"), "é the"), (Texts{"é", " the"}));
  EXPECT_EQ(cut_at_tokens(*with_normalizer("NFC"), jamo + " the").back(), " the");
  EXPECT_EQ(cut_at_tokens(*with_normalizer("NFD"), "é the"), (Texts{"é", "", "", " the"}));
  EXPECT_EQ(cut_at_tokens(*with_normalizer("NFKC"), "ﬁ the"), (Texts{"ﬁ", "", " the"}));
  EXPECT_EQ(cut_at_tokens(*with_normalizer("NFKC"), "a\u00a0the"), (Texts{"a", "\u00a0the"}));
}

TEST(TokenOffsets, GoOnBehindUnknownTokens) {
  const auto tokenizer = load_file("small.model", small_model({.byte_fallback = false}));
  EXPECT_EQ(cut_at_tokens(*tokenizer, "the 東京 in"), (Texts{"the", " ", "東京", " in"}));
}

TEST(TokenOffsets, OfUnfinishedCharactersCountThese) {
  const auto bytes = load_tokenizer("bytes");
  EXPECT_EQ(token_offsets(*bytes, "a🦙b", bytes->encode("a🦙b"), 0), (Offsets{0, 1, 2, 2, 2, 2}));
}

TEST(TokenOffsets, AreWhereTheTokensStand) {
  Random random(5);
  for (const auto& tokenizer : {load_file("small.model", small_model()), with_normalizer(nullptr)}) {
    for (int trial = 0; trial < 300; ++trial) {
      const auto text = test::random_text(random, 1 + random.below(40));
      const auto ids = tokenizer->encode(text);
      const auto offsets = token_offsets(*tokenizer, text, ids, 0);
      ASSERT_EQ(offsets.size(), ids.size());
      bool first = true;
      for (std::size_t i = 0; i < ids.size(); ++i) {
        std::string own(tokenizer->bytes_of(ids[i]));
        if (first && tokenizer->begins_with_added_space(ids[i])) own.erase(0, 1);
        first = false;
        if (!own.empty() && utf8_character(own) <= 0) continue;  // it continues a character
        auto here = text.substr(byte_of_character(text, offsets[i]));
        for (auto at = here.find("▁"); at != std::string::npos; at = here.find("▁")) here.replace(at, 3, " ");
        EXPECT_TRUE(here.starts_with(own)) << text << ": token " << i << " at " << offsets[i];
      }
    }
  }
}

}  // namespace
}  // namespace efla::data
