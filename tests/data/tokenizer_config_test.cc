// Added tokens, their ids, and the files beside a tokenizer. Hugging Face's tokenizers 0.23.3 gave the expected ids
// and, where other files are involved, the AutoTokenizer of transformers 5.24.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "efla/data/tokenizers/tokenizer.h"
#include "tests/support/byte_level.h"
#include "tests/support/expect_error.h"
#include "tests/support/sentencepiece.h"
#include "tests/support/temp_folder.h"

namespace efla::data {
namespace {

using nlohmann::json;
using test::added_token;
using test::TempFolder;
using test::write_text;

using Ids = std::vector<std::int32_t>;

class TokenizerFiles : public testing::Test {
 protected:
  void write(const char* name, const json& content) { write_text(folder_ / name, content.dump()); }

  // A tokenizer.json of the 256 bytes, `more` texts in its vocabulary, and added tokens.
  void write_tokenizer(const std::vector<json>& added, const json& more = json::object(),
                       const json& merges = json::array()) {
    json document = test::byte_level_json(test::byte_level_step(true));
    auto& model = document["model"];
    for (auto it = model["vocab"].begin(); it != model["vocab"].end();) {
      it = it.value() >= 256 ? model["vocab"].erase(it) : std::next(it);
    }
    model["vocab"].update(more);
    model["merges"] = merges;
    document["added_tokens"] = json(added);
    write("tokenizer.json", document);
  }

  void write_model() {
    write_text(folder_ / "tokenizer.model", test::sentencepiece_model({"▁hi", "h", "i", "▁", "▁h"}));
  }

  std::unique_ptr<Tokenizer> load(const char* name = "tokenizer.json") { return load_tokenizer(folder_.file(name)); }
  Ids encode(const std::string& text) { return load()->encode(text); }

  TempFolder folder_;
};

json special(std::size_t id, const std::string& text) { return added_token(id, text, true, false); }

TEST_F(TokenizerFiles, AddedTokensAreNumberedAsTokenizersDoes) {
  write_tokenizer({special(256, "<a>"), special(300, "<b>")});  // a gap
  EXPECT_EQ(encode("x<b>"), (Ids{120, 257}));
  EXPECT_EQ(load()->vocab_size(), 258);
  write_tokenizer({special(257, "<a>"), special(256, "<b>")});  // in another order
  EXPECT_EQ(encode("<a><b>"), (Ids{256, 257}));
  write_tokenizer({special(256, "<a>"), special(256, "<b>")});  // one id for two texts
  EXPECT_EQ(encode("<a><b>"), (Ids{256, 257}));
  write_tokenizer({special(256, "<a>"), special(257, "<a>"), special(258, "<b>")});  // one text twice
  EXPECT_EQ(encode("<a><b>"), (Ids{256, 257}));
  write_tokenizer({special(256, "a"), special(257, "<b>")});  // another id than the vocabulary's
  EXPECT_EQ(encode("a<b>"), (Ids{97, 256}));
  write_tokenizer({special(300, "zz"), special(301, "<b>")}, {{"zz", 300}});  // a gap in the vocabulary
  EXPECT_EQ(encode("zz<b>"), (Ids{300, 257}));
  EXPECT_EQ(load()->vocab_size(), 301);
}

TEST_F(TokenizerFiles, SpecialTokensAreNotFoundInTextAsText) {
  write_tokenizer({special(256, "<a>"), added_token(257, "a>", false, false)});
  EXPECT_EQ(load()->encode_part("<a>a>", false), (Ids{256, 257}));
  EXPECT_EQ(load()->encode_as_text("<a>a>", false), (Ids{'<', 257, 257}));
}

TEST_F(TokenizerFiles, OfAMergeGivenTwiceTheLastRankCounts) {
  const json vocabulary{{"th", 256}, {"he", 257}, {"the", 258}};
  write_tokenizer({}, vocabulary, {"t h", "h e", "th e", "t h"});
  EXPECT_EQ(encode("the"), (Ids{116, 257}));
}

TEST_F(TokenizerFiles, MergesMayBeginWithAVersion) {
  const json vocabulary{{"th", 256}, {"the", 257}};
  write_tokenizer({}, vocabulary, {"#version: 0.2", "t h", "th e"});
  EXPECT_EQ(encode("the"), (Ids{257}));
}

TEST_F(TokenizerFiles, TokensOfTheConfigurationAreFound) {
  write_tokenizer({special(256, "<a>")});
  const auto alone = load()->info();
  json extra = special(257, "<|extra|>");
  extra.erase("id");
  const json decoder{{"256", special(256, "<a>")}, {"257", extra}};
  write("tokenizer_config.json", {{"added_tokens_decoder", decoder}, {"eos_token", "<|extra|>"}});
  EXPECT_EQ(encode("x<|extra|>"), (Ids{120, 257}));
  EXPECT_EQ(load()->eos(), 257);
  EXPECT_EQ(load()->vocab_size(), 258);
  EXPECT_NE(load()->info().fingerprint, alone.fingerprint);
  EXPECT_EQ(load()->decode(Ids{120, 257}), "x");

  write("tokenizer_config.json", {{"added_tokens_decoder", {{"256", special(256, "<a>")}}}});
  EXPECT_EQ(load()->info().fingerprint, alone.fingerprint);  // nothing that tokenizer.json does not say
  write("tokenizer_config.json", {{"added_tokens_decoder", {{"256", added_token(256, "<a>", false, false)}}}});
  EXPECT_EQ(load()->decode(Ids{256}), "");  // once special, always special
}

TEST_F(TokenizerFiles, OfOlderVersionsHaveAddedTokensInAFileOfTheirOwn) {
  write_tokenizer({special(256, "<a>")});
  write("added_tokens.json", {{"<|two|>", 258}, {"<|one|>", 257}, {"<a>", 256}});
  write("special_tokens_map.json", {{"eos_token", {{"content", "<|two|>"}}}});
  EXPECT_EQ(encode("<a><|one|><|two|>"), (Ids{256, 257, 258}));
  EXPECT_EQ(load()->eos(), 258);
  EXPECT_EQ(load()->decode(Ids{256, 257, 258}), "<|one|>");
  write("tokenizer_config.json", {{"additional_special_tokens", json::array({"<|one|>"})}});
  EXPECT_EQ(load()->decode(Ids{257}), "");
  // Newer ones have them in the configuration, which counts alone.
  write("tokenizer_config.json", {{"added_tokens_decoder", json::object()}});
  EXPECT_EQ(load()->vocab_size(), 257);
  EXPECT_EQ(load()->eos(), -1);
}

TEST_F(TokenizerFiles, MayAddTokensToASentencePieceModel) {
  write_model();
  const auto plain = load("tokenizer.model");
  const auto text = "hi<|im_start|>hi<|im_end|>";
  EXPECT_EQ(plain->vocab_size(), 264);
  write("added_tokens.json", {{"<|im_start|>", 264}, {"<|im_end|>", 265}});
  write("tokenizer_config.json", {{"eos_token", "<|im_end|>"}});
  const auto chat = load("tokenizer.model");
  EXPECT_EQ(chat->encode(text), (Ids{259, 264, 260, 261, 265}));
  EXPECT_EQ(chat->bos(), plain->bos());
  EXPECT_EQ(chat->eos(), 265);
  EXPECT_EQ(chat->encode("hi hi"), plain->encode("hi hi"));
  write("tokenizer_config.json", {{"eos_token", "<|im_end|>"}, {"legacy", true}});
  EXPECT_EQ(load("tokenizer.model")->encode(text), (Ids{259, 264, 259, 265}));
  // The model's own symbols add nothing.
  write("tokenizer_config.json", {{"eos_token", "</s>"}, {"added_tokens_decoder", {{"2", special(2, "</s>")}}}});
  EXPECT_EQ(load("tokenizer.model")->info().fingerprint, plain->info().fingerprint);
}

TEST_F(TokenizerFiles, AreNamedWhereATokenIsInNone) {
  write_tokenizer({special(256, "<a>")});
  const auto refused = [&](const char* name, const json& content, const std::string& says) {
    write(name, content);
    test::expect_io_error([&] { load(); }, IoError::Kind::content, -1, folder_.file(name) + ": " + says);
    std::filesystem::remove(folder_ / name);
  };
  refused("tokenizer_config.json", {{"eos_token", "</s>"}},
          "eos_token: got \"</s>\", expected a token of tokenizer.json, or an added token of tokenizer_config.json "
          "(added_tokens_decoder) or added_tokens.json");
  refused("special_tokens_map.json", {{"bos_token", "<s>"}}, "bos_token: got \"<s>\", expected a token of");
  refused("tokenizer_config.json", {{"eos_token", 3}}, "eos_token: got 3, expected a token");
  refused("tokenizer_config.json", {{"added_tokens_decoder", {{"x", special(256, "<a>")}}}},
          "added_tokens_decoder.x: got ");
  json stripped = special(257, "<b>");
  stripped["lstrip"] = true;
  refused("tokenizer_config.json", {{"added_tokens_decoder", {{"257", stripped}}}}, "a tokenizer with lstrip of the");
  refused("added_tokens.json", {{"<b>", "257"}}, "<b>: got \"257\", expected");
  refused("added_tokens.json", json::array({"<b>"}), "got [\"<b>\"], expected an object");
}

}  // namespace
}  // namespace efla::data
