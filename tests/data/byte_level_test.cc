// BPE over bytes from a tokenizer.json. Hugging Face's tokenizers 0.23.3 gave the expected ids.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "efla/base/random.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "tests/support/byte_level.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tokenizer_parts.h"

namespace efla::data {
namespace {

using nlohmann::json;
using test::byte_level_json;
using test::byte_level_step;
using test::expect_error;
using test::TempFolder;
using test::write_text;

using Ids = std::vector<std::int32_t>;

constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

json split(const char* behavior, bool inverted) {
  return {{"type", "Split"}, {"pattern", {{"Regex", kLlama3}}}, {"behavior", behavior}, {"invert", inverted}};
}
json sequence(const std::vector<json>& steps) { return {{"type", "Sequence"}, {"pretokenizers", steps}}; }

std::unique_ptr<Tokenizer> load(const json& document, const json& config = nullptr) {
  const TempFolder folder;
  if (!config.is_null()) write_text(folder / "tokenizer_config.json", config.dump());
  return load_tokenizer(write_text(folder / "tokenizer.json", document.dump()));
}

struct Golden {
  std::string text;
  Ids ids;
};

void expect_ids(const Tokenizer& tokenizer, const std::vector<Golden>& goldens) {
  for (const auto& [text, ids] : goldens) EXPECT_EQ(tokenizer.encode(text), ids) << text;
}

// The same by every pre_tokenizer.
const std::vector<Golden>& common() {
  static const std::vector<Golden> goldens{{"They'll THE'LL", {84, 104, 101, 121, 266, 32, 84, 72, 69, 39, 76, 76}},
                                           {"a  the", {97, 32, 258}},
                                           {"\n\n the\r\n", {267, 258, 13, 10}},
                                           {"<think>the<|eos|>in<|eos", {275, 257, 274, 259, 60, 124, 101, 111, 115}},
                                           {"a    b     ", {97, 276, 32, 98, 276, 263}},
                                           {"\u3000the\u00a0in", {227, 128, 128, 257, 194, 160, 259}},
                                           {"", {}}};
  return goldens;
}

const Ids kNoWhole{257, 260, 258, 32, 40, 257, 32, 119, 104, 111, 108, 101};  // of the text below
constexpr const char* kWhole = "the in the (the whole";

TEST(ByteLevelTokenizer, SplitsAsGpt2) {
  const auto tokenizer = load(byte_level_json(byte_level_step(true)));
  expect_ids(*tokenizer, common());
  expect_ids(*tokenizer,
             {{kWhole, kNoWhole}, {"12345 1 2", {270, 32, 49, 32, 50}}, {"e\u0301é", {101, 204, 129, 264}}});
}

TEST(ByteLevelTokenizer, SplitsAsLlama3WithWholeWords) {
  json document = byte_level_json(sequence({split("Isolated", false), byte_level_step(false)}));
  document["model"]["ignore_merges"] = true;
  const auto tokenizer = load(document);
  expect_ids(*tokenizer, common());
  expect_ids(*tokenizer, {{kWhole, {257, 260, 258, 32, 40, 257, 272}}, {"12345 1 2", {262, 269, 32, 49, 32, 50}}});
}

TEST(ByteLevelTokenizer, SplitsDigits) {
  const json digits = {{"type", "Digits"}, {"individual_digits", true}};
  const auto tokenizer = load(byte_level_json(sequence({digits, byte_level_step(true)})));
  expect_ids(*tokenizer, common());
  expect_ids(*tokenizer, {{kWhole, kNoWhole}, {"12345 1 2", {49, 50, 51, 52, 53, 32, 49, 32, 50}}});
}

TEST(ByteLevelTokenizer, NormalizesText) {
  json document = byte_level_json(sequence({split("Removed", true), byte_level_step(false)}));
  document["normalizer"] = {{"type", "NFC"}};
  const auto tokenizer = load(document);
  expect_ids(*tokenizer, common());
  expect_ids(*tokenizer, {{kWhole, kNoWhole}, {"e\u0301é", {264, 264}}});
  document["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKD"}}, {{"type", "NFC"}}}}};
  expect_ids(*load(document), {{"e\u0301é", {264, 264}}, {"ﬁ", {102, 105}}});
}

TEST(ByteLevelTokenizer, FindsNormalizedTokensInNormalizedText) {
  json document = byte_level_json(byte_level_step(true));
  document["normalizer"] = {{"type", "NFC"}};
  for (const json& token : {test::added_token(277, "<e\u0301>", false, true),
                            test::added_token(278, "<éé>", true, true), test::added_token(279, "<|x|>", true, true)}) {
    document["added_tokens"].push_back(token);
  }
  const auto tokenizer = load(document);
  expect_ids(*tokenizer, common());
  expect_ids(*tokenizer, {{"a<é>b<e\u0301>", {97, 277, 98, 277}},
                          {"<éé><e\u0301é>", {278, 278}},
                          {"<|x|>", {279}},
                          {"<|x|>\u0338", {60, 124, 120, 124, 226, 137, 175}}});  // ≯
  EXPECT_EQ(tokenizer->decode(Ids{277, 278}), "<e\u0301>");
}

TEST(ByteLevelTokenizer, JoinsAcrossWordsWithoutSplits) {
  const auto tokenizer = load(byte_level_json(byte_level_step(false)));
  expect_ids(*tokenizer, {{kWhole, {271, 258, 32, 268, 32, 119, 104, 111, 108, 101}}, {"12345", {270}}});
}

TEST(ByteLevelTokenizer, DecodesToTheText) {
  const auto tokenizer = load(byte_level_json(byte_level_step(true)));
  for (const std::string text : {kWhole, "They'll  THE\r\n", "e\u0301é 東京 🦙\n", "<think>a    b</think>"}) {
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
  EXPECT_EQ(tokenizer->decode(Ids{273, 257, 274}), "the");  // special tokens have no text
  EXPECT_EQ(tokenizer->decode(Ids{0xC3, 257}), "\uFFFDthe");
  expect_error([&] { tokenizer->bytes_of(277); }, "id", "0 to 276");
  expect_error([&] { tokenizer->encode("a\xff"); }, "text", "UTF-8");
}

TEST(ByteLevelTokenizer, OfBytesIsTheTokenizerBytes) {
  const TempFolder folder;
  const auto exported = tokenizer_json("bytes");
  const auto tokenizer = load(exported.tokenizer, exported.config), bytes = load_tokenizer("bytes");
  EXPECT_EQ(tokenizer->encode("é the\n"), bytes->encode("é the\n"));
  EXPECT_EQ(tokenizer->vocab_size(), bytes->vocab_size());
  EXPECT_EQ(tokenizer->bos(), bytes->bos());
  EXPECT_EQ(tokenizer->eos(), bytes->eos());
}

TEST(ByteLevelTokenizer, SpecialTokensAreNamedInTheFileBesideIt) {
  const json document = byte_level_json(byte_level_step(true));
  EXPECT_EQ(load(document)->eos(), -1);
  const auto tokenizer = load(document, {{"bos_token", nullptr}, {"eos_token", {{"content", "<|eos|>"}}}});
  EXPECT_EQ(tokenizer->bos(), -1);
  EXPECT_EQ(tokenizer->eos(), 274);
  EXPECT_EQ(tokenizer->info().name, "tokenizer.json");
  EXPECT_THROW(load(document, {{"eos_token", "</s>"}}), IoError);
}

TEST(ByteLevelTokenizer, ATextIsCutWhereNoTokenSpans) {
  Random random(17);
  json document = byte_level_json(byte_level_step(true));
  // Texts that cross the borders of words, in the text and in its normal form.
  document["added_tokens"].push_back(test::added_token(277, "in the", false, false));
  document["added_tokens"].push_back(test::added_token(278, "é 12", false, true));
  const std::vector<std::string> words{"the", "in", " the", " in",     "  ", "12",
                                       " ",   "\n", "é",    "e\u0301", ", ", "<think>"};
  for (const json& normalizer : {json(), json{{"type", "NFC"}}}) {
    document["normalizer"] = normalizer;
    const auto tokenizer = load(document);
    std::size_t parts = 0;
    for (int i = 0; i < 300; ++i) {
      std::string text;
      for (std::uint32_t word = 2 + random.below(60); word > 0; --word) text += words[random.below(12)];
      const auto encoded = test::encode_in_parts(*tokenizer, text, 1 + random.below(80));
      EXPECT_EQ(encoded.ids, tokenizer->encode(text)) << text;
      parts += encoded.parts;
    }
    EXPECT_GT(parts, 500U);
  }
  // Nowhere where words are not known to be apart.
  EXPECT_EQ(load(byte_level_json(byte_level_step(false)))->last_cut("the in  the (the whole\n 12 the"), 0U);
}

TEST(ByteLevelTokenizer, RefusesByNameWhatItDoesNotImplement) {
  const auto expect_refused = [](const char* place, const json& value, const std::string& what) {
    json document = byte_level_json(byte_level_step(true));
    document[json::json_pointer(place)] = value;
    try {
      load(document);
      ADD_FAILURE() << place << " was accepted";
    } catch (const IoError& error) {
      EXPECT_EQ(error.kind(), IoError::Kind::content);
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  };
  expect_refused("/model/type", "Unigram", "the model \"Unigram\" instead of BPE");
  expect_refused("/model/type", std::string(98, 'x') + "ää",
                 "the model \"" + std::string(98, 'x') + "… instead of BPE");
  expect_refused("/model/byte_fallback", true, "byte_fallback and the decoder ByteLevel");
  expect_refused("/model/end_of_word_suffix", "</w>", "end_of_word_suffix");
  expect_refused("/model/merges/0", {"t", "hat"}, "a merge of \"hat\", which is not in the vocabulary");
  expect_refused("/model/merges/0", "th", "expected two tokens");
  expect_refused("/model/vocab", {{"a", 0}}, "no token of the byte 0");
  expect_refused("/model/vocab/a", -1, "the id -1");
  expect_refused("/model/vocab/a", "b", "the id \"b\"");
  expect_refused("/model/vocab/a", 1000000, "the id 1000000");
  expect_refused("/model/vocab/in", 257, "two tokens of the id 257");
  expect_refused("/model/merges", 3, "model.merges: got 3, expected a list");
  expect_refused("/normalizer", {{"type", "Lowercase"}}, "the normalizer \"Lowercase\"");
  expect_refused("/pre_tokenizer", nullptr, "does not end in ByteLevel");
  expect_refused("/pre_tokenizer", sequence({{{"type", "Whitespace"}}, byte_level_step(true)}), "Whitespace");
  expect_refused("/pre_tokenizer", sequence({split("MergedWithNext", false), byte_level_step(false)}),
                 "MergedWithNext");
  expect_refused("/pre_tokenizer/add_prefix_space", true, "add_prefix_space");
  json broken = split("Isolated", false);
  broken["pattern"]["Regex"] = "(a";
  expect_refused("/pre_tokenizer", sequence({broken, byte_level_step(false)}), "the regular expression \"(a\": ");
  expect_refused("/decoder", nullptr, "another decoder");
  expect_refused("/added_tokens/0/lstrip", true, "lstrip of the added token \"<|bos|>\"");
  expect_refused("/added_tokens/0/content", "", "added_tokens[0].content: got \"\", expected a text that is not empty");
}

}  // namespace
}  // namespace efla::data
