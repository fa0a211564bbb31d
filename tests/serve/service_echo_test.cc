// Prompts that a completion repeats, with tokenizers whose tokens have other texts than the prompt.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "efla/data/tokenizers/tokenizer_json.h"
#include "tests/serve/service_fixture.h"
#include "tests/support/sentencepiece.h"
#include "tests/support/special_tokens.h"
#include "tests/support/temp_folder.h"

namespace efla::serve {
namespace {

class EchoTest : public ServiceTest {
 protected:
  // Loads a file of a tokenizer for the engine.
  void use_tokenizer(const char* name, const std::string& content) {
    const test::TempFolder folder;
    tokenizer_ = data::load_tokenizer(test::write_text(folder / name, content));
  }
  // Returns the reply to a prompt that it echoes, which must be the same as a stream, with and without logprobs.
  json echoed(const std::string& prompt, bool bos = false) const {
    json body{{"prompt", prompt}, {"echo", true}, {"logprobs", 0},
              {"max_tokens", 2},  {"seed", 0},    {"add_special_tokens", bos}};
    const auto whole = post("/v1/completions", body)["choices"][0];
    const auto joined = joined_stream(body, 1)[0];
    EXPECT_EQ(joined["text"], whole["text"]);
    EXPECT_EQ(joined["logprobs"], whole["logprobs"]);
    for (const int most : {0, 2}) {
      body.erase("logprobs");
      body["max_tokens"] = most;
      EXPECT_EQ(joined_stream(body, 1)[0]["text"], post("/v1/completions", body)["choices"][0]["text"]);
    }
    return whole;
  }
};

TEST_F(EchoTest, SpecialTokensHaveTheirTexts) {
  tokenizer_ = test::tokenizer_with_special_tokens();
  start();
  const auto reply = echoed("<|im_start|>hi");
  EXPECT_EQ(reply["text"], "<|im_start|>hiab");
  EXPECT_EQ(reply["logprobs"]["tokens"], json({"<|im_start|>", "h", "i", "a", "b"}));
  EXPECT_EQ(reply["logprobs"]["text_offset"], json({0, 12, 13, 14, 15}));
  const auto info = get("/tokenizer_info");
  EXPECT_EQ(info["eos_token"], "<|endoftext|>");
  EXPECT_EQ(info["bos_token"], nullptr);
  EXPECT_EQ(post("/tokenize", {{"prompt", info["eos_token"]}})["tokens"], json({test::kTextEnd}));
}

TEST_F(EchoTest, ATextKeepsItsForm) {
  auto document = data::tokenizer_json("bytes").tokenizer;
  document["normalizer"] = {{"type", "NFC"}};
  use_tokenizer("tokenizer.json", document.dump());
  start();
  const auto reply = echoed("e\u0301x");
  EXPECT_EQ(reply["text"], "e\u0301xab");
  EXPECT_EQ(reply["logprobs"]["text_offset"], json({0, 1, 2, 3, 4}));  // two bytes of é, and x, a, b
}

TEST_F(EchoTest, TheSpaceThatEncodeAddsIsNotText) {
  use_tokenizer("small.model", test::sentencepiece_model({"ab", "▁ab", "▁", "a", "b"}));
  start(std::string(1, '\x05'));
  const std::string text = "ab ab▁ab";
  for (const bool bos : {false, true}) {
    const auto reply = echoed(text, bos);
    EXPECT_TRUE(reply["text"].get<std::string>().starts_with(text));
    EXPECT_EQ(reply["logprobs"]["tokens"][bos ? 1 : 0], " ab");
    EXPECT_EQ(reply["logprobs"]["text_offset"], bos ? json({0, 0, 2, 5, 8, 9}) : json({0, 2, 5, 8, 9}));
  }
  // The same ids have the text that they stand for.
  const auto ids = post("/tokenize", {{"prompt", text}})["tokens"];
  const auto reply =
      post("/v1/completions", {{"prompt", ids}, {"echo", true}, {"logprobs", 0}, {"max_tokens", 0}})["choices"][0];
  EXPECT_EQ(reply["text"], "ab ab ab");
  EXPECT_EQ(reply["logprobs"]["text_offset"], json({0, 2, 5}));
}

}  // namespace
}  // namespace efla::serve
