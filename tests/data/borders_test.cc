// Where a text can be cut before it is split by regular expressions.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "efla/base/random.h"
#include "efla/data/tokenizers/pre_tokenizer.h"

namespace efla::data {
namespace {

using nlohmann::json;

using Pieces = std::vector<std::string>;
using Places = std::vector<std::size_t>;

constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kGpt4o =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kDeepSeek =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kBloom = R"( ?[^(\s|[.,!?…。，、।۔،])]+)";
constexpr const char* kPossessive =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s)";

PreTokenizer make(const std::vector<std::string>& expressions, const json& normalizer = nullptr, bool removed = false) {
  json stages = json::array();
  for (const auto& expression : expressions) {
    stages.push_back({{"type", "Split"},
                      {"pattern", {{"Regex", expression}}},
                      {"behavior", removed ? "Removed" : "Isolated"},
                      {"invert", removed}});
  }
  stages.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  return {normalizer, {{"type", "Sequence"}, {"pretokenizers", stages}}, "tokenizer.json"};
}

Pieces pieces_of(const PreTokenizer& pre_tokenizer, const std::string& text) {
  Pieces pieces;
  pre_tokenizer.split(pre_tokenizer.normalized(text), [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

Places borders_of(const PreTokenizer& pre_tokenizer, const std::string& text) {
  Places places;
  pre_tokenizer.last_border(text, [&](std::size_t place) {
    places.insert(places.begin(), place);
    return false;
  });
  return places;
}

// A text with its borders as "|".
std::string cut(const PreTokenizer& pre_tokenizer, std::string text) {
  const auto places = borders_of(pre_tokenizer, text);
  for (auto place = places.rbegin(); place != places.rend(); ++place) text.insert(*place, "|");
  return text;
}

std::string random_text(Random& random, std::uint32_t characters) {
  static const std::vector<std::string> kTexts{
      "a",      "b",  "s",  "S",  "L",  "ſ",      "ß", "é", "e\u0301", "\u0301", "д",    "Д",
      "字",     "，", "。", "0",  "1",  "٣",      " ", " ", "  ",      "\n",     "\n",   "\r\n",
      "\t",     "、", "'",  "'s", "'L", "’",      "!", "/", "(",       "[",      "🦙", "\u1100\u1161\u11a8",
      "\u11a8", "각", "ﬁ",  "㎏", "ﾞ",  "\u0338", "<", "=", "x",       "\u200d", "ก",    "ำ"};
  std::string text;
  for (std::uint32_t i = 0; i < characters; ++i) {
    text += kTexts[random.below(static_cast<std::uint32_t>(kTexts.size()))];
  }
  return text;
}

// Checks every border of random texts, with more text behind it. Returns the number of borders.
std::size_t check_borders(const PreTokenizer& pre_tokenizer, const std::string& name) {
  Random random(19);
  std::size_t borders = 0;
  for (int i = 0; i < 400; ++i) {
    const auto text = random_text(random, 1 + random.below(24)), more = random_text(random, random.below(6));
    const auto whole = pieces_of(pre_tokenizer, text + more);
    for (const auto place : borders_of(pre_tokenizer, text)) {
      ++borders;
      auto pieces = pieces_of(pre_tokenizer, text.substr(0, place));
      for (auto& piece : pieces_of(pre_tokenizer, text.substr(place) + more)) pieces.push_back(std::move(piece));
      EXPECT_EQ(pieces, whole) << name << ": " << text.substr(0, place) << "|" << text.substr(place) << "…" << more;
    }
  }
  return borders;
}

TEST(Borders, ArePlacesWhereNoPieceGoesOn) {
  const std::vector<std::vector<std::string>> known{
      {kGpt2},  {kQwen2},      {kGpt4o},           {R"(\p{N}{1,3})", "[一-龥぀-ゟ゠-ヿ]+", kDeepSeek},
      {kBloom}, {kPossessive}, {R"(\p{N})", kGpt2}};
  for (const auto& expressions : known) {
    EXPECT_GT(check_borders(make(expressions), expressions.back()), 500U) << expressions.back();
    for (const char* form : {"NFC", "NFD", "NFKC", "NFKD"}) {
      EXPECT_GT(check_borders(make(expressions, {{"type", form}}), form + expressions.back()), 200U) << form;
    }
  }
  EXPECT_GT(check_borders(make({kQwen2}, nullptr, true), "removed"), 500U);
}

TEST(Borders, HoldForAnyExpression) {
  std::size_t borders = 0;
  for (const char* expression : {R"(a(?!b)|.)",
                                 R"(a(?=b)b?|s)",
                                 R"(\s+$|\S)",
                                 R"((?i:[sl])x?|.)",
                                 R"([ab]{2,}|.)",
                                 R"((ab|s)+d?|.)",
                                 R"(x*+x|.)",
                                 R"((?>a?)a|.|\n)",
                                 R"(a|ab|b)",
                                 R"(\n|[^\n]+)",
                                 R"((?:a(?!b)c?)+|b)",
                                 R"(a{1}?b|s)",
                                 R"(a{0}b|s)",
                                 R"((?m:.))",
                                 R"([[:alpha:]]+|[^[:alpha:]])",
                                 R"([\w&&[^d]]+)",
                                 R"(a+?b|s)",
                                 R"((?:(?=s)|b)a|s)",
                                 R"(.)",
                                 R"(\p{L}|\P{L}{1,2})"}) {
    borders += check_borders(make({expression}), expression);
  }
  EXPECT_GT(borders, 1000U);
}

TEST(Borders, AreAtSpacesLineEndsAndPunctuation) {
  EXPECT_EQ(cut(make({kGpt2}), "one two, 3\nfour  five"), "one| two|,| 3|\nfour|  five");
  EXPECT_EQ(cut(make({kGpt2}), "да нет\nда"), "да| нет|\nда");
  EXPECT_EQ(cut(make({kQwen2}), "天地玄黄，宇宙。\n日月\n辰宿 "), "天地玄黄|，宇宙|。\n日月|\n辰宿| ");
  EXPECT_EQ(cut(make({R"(\p{N}{1,3})", "[一-龥]+", kDeepSeek}), "天地，one two\n"), "天地|，|one| two|\n");
  EXPECT_EQ(cut(make({kGpt2}, {{"type", "NFC"}}), "e\u0301e a\u0338 b"), "e\u0301e| a\u0338| b");
}

TEST(Borders, AreNowhereWhereAnExpressionIsNotUnderstood) {
  for (const char* expression :
       {R"((?<=a)b|.)", R"((?<!a)b|.)", R"(\bab|.)", R"(^a|.)", R"(\Aa|.)", R"((a)\1|.)", R"((?<name>a)|.)",
        R"((?i)a|.)", R"((?i:ss)|.)", R"((?i:é)|.)", R"((?i:\w)|.)", R"(a*)", R"(\x41|.)", R"(\R|.)", R"(\Ga|.)"}) {
    EXPECT_EQ(cut(make({expression}), "one two, 3\nfour  ab"), "one two, 3\nfour  ab") << expression;
  }
  EXPECT_EQ(cut(make({}), "one two"), "one two");
}

}  // namespace
}  // namespace efla::data
