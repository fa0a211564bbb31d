#include "efla/data/tokenizers/tokenizer.h"

#include <filesystem>
#include <map>

#include <gtest/gtest.h>

#include "efla/base/error.h"
#include "efla/base/random.h"
#include "efla/base/utf8.h"
#include "efla/data/tokenizers/tokenizer_json.h"
#include "tests/support/expect_error.h"
#include "tests/support/sentencepiece.h"
#include "tests/support/special_tokens.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tokenizer_parts.h"

namespace efla::data {
namespace {

using test::decode_in_parts;
using test::encode_in_parts;
using test::expect_error;
using test::ModelOptions;
using test::random_text;
using test::sentencepiece_model;
using test::TempFolder;
using test::write_text;

using Ids = std::vector<std::int32_t>;

constexpr std::int32_t kFirst = 3 + 256;  // id of a small model's first piece

std::unique_ptr<Tokenizer> load_model(const std::string& bytes) {
  const TempFolder folder;
  return load_tokenizer(write_text(folder / "small.model", bytes));
}

std::unique_ptr<Tokenizer> small(const ModelOptions& options = {}) {
  return load_model(sentencepiece_model({"ab", "▁a", "abc", "▁", "▁▁", "a", "b", "c", "é", "▁ab"}, options));
}

TEST(Utf8, TellsCharactersFromOtherBytes) {
  for (const char* good :
       {"a", "é", "東", "🦙", "\u0080", "\u07ff", "\u0800", "\uffff", "\U00010000", "\U0010ffff"}) {
    const std::string_view text = good;
    EXPECT_EQ(utf8_character(text), static_cast<int>(text.size()));
    for (std::size_t size = 1; size < text.size(); ++size) EXPECT_EQ(utf8_character(text.substr(0, size)), -1);
  }
  for (const char* bad : {"\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80",
                          "\xf5\x80\x80\x80", "\xff", "\xc3(", "\xe6\x9d(", "\xf0\x9f\xa6("}) {
    EXPECT_EQ(utf8_character(bad), 0) << bad;
  }
  const std::vector<std::pair<std::string, std::size_t>> parts{{"\xff", 1},
                                                               {"\x80\x80", 1},
                                                               {"\xc3(", 1},
                                                               {"\xe6\x9d(", 2},
                                                               {"\xe6\x9d", 2},
                                                               {"\xe0\x9f\xbf", 1},
                                                               {"\xf0\x9f\xa6\xc3", 3},
                                                               {"\xf0\x8f\xbf\xbf", 1},
                                                               {"\xf4\x8f\xbf\xf4", 3}};
  for (const auto& [bad, size] : parts) EXPECT_EQ(utf8_maximal_part(bad), size) << bad;
  EXPECT_EQ(utf8_first("éa"), "é");
  EXPECT_EQ(utf8_first("\xffx"), "\xff");
  EXPECT_EQ(utf8_last("aé"), 1U);
  EXPECT_EQ(utf8_last("a\xf0\x9f"), 1U);
  EXPECT_EQ(utf8_last(""), 0U);
  EXPECT_EQ(utf8_prefix("twelve bytes\xff"), 12U);
  EXPECT_EQ(utf8_prefix("1234567é\xc3"), 9U);
  EXPECT_EQ(utf8_prefix(""), 0U);
}

TEST(Bytes, AreTheirOwnIds) {
  const auto bytes = load_tokenizer("bytes");
  EXPECT_EQ(bytes->vocab_size(), 258);
  EXPECT_EQ(bytes->bos(), 256);
  EXPECT_EQ(bytes->eos(), 257);
  EXPECT_EQ(bytes->encode("aé\n"), (Ids{97, 0xC3, 0xA9, 10}));
  EXPECT_EQ(bytes->decode(Ids{256, 97, 0xC3, 0xA9, 257}), "aé");
  EXPECT_EQ(bytes->decode(Ids{0xC3, 97, 0xE2, 0x82}), "\uFFFDa\uFFFD");
  // Python's bytes.decode("utf-8", "replace") gives the same.
  EXPECT_EQ(bytes->decode(Ids{0xF0, 0x9F, 0xA6, 0xE2, 0x80, 'x', 0x80, 0x80, 0xED, 0xA0, 0x80}),
            "\uFFFD\uFFFDx\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD");
  expect_error([&] { bytes->decode(Ids{258}); }, "id", "got 258, expected 0 to 257");
  expect_error([&] { bytes->decode(Ids{-1}); }, "id", "got -1");
}

TEST(StreamDecoder, HoldsBackAnUnfinishedCharacter) {
  const auto bytes = load_tokenizer("bytes");
  StreamDecoder decoder(*bytes);
  EXPECT_EQ(decoder.push(0xF0), "");
  EXPECT_EQ(decoder.push(0x9F), "");
  EXPECT_EQ(decoder.push(0xA6), "");
  EXPECT_EQ(decoder.push(0x99), "🦙");
  EXPECT_EQ(decoder.push(0xE2), "");
  EXPECT_EQ(decoder.push('x'), "\uFFFDx");
  EXPECT_EQ(decoder.push(0xE2), "");
  EXPECT_EQ(decoder.push(0x82), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(Tokenizer, TokensWithoutBytesHaveTexts) {
  using Texts = std::map<std::int32_t, std::string>;
  EXPECT_EQ(load_tokenizer("bytes")->special_texts(), (Texts{{256, "<|bos|>"}, {257, "<|eos|>"}}));
  EXPECT_EQ(small()->special_texts(), (Texts{{1, "<s>"}, {2, "</s>"}}));
  const auto chat = test::tokenizer_with_special_tokens();
  EXPECT_EQ(chat->special_texts(), (Texts{{256, "<|endoftext|>"}, {257, "<|im_start|>"}, {258, "<|im_end|>"}}));
}

TEST(StreamDecoder, BytesOfTheFirstTokenAreWithoutTheAddedSpace) {
  const auto tokenizer = small();
  StreamDecoder decoder(*tokenizer);
  const auto ids = tokenizer->encode("a a");
  EXPECT_EQ(decoder.bytes_of(ids[0]), "a");
  decoder.push(tokenizer->bos());
  EXPECT_EQ(decoder.bytes_of(ids[0]), "a");
  EXPECT_EQ(decoder.push(ids[0]), "a");
  EXPECT_EQ(decoder.bytes_of(ids[0]), " a");
}

TEST(SentencePiece, JoinsTheBestPairFirst) {
  const auto tokenizer = small();
  EXPECT_EQ(tokenizer->info().name, "small.model");
  EXPECT_EQ(tokenizer->vocab_size(), kFirst + 10);
  EXPECT_EQ(tokenizer->bos(), 1);
  EXPECT_EQ(tokenizer->eos(), 2);
  // "▁abc": ab is the best pair, then abc; ▁abc is no piece, and ▁ab would have come after abc.
  EXPECT_EQ(tokenizer->encode("abc"), (Ids{kFirst + 3, kFirst + 2}));
  EXPECT_EQ(tokenizer->encode("ab"), (Ids{kFirst + 9}));
  EXPECT_EQ(tokenizer->encode("a  a"), (Ids{kFirst + 1, kFirst + 3, kFirst + 1}));
  EXPECT_EQ(tokenizer->encode("é"), (Ids{kFirst + 3, kFirst + 8}));
  EXPECT_EQ(tokenizer->encode("\n"), (Ids{kFirst + 3, 3 + 10}));
  EXPECT_EQ(tokenizer->encode(""), Ids{});
  EXPECT_EQ(tokenizer->decode(Ids{1, kFirst + 3, kFirst + 2, 2}), "abc");
  EXPECT_EQ(tokenizer->decode(Ids{kFirst + 5, kFirst + 1}), "a a");
}

TEST(SentencePiece, WithoutBytesARunOfUnknownCharactersIsOneToken) {
  const auto tokenizer = small({.byte_fallback = false});
  EXPECT_EQ(tokenizer->encode("dd"), (Ids{3 + 3, 0}));
  EXPECT_EQ(tokenizer->encode("dda d dd d"), (Ids{6, 0, 8, 6, 0, 6, 0, 6, 0}));
  EXPECT_EQ(tokenizer->decode(Ids{6, 0, 8}), " \u2047 a");
}

TEST(SentencePiece, TextComesBackAndMayBeCut) {
  Random random(7);
  for (const bool prefix : {true, false}) {
    const auto tokenizer = small({.add_dummy_prefix = prefix});
    EXPECT_EQ(tokenizer->begins_with_added_space(kFirst + 1), prefix);
    EXPECT_FALSE(tokenizer->begins_with_added_space(0));
    for (int i = 0; i < 300; ++i) {
      auto text = random_text(random, 1 + random.below(60));
      const auto ids = tokenizer->encode(text);
      EXPECT_EQ(encode_in_parts(*tokenizer, text, 1 + random.below(20)).ids, ids) << text;
      EXPECT_EQ(decode_in_parts(*tokenizer, ids), tokenizer->decode(ids));
      // The one character that does not come back is the one that stands for a space.
      for (auto at = text.find("▁"); at != std::string::npos; at = text.find("▁")) text.replace(at, 3, " ");
      EXPECT_EQ(tokenizer->decode(ids), text);
    }
  }
}

TEST(SentencePiece, IsCutBetweenCharactersOfNoPiece) {
  Random random(8);
  const auto tokenizer = load_model(sentencepiece_model({"▁b", "a▁b", "▁a", "a", "b", "▁", "東"}));
  EXPECT_EQ(tokenizer->encode("a b"), (Ids{kFirst + 5, kFirst + 1}));
  EXPECT_EQ(tokenizer->last_cut("a b"), 0U);
  EXPECT_EQ(tokenizer->last_cut("a b a b"), 3U);
  EXPECT_EQ(tokenizer->last_cut("東東\n東"), 7U);  // without a space before it
  for (int i = 0; i < 300; ++i) {
    const auto text = random_text(random, 1 + random.below(60));
    EXPECT_EQ(encode_in_parts(*tokenizer, text, 1 + random.below(20)).ids, tokenizer->encode(text)) << text;
  }
}

TEST(SentencePiece, IsNotCutInARunOfUnknownCharacters) {
  Random random(9);
  const auto tokenizer = small({.byte_fallback = false});
  EXPECT_EQ(tokenizer->last_cut("東東d東"), 0U);
  for (int i = 0; i < 300; ++i) {
    const auto text = random_text(random, 1 + random.below(60));
    EXPECT_EQ(encode_in_parts(*tokenizer, text, 1 + random.below(20)).ids, tokenizer->encode(text)) << text;
  }
}

TEST(SentencePiece, RefusesTextThatIsNotUtf8) {
  expect_error([] { small()->encode("ab\xff"); }, "text", "a byte at 2 that is not UTF-8");
}

TEST(SentencePiece, RefusesWhatItDoesNotDo) {
  using Kind = SentencePieceModel::Kind;
  const auto refused = [](const std::string& bytes, const std::string& says) {
    test::expect_io_error([&] { load_model(bytes); }, IoError::Kind::content, -1, says + ", which is not supported");
  };
  const auto with = [](const std::string& more) { return sentencepiece_model({"a"}, {.more = more}); };
  refused(sentencepiece_model({"a"}, {.type = 1}), "the type unigram instead of BPE");
  refused(with(test::piece_field("b", 0, Kind::user_defined)), "user-defined pieces");
  refused(with(test::piece_field("b", 0, Kind::unused)), "unused pieces");
  refused(with(test::piece_field("b", 0, Kind::unknown)), "two unknown pieces");
  refused(with(test::piece_field("<0x1>", 0, Kind::byte)), "piece 260 of a byte not written as <0x..>");
  refused(with(test::bytes_field(3, test::bytes_field(2, "map"))), "a normalizer other than identity");
  refused(with(test::bytes_field(5, test::bytes_field(2, "map"))), "a normalizer other than identity");
  refused(with(test::bytes_field(3, test::number_field(4, 1))), "remove_extra_whitespaces");
  refused(with(test::bytes_field(3, test::number_field(5, 0))), "escape_whitespaces off");
  refused(with(test::bytes_field(2, test::number_field(24, 1))), "treat_whitespace_as_suffix");
  refused(sentencepiece_model({"a"}, {.byte_fallback = false, .more = test::bytes_field(2, test::number_field(35, 1))}),
          "byte_fallback and without a piece for every byte");
}

TEST(SentencePiece, RefusesFilesThatAreNoModel) {
  using Kind = SentencePieceModel::Kind;
  const auto refused = [](const std::string& bytes, std::int64_t offset, const std::string& says) {
    test::expect_bad_content([&] { parse_sentencepiece_model(io::as_bytes(bytes), "x.model"); }, offset,
                             "not a SentencePiece model: " + says);
  };
  refused("", -1, "it has no pieces");
  refused("{\"a\": 1}", 0, "wire type 3 in a protocol buffer");
  refused("\x0a\x7f", 0, "field 1 goes beyond its message");
  refused("\x0a", 0, "cut short");
  refused("\x08" + std::string(10, '\xff'), 0, "a number of more than 64 bits");
  const auto a = test::piece_field("a", -1.0F, Kind::normal);
  const auto size = static_cast<std::int64_t>(a.size());
  refused(a + a, size, "piece 1 occurs twice");
  refused(test::piece_field("", 0, Kind::normal), 0, "piece 0 is empty");
  refused(test::piece_field("\xff", 0, Kind::normal), 0, "piece 0 is not UTF-8");
  refused(a + test::piece_field("b", std::bit_cast<float>(0x7fc00000U), Kind::normal), size,
          "the score of piece 1 is not finite");
  refused(test::piece_field("b", 0, static_cast<Kind>(7)), 2 + 3 + 5, "unknown kind of piece 7");
  refused(a + test::number_field(2, 1), size, "field 2 has wire type 0, expected 2");
  const auto whole = sentencepiece_model({"a", "b"});
  for (std::size_t cut = 1; cut < whole.size(); ++cut) {
    try {
      parse_sentencepiece_model(io::as_bytes(whole).first(cut), "x.model");
    } catch (const IoError& error) {
      EXPECT_EQ(error.kind(), IoError::Kind::content);
    }
  }
}

TEST(Tokenizers, AreToldApart) {
  const auto bytes = load_tokenizer("bytes"), model = small();
  EXPECT_NO_THROW(require_same_tokenizer(bytes->info(), load_tokenizer("bytes")->info(), "train lm"));
  expect_error([&] { require_same_tokenizer(bytes->info(), model->info(), "train lm"); }, "tokenizer",
               "got small.model (sha256 " + model->info().fingerprint + "), expected bytes (sha256 ");
  test::expect_io_error([] { load_tokenizer("none.model"); }, IoError::Kind::missing, -1, "none.model: cannot open it");
}

// The PyPI package sentencepiece 0.2.3 gave the ids and texts with the same file: encode(text), and decode of the ids.
TEST(Mistral, GivesTheIdsOfSentencePiece) {
  const auto path = std::filesystem::path(EFLA_SHARED_DATA) / "mistral-tokenizer-v1.model";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no mistral-tokenizer-v1.model in " << EFLA_SHARED_DATA;
  const auto tokenizer = load_tokenizer(path);
  EXPECT_EQ(tokenizer->vocab_size(), 32000);
  EXPECT_EQ(tokenizer->bos(), 1);
  EXPECT_EQ(tokenizer->eos(), 2);
  const std::vector<std::pair<std::string, Ids>> goldens{
      {"Hello world", {22557, 1526}},
      {" ", {259}},
      {"  two  spaces ", {259, 989, 28705, 10599, 28705}},
      {"a\nb\tc", {264, 13, 28726, 12, 28717}},
      {"naïve café – 東京 🦙", {1879, 28920, 333, 28345, 764, 28705, 30366, 29936, 28705, 243, 162, 169, 156}},
      {std::string("x\0y", 3), {1318, 3, 28724}},
      {"<s>hi</s>", {523, 28713, 28767, 5365, 700, 28713, 28767}},
      {"The quick brown fox jumps over the lazy dog.",
       {415, 2936, 9060, 285, 1142, 461, 10575, 754, 272, 17898, 3914, 28723}}};
  for (const auto& [text, ids] : goldens) {
    EXPECT_EQ(tokenizer->encode(text), ids) << text;
    EXPECT_EQ(tokenizer->decode(ids), text);
    EXPECT_EQ(decode_in_parts(*tokenizer, ids), text);
  }
  EXPECT_EQ(tokenizer->encode("▁"), Ids{259});
  EXPECT_EQ(tokenizer->decode(Ids{1, 0, 28705, 28705, 22557, 0}), " \u2047    Hello \u2047 ");
  EXPECT_EQ(tokenizer->decode(Ids{231, 3, 4}), std::string("\uFFFD\0\x01", 5));
  EXPECT_EQ(tokenizer->decode(Ids{28705}), "");
  EXPECT_EQ(tokenizer->decode(Ids{28705, 28705}), " ");
  EXPECT_EQ(tokenizer->decode(Ids{1, 22557, 2, 22557}), "Hello Hello");
  EXPECT_EQ(tokenizer->decode(Ids{3 + 0xE2, 3 + 0x82, 22557}), "\uFFFD\uFFFD Hello");
  EXPECT_EQ(tokenizer->decode(Ids{3 + 0xE2, 3 + 0x82, 3 + 0xAC}), "€");
}

// What Hugging Face's tokenizers do with these files is tested in tests/python/test_hf.py, where they are installed.
TEST(TokenizerJson, OfBytesHasAPieceForEachByteInOrder) {
  const auto json = tokenizer_json("bytes");
  const auto& vocabulary = json.tokenizer.at("model").at("vocab");
  EXPECT_EQ(vocabulary.size(), 256U);
  EXPECT_EQ(vocabulary.at("a"), 97);
  EXPECT_EQ(vocabulary.at("\u0120"), 32);  // as in GPT-2
  EXPECT_EQ(vocabulary.at("\u00ff"), 255);
  EXPECT_EQ(json.tokenizer.at("added_tokens").at(1).at("id"), 257);
  EXPECT_EQ(json.config.at("eos_token"), json.tokenizer.at("added_tokens").at(1).at("content"));
}

TEST(TokenizerJson, OfSentencePieceJoinsThePiecesOfHighestScoreFirst) {
  const TempFolder folder;
  const auto path = write_text(folder / "small.model", sentencepiece_model({"ab", "▁a", "abc", "▁", "a", "b", "c"}));
  const auto json = tokenizer_json(path);
  const auto& model = json.tokenizer.at("model");
  EXPECT_EQ(model.at("vocab").at("ab"), kFirst);
  EXPECT_EQ(model.at("merges").dump(), R"([["a","b"],["▁","a"],["ab","c"]])");
  EXPECT_EQ(model.at("unk_token"), json.config.at("unk_token"));
  EXPECT_THROW(tokenizer_json((folder / "none.model").string()), IoError);
}

}  // namespace
}  // namespace efla::data
