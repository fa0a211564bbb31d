// Tokenizers in GGUF files. Hugging Face's tokenizers 0.23.3 gave the expected ids.
#include "efla/data/tokenizers/gguf_tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "efla/data/tokenizers/tokenizer_config.h"
#include "efla/data/tokenizers/tokenizer_json.h"
#include "tests/support/byte_level.h"
#include "tests/support/expect_error.h"
#include "tests/support/gguf.h"
#include "tests/support/temp_folder.h"

namespace efla::data {
namespace {

using test::GgufBytes;
using Ids = std::vector<std::int32_t>;
using Texts = std::vector<std::string>;

constexpr std::int64_t kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5;

// The tokens of byte_level_json, "xÌ" with a merge, and a token that is unused.
struct Parts {
  Texts tokens, merges;
  std::vector<std::int64_t> types;
  std::string model = "gpt2";

  Parts() {
    const auto document = test::byte_level_json(test::byte_level_step(false));
    std::map<int, std::string> by_id;
    for (const auto& [text, id] : document["model"]["vocab"].items()) by_id[id] = text;
    for (const auto& [id, text] : by_id) tokens.push_back(text);
    types.assign(tokens.size(), kNormal);
    for (const auto& token : document["added_tokens"]) {
      tokens.push_back(token["content"]);
      types.push_back(token["special"].get<bool>() ? kControl : kUserDefined);
    }
    for (const auto& merge : document["model"]["merges"]) {
      merges.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
    }
    merges.push_back("x Ì");
    tokens.insert(tokens.end(), {"xÌ", "[PAD278]"});
    types.insert(types.end(), {kNormal, kUnused});
  }
  GgufBytes file(const std::string& pre) const {
    GgufBytes file;
    file.text("tokenizer.ggml.model", model).text("tokenizer.ggml.pre", pre).texts("tokenizer.ggml.tokens", tokens);
    file.integers("tokenizer.ggml.token_type", types).texts("tokenizer.ggml.merges", merges);
    return file;
  }
};

std::string written(const test::TempFolder& folder, const GgufBytes& file) {
  return test::write_text(folder / "m.gguf", file.bytes());
}

struct TextIds {
  std::string text;
  Ids ids;
};

void expect_ids(const std::string& pre, const std::vector<TextIds>& goldens) {
  const test::TempFolder folder;
  const auto tokenizer = load_tokenizer(written(folder, Parts().file(pre)));
  for (const auto& [text, ids] : goldens) EXPECT_EQ(tokenizer->encode(text), ids) << pre << ": " << text;
  for (const auto& [text, ids] :
       std::vector<TextIds>{{"They'll THE'LL", {84, 104, 101, 121, 266, 32, 84, 72, 69, 39, 76, 76}},
                            {"<think>the<|eos|>in<|eos", {275, 257, 274, 259, 60, 124, 101, 111, 115}},
                            {"\n\n the\r\n", {267, 258, 13, 10}},
                            {"a    b   c", {97, 276, 32, 98, 276, 99}}}) {
    EXPECT_EQ(tokenizer->encode(text), ids) << pre << ": " << text;
  }
}

TEST(GgufTokenizer, EncodesAsTheTokenizerJsonOfItsModels) {
  constexpr const char* kMarks = "x\u0303e\u0301\u0303 the";
  expect_ids("qwen2", {{"12345 1 2", {49, 50, 51, 52, 53, 32, 49, 32, 50}},
                       {"e\u0301é (the in", {264, 264, 32, 40, 257, 260}},
                       {kMarks, {120, 204, 131, 264, 204, 131, 258}}});
  expect_ids("qwen35", {{"12345 1 2", {49, 50, 51, 52, 53, 32, 49, 32, 50}},
                        {"e\u0301é (the in", {264, 264, 32, 40, 257, 260}},
                        {kMarks, {277, 131, 264, 204, 131, 258}}});
  expect_ids("dbrx", {{"12345 1 2", {262, 269, 32, 49, 32, 50}},
                      {"e\u0301é (the in", {101, 204, 129, 264, 32, 40, 257, 260}},
                      {kMarks, {120, 204, 131, 101, 204, 129, 204, 131, 258}}});
}

TEST(GgufTokenizer, HasTheTokensThatItsFileNames) {
  const test::TempFolder folder;
  auto file = Parts().file("qwen35");
  file.integer("tokenizer.ggml.bos_token_id", 273).integer("tokenizer.ggml.eos_token_id", 274);
  file.integer("tokenizer.ggml.padding_token_id", 274);
  const auto path = written(folder, file);
  const auto tokenizer = load_tokenizer(path);
  EXPECT_EQ(tokenizer->bos(), 273);
  EXPECT_EQ(tokenizer->eos(), 274);
  EXPECT_EQ(tokenizer->vocab_size(), 278);
  EXPECT_EQ(tokenizer->special_texts(), (std::map<std::int32_t, std::string>{{273, "<|bos|>"}, {274, "<|eos|>"}}));
  EXPECT_EQ(tokenizer->decode(Ids{275, 257, 274}), "<think>the");
  EXPECT_EQ(read_tokenizer_config(path).text_of("pad_token"), "<|eos|>");
  EXPECT_EQ(tokenizer->info().name, "m.gguf");
  // A folder with the files that it is converted to has the same tokenizer.
  const auto converted = tokenizer_json(path);
  test::write_text(folder / "tokenizer_config.json", converted.config.dump());
  const auto again = load_tokenizer(test::write_text(folder / "tokenizer.json", converted.tokenizer.dump()));
  EXPECT_EQ(again->info().fingerprint, tokenizer->info().fingerprint);
  EXPECT_EQ(again->eos(), 274);
}

// A file with the entries of a tokenizer.json has the same tokens as the file of which it was made.
TEST(GgufTokenizer, IsWritten) {
  for (const std::string pre : {"qwen2", "qwen35", "dbrx"}) {
    SCOPED_TRACE(pre);
    const test::TempFolder folder;
    const auto first = written(
        folder,
        Parts().file(pre).integer("tokenizer.ggml.bos_token_id", 273).integer("tokenizer.ggml.padding_token_id", 274));
    const auto json = tokenizer_json(first);
    test::write_text(folder / "tokenizer_config.json", json.config.dump());
    const auto path = test::write_text(folder / "tokenizer.json", json.tokenizer.dump());
    io::write_gguf(folder / "again.gguf", gguf_tokenizer_entries(path, 279), {});
    const io::GgufFile file(folder / "m.gguf"), again(folder / "again.gguf");
    for (const auto& [key, value] : file.metadata()) EXPECT_EQ(again.metadata().at(key), value) << key;
    EXPECT_EQ(load_tokenizer((folder / "again.gguf").string())->info().fingerprint,
              load_tokenizer(first)->info().fingerprint);
    test::expect_bad_content([&] { gguf_tokenizer_entries(path, 277); }, -1,
                             "278 ids, but the embeddings have 277 rows");
  }
  const test::TempFolder folder;
  const auto other =
      test::write_text(folder / "tokenizer.json", test::byte_level_json(test::byte_level_step(true)).dump());
  test::expect_bad_content([&] { gguf_tokenizer_entries(other, 300); }, -1, "splits texts in another way");
}

TEST(GgufTokenizer, IsMissingInFilesWithoutOne) {
  const test::TempFolder folder;
  EXPECT_TRUE(has_gguf_tokenizer(written(folder, Parts().file("qwen35"))));
  EXPECT_FALSE(has_gguf_tokenizer(written(folder, GgufBytes())));
  EXPECT_FALSE(has_gguf_tokenizer(written(folder, GgufBytes().text("tokenizer.ggml.model", "none"))));
}

TEST(GgufTokenizer, ReadsChatTemplates) {
  const test::TempFolder folder;
  auto file = Parts().file("qwen35");
  EXPECT_FALSE(gguf_tokenizer_config(written(folder, file)).contains("chat_template"));
  file.text("tokenizer.chat_template", "usual");
  EXPECT_EQ(gguf_tokenizer_config(written(folder, file))["chat_template"], "usual");
  file.texts("tokenizer.chat_templates", Texts{"tool_use"}).text("tokenizer.chat_template.tool_use", "tools");
  const nlohmann::json both = {{{"name", "default"}, {"template", "usual"}},
                               {{"name", "tool_use"}, {"template", "tools"}}};
  EXPECT_EQ(gguf_tokenizer_config(written(folder, file))["chat_template"], both);
}

TEST(GgufTokenizer, RefusesByNameWhatItDoesNotImplement) {
  const test::TempFolder folder;
  const auto refuse = [&](const GgufBytes& file, const std::string& says) {
    const auto path = written(folder, file);
    test::expect_bad_content([&] { load_tokenizer(path); }, -1, says);
  };
  const auto changed = [](auto change) {
    Parts parts;
    change(parts);
    return parts.file("qwen35");
  };
  refuse(GgufBytes(), "tokenizer.ggml.model: got none, expected gpt2");
  refuse(changed([](Parts& parts) { parts.model = "llama"; }), "tokenizer.ggml.model: got \"llama\", expected gpt2");
  refuse(Parts().file("gpt-4o"), "tokenizer.ggml.pre: got \"gpt-4o\", expected qwen2, qwen35 or dbrx");
  refuse(GgufBytes().text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "dbrx"),
         "has no tokenizer.ggml.tokens");
  refuse(changed([](Parts& parts) { parts.types.pop_back(); }), "got 278 types, expected one for each of 279 tokens");
  refuse(changed([](Parts& parts) { parts.types[0] = 6; }), "tokenizer.ggml.token_type: got 6, expected 1 to 5");
  refuse(changed([](Parts& parts) { parts.tokens[1] = parts.tokens[0]; }), "twice");
  refuse(changed([](Parts& parts) { parts.tokens[1] = "\xff"; }), "a text that is not UTF-8");
  refuse(changed([](Parts& parts) { parts.tokens[273] = ""; }), "expected a text that is not empty");
  refuse(changed([](Parts& parts) { parts.merges[0] = "th"; }), "expected two tokens");
  for (const std::int64_t id : {-1, 278, 279}) {  // 278 is unused
    refuse(Parts().file("qwen35").integer("tokenizer.ggml.eos_token_id", id),
           "tokenizer.ggml.eos_token_id: got " + std::to_string(id) + ", which is no token");
  }
}

}  // namespace
}  // namespace efla::data
