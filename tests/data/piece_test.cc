// BPE over characters from a tokenizer.json. Hugging Face's tokenizers 0.23.3 gave the expected ids and texts.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "efla/base/random.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/data/tokenizers/tokenizer_json.h"
#include "tests/support/byte_level.h"
#include "tests/support/expect_error.h"
#include "tests/support/sentencepiece.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tokenizer_parts.h"

namespace efla::data {
namespace {

using nlohmann::json;
using test::added_token;
using test::decode_in_parts;
using test::encode_in_parts;
using test::ModelOptions;
using test::sentencepiece_model;
using test::TempFolder;
using test::write_text;

using Ids = std::vector<std::int32_t>;

const json kReplace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}};
const json kPrepend = {{"type", "Prepend"}, {"prepend", "▁"}};
const json kBoth = {{"type", "Sequence"}, {"normalizers", {kPrepend, kReplace}}};

json metaspace(const char* scheme, bool split) {
  return {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", scheme}, {"split", split}};
}

std::string model_bytes(const ModelOptions& options = {}) {
  return sentencepiece_model({"th", "the", "▁the", "in", "▁in", "▁▁", "▁", "t", "h", "e", "i", "n", "é"}, options);
}

// Returns what efla export writes for a small SentencePiece model. <unk>, <s> and </s> are followed by the 256 bytes;
// th is 259, ▁ 265; 272 <think> and 273 <end> are added.
json piece_json(const json& normalizer, const json& pre_tokenizer) {
  const TempFolder folder;
  json document = tokenizer_json(write_text(folder / "small.model", model_bytes())).tokenizer;
  document["normalizer"] = normalizer;
  document["pre_tokenizer"] = pre_tokenizer;
  document["added_tokens"].push_back(added_token(272, "<think>", false, false));
  document["added_tokens"].push_back(added_token(273, "<end>", false, true));
  return document;
}

std::unique_ptr<Tokenizer> load_pieces(const json& document) {
  const TempFolder folder;
  return load_tokenizer(write_text(folder / "tokenizer.json", document.dump()));
}

struct PieceGolden {
  std::string text;
  Ids ids;
  std::string decoded;
};

void expect_goldens(const Tokenizer& tokenizer, const std::vector<PieceGolden>& goldens) {
  for (const auto& [text, ids, decoded] : goldens) {
    EXPECT_EQ(tokenizer.encode(text), ids) << text;
    EXPECT_EQ(tokenizer.decode(ids), decoded);
    EXPECT_EQ(decode_in_parts(tokenizer, ids), decoded);
  }
}

TEST(PieceTokenizer, PrependsASpaceToEachPart) {
  expect_goldens(*load_pieces(piece_json(kBoth, nullptr)),
                 {{"the  in", {261, 265, 263}, "the  in"},
                  {"<think>the<s> in", {272, 261, 1, 265, 263}, "<think> the  in"},
                  {" the", {265, 261}, " the"},
                  {"é東", {265, 271, 233, 160, 180}, "é東"},
                  {"the <end>the", {261, 273, 260}, "the <end>the"},
                  {"  ", {264, 265}, "  "},
                  {"", {}, ""}});
}

TEST(PieceTokenizer, ReplacesSpacesAlone) {
  json document = piece_json(kReplace, {{"type", "Split"},
                                        {"pattern", {{"String", " "}}},
                                        {"behavior", "MergedWithPrevious"},
                                        {"invert", false}});  // as Gemma has it
  const std::vector<PieceGolden> goldens{{"the  in", {260, 265, 263}, "the  in"},
                                         {"<think>the<s> in", {272, 260, 1, 263}, "<think>the in"},
                                         {" the", {261}, " the"},
                                         {"é東", {271, 233, 160, 180}, "é東"},
                                         {"the <end>the", {260, 265, 273, 260}, "the <end>the"}};
  document["decoder"]["decoders"].erase(3);
  expect_goldens(*load_pieces(document), goldens);
  document["pre_tokenizer"] = metaspace("never", true);
  document["normalizer"] = nullptr;
  expect_goldens(*load_pieces(document), goldens);
}

TEST(PieceTokenizer, MetaspaceBeginsTheFirstPartOrEachPartWithASpace) {
  const PieceGolden same{"the  in", {261, 265, 263}, "the  in"}, space{" the", {261}, "the"};
  expect_goldens(*load_pieces(piece_json(nullptr, metaspace("first", false))),
                 {same,
                  space,
                  {"<think>the<s> in", {272, 260, 1, 263}, "<think>the in"},
                  {"the <end>the", {261, 265, 273, 260}, "the <end>the"},
                  {"  ", {264}, " "}});
  expect_goldens(*load_pieces(piece_json(nullptr, metaspace("always", false))),
                 {same,
                  space,
                  {"<think>the<s> in", {272, 261, 1, 263}, "<think> the in"},
                  {"the <end>the", {261, 265, 273, 261}, "the <end> the"}});
  expect_goldens(*load_pieces(piece_json(nullptr, metaspace("first", true))), {same, space, {"  ", {265, 265}, " "}});
}

TEST(PieceTokenizer, WithoutBytesCharactersAreUnknown) {
  json document = piece_json(kBoth, nullptr);
  document["model"]["byte_fallback"] = false;
  EXPECT_EQ(load_pieces(document)->encode("é東東t"), (Ids{265, 271, 0, 266}));
  document["model"]["fuse_unk"] = false;
  EXPECT_EQ(load_pieces(document)->encode("é東東t"), (Ids{265, 271, 0, 0, 266}));
}

TEST(PieceTokenizer, TakesWholeWordsWithoutMerges) {
  json document = piece_json(nullptr, metaspace("first", true));
  document["model"]["merges"] = json::array();
  document["model"]["ignore_merges"] = true;
  EXPECT_EQ(load_pieces(document)->encode("the <end>the th"), (Ids{261, 265, 273, 260, 265, 266, 267}));
}

TEST(PieceTokenizer, OfAnExportedModelIsTheModel) {
  Random random(11);
  const std::vector<ModelOptions> kinds{{}, {.add_dummy_prefix = false}, {.byte_fallback = false}};
  for (const auto& options : kinds) {
    const TempFolder folder;
    const auto path = write_text(folder / "small.model", model_bytes(options));
    const auto model = load_tokenizer(path), pieces = load_pieces(tokenizer_json(path).tokenizer);
    for (int i = 0; i < 200; ++i) {
      const auto text = test::random_text(random, 1 + random.below(40));
      const auto ids = model->encode(text);
      EXPECT_EQ(pieces->encode(text), ids) << text;
      if (options.byte_fallback) {
        EXPECT_EQ(pieces->decode(ids), model->decode(ids));
      }
    }
  }
}

TEST(PieceTokenizer, ATextIsCutBetweenCharactersOfNoToken) {
  Random random(13);
  const std::vector<std::pair<json, json>> stages{{kBoth, nullptr},
                                                  {kReplace, nullptr},
                                                  {nullptr, metaspace("first", false)},
                                                  {nullptr, metaspace("always", true)}};
  for (const auto& [normalizer, pre_tokenizer] : stages) {
    for (const bool bytes : {true, false}) {
      for (const bool whole_words : {true, false}) {
        json document = piece_json(normalizer, pre_tokenizer);
        document["model"]["byte_fallback"] = bytes;
        document["model"]["ignore_merges"] = whole_words;
        document["added_tokens"].push_back(added_token(274, "b c", false, false));
        const auto tokenizer = load_pieces(document);
        std::size_t parts = 0;
        for (int i = 0; i < 200; ++i) {
          auto text = test::random_text(random, 1 + random.below(30)) + "the in" + test::random_text(random, 5);
          if (random.below(2) == 0) text += "<think>" + test::random_text(random, 1 + random.below(30)) + "<end>the";
          const auto encoded = encode_in_parts(*tokenizer, text, 8 + random.below(20));
          EXPECT_EQ(encoded.ids, tokenizer->encode(text)) << text;
          parts += encoded.parts;
        }
        EXPECT_GT(parts, whole_words ? 199U : 400U);
      }
    }
    const auto tokenizer = load_pieces(piece_json(normalizer, pre_tokenizer));
    EXPECT_EQ(tokenizer->last_cut("the the"), 3U);
    EXPECT_EQ(tokenizer->last_cut("東\n東"), 4U);
    EXPECT_EQ(tokenizer->last_cut("t<s>"), 1U);
    EXPECT_EQ(tokenizer->last_cut("<s> "), 0U);  // an added space may come here
    EXPECT_EQ(tokenizer->last_cut("the"), 0U);
  }
}

TEST(PieceTokenizer, ATextIsNotCutBetweenCharactersWhoseBytesAreJoined) {
  json document = piece_json(kBoth, nullptr);
  document["model"]["vocab"]["<0xB1><0xE6>"] = 272;  // of 東東
  document["model"]["merges"].push_back({"<0xB1>", "<0xE6>"});
  const auto tokenizer = load_pieces(document);
  EXPECT_EQ(tokenizer->encode("東東").size(), 6U);
  EXPECT_EQ(tokenizer->last_cut("東東"), 0U);
  EXPECT_EQ(tokenizer->last_cut("the the東東"), 3U);
}

TEST(PieceTokenizer, OfMistralIsItsSentencePieceModel) {
  const auto path = std::filesystem::path(EFLA_SHARED_DATA) / "mistral-tokenizer-v1.model";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no mistral-tokenizer-v1.model in " << EFLA_SHARED_DATA;
  const auto model = load_tokenizer(path.string()), pieces = load_pieces(tokenizer_json(path.string()).tokenizer);
  EXPECT_EQ(pieces->vocab_size(), 32000);
  for (const std::string text :
       {"Hello world", "  two  spaces ", "a\nb\tc", "naïve café – 東京 🦙", "The quick brown fox"}) {
    EXPECT_EQ(pieces->encode(text), model->encode(text)) << text;
    EXPECT_EQ(pieces->decode(pieces->encode(text)), text);
  }
}

TEST(PieceTokenizer, RefusesByNameWhatItDoesNotImplement) {
  const auto refused = [](const char* place, const json& value, const std::string& what) {
    json document = piece_json(kBoth, nullptr);
    document[json::json_pointer(place)] = value;
    test::expect_io_error([&] { load_pieces(document); }, IoError::Kind::content, -1, what);
  };
  const json broken = {{"type", "Metaspace"}, {"replacement", "_"}};
  json mismatch = metaspace("first", true), unknown = metaspace("last", true);
  mismatch["add_prefix_space"] = false;
  refused("/normalizer", {{"type", "NFKC"}}, R"(the normalizer {"type":"NFKC"}, which is not supported)");
  refused("/normalizer/normalizers/0/prepend", "_", R"(the normalizer {"prepend":"_","type":"Prepend"})");
  refused("/normalizer", nullptr, "spaces that neither stage replaces by ▁");
  refused("/pre_tokenizer", broken, R"(the pre_tokenizer {"replacement":"_","type":"Metaspace"})");
  refused("/pre_tokenizer", mismatch, "pre_tokenizer.add_prefix_space: got false, expected true, or");
  refused("/pre_tokenizer", unknown, R"(pre_tokenizer.prepend_scheme: got "last", expected never, first or always)");
  refused("/decoder", nullptr, "another decoder than ByteLevel, or Replace");
  refused("/decoder/decoders/3/start", 2, "another decoder");
  json document = piece_json(kBoth, nullptr);
  document["model"]["vocab"].erase("<0x0A>");
  test::expect_io_error([&] { load_pieces(document); }, IoError::Kind::content, -1, "no token of the byte 10");
  document["model"]["byte_fallback"] = false;
  document["model"]["unk_token"] = nullptr;
  test::expect_io_error([&] { load_pieces(document); }, IoError::Kind::content, -1,
                        "model.unk_token: got null, expected a token, or byte_fallback");
}

}  // namespace
}  // namespace efla::data
