// efla import, efla export and efla logits.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/io/json.h"
#include "efla/io/safetensors/safetensors.h"
#include "tests/support/byte_level.h"
#include "tests/support/program.h"
#include "tests/support/sentencepiece.h"

namespace efla::test {
namespace {

namespace fs = std::filesystem;
using io::NamedTensor;
using io::TensorType;

template <class T>
NamedTensor entry(const std::string& name, TensorType type, std::vector<std::int64_t> shape,
                  const std::vector<T>& data) {
  return {name, type, std::move(shape), {reinterpret_cast<const std::uint8_t*>(data.data()), data.size() * sizeof(T)}};
}

std::vector<float> floats(const NamedTensor& tensor) {
  std::vector<float> all(tensor.bytes.size() / sizeof(float));
  std::memcpy(all.data(), tensor.bytes.data(), tensor.bytes.size());
  return all;
}

class Checkpoints : public ::testing::Test {
 protected:
  // A DeltaNet of one layer and width 2 whose weights are all 0 but for embeddings, norms and the head: its logits are
  // head · norm(embedding).
  void SetUp() override {
    fs::create_directory(model_);
    config_ = {{"model_type", "delta_net"}, {"hidden_size", 2}, {"num_hidden_layers", 1}, {"num_heads", 1},
               {"vocab_size", 3},           {"conv_size", 2},   {"intermediate_size", 1}, {"norm_eps", 1e-12}};
    write_config();
    const std::vector<float> zeros(6, 0.0F), ones(2, 1.0F), embeddings{1, 0, 0, 1, 1, 1}, head{1, 2, 3, 4, 5, 6};
    std::vector<NamedTensor> all;
    const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, const std::vector<float>& data) {
      std::int64_t size = 1;
      for (const auto extent : shape) size *= extent;
      auto tensor = entry(name, TensorType::F32, std::move(shape), data);
      tensor.bytes = tensor.bytes.first(static_cast<std::size_t>(size) * sizeof(float));
      all.push_back(tensor);
    };
    add("model.embeddings.weight", {3, 2}, embeddings);
    const std::string layer = "model.layers.0.";
    for (const char* norm : {"attn_norm", "mlp_norm", "attn.o_norm"}) add(layer + norm + ".weight", {2}, ones);
    for (const char* projection : {"q", "k", "v", "o"})
      add(layer + "attn." + projection + "_proj.weight", {2, 2}, zeros);
    add(layer + "attn.b_proj.weight", {1, 2}, zeros);
    for (const char* conv : {"q", "k", "v"}) add(layer + "attn." + conv + "_conv1d.weight", {2, 1, 2}, zeros);
    for (const char* projection : {"gate", "up"}) add(layer + "mlp." + projection + "_proj.weight", {1, 2}, zeros);
    add(layer + "mlp.down_proj.weight", {2, 1}, zeros);
    add("model.norm.weight", {2}, ones);
    add("lm_head.weight", {3, 2}, head);
    io::write_safetensors(fs::path(model_) / "model.safetensors", all);
    const std::vector<std::int64_t> ids{0, 2};
    io::write_safetensors(ids_, std::vector{entry("input_ids", TensorType::I64, {1, 2}, ids)});
  }

  void write_config() { write_text(fs::path(model_) / "config.json", config_.dump()); }

  TempFolder folder_;
  std::string model_ = folder_.file("model"), ids_ = folder_.file("ids"), out_ = folder_.file("out");
  nlohmann::json config_;
};

TEST_F(Checkpoints, ATokenizerGoesAlong) {
  ASSERT_EQ(run_program({"import", model_, "--out", folder_.file("without")}).exit_code, 0);
  EXPECT_FALSE(fs::exists(folder_.file("without") + "/tokenizer.model"));
  write_text(fs::path(model_) / "tokenizer.model", "bytes as they are");
  const auto result = run_program({"export", model_, "--out", out_});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("with its tokenizer"), std::string::npos) << result.out;
  EXPECT_EQ(read_text(out_ + "/tokenizer.model"), "bytes as they are");
  EXPECT_NE(result.out.find("without tokenizer.json: "), std::string::npos) << result.out;
  EXPECT_FALSE(fs::exists(out_ + "/tokenizer.json"));
  write_text(fs::path(model_) / "tokenizer.model", sentencepiece_model({"ab", "a", "b"}));
  ASSERT_EQ(run_program({"export", model_, "--out", folder_.file("for_transformers")}).exit_code, 0);
  EXPECT_TRUE(io::read_json(folder_.file("for_transformers") + "/tokenizer.json").contains("model"));
  EXPECT_TRUE(io::read_json(folder_.file("for_transformers") + "/tokenizer_config.json").contains("eos_token"));

  fs::remove(fs::path(model_) / "tokenizer.model");
  write_text(fs::path(model_) / "run.json", R"({"config": {"data": {"tokenizer": "/no/where.model"}}})");
  const auto moved = run_program({"export", model_, "--out", folder_.file("moved")});
  ASSERT_EQ(moved.exit_code, 0) << moved.err;
  EXPECT_NE(moved.out.find("without its tokenizer: /no/where.model does not exist"), std::string::npos) << moved.out;
  write_text(fs::path(model_) / "run.json", R"({"config": {"data": {"tokenizer": 3}}})");
  EXPECT_TRUE(is_user_mistake(run_program({"export", model_, "--out", folder_.file("wrong")}), "run.json"));
}

TEST_F(Checkpoints, ATokenizerThatCannotBeReadIsNotImported) {
  const auto refused = [&](const char* file, const std::string& text, const std::string& says) {
    write_text(fs::path(model_) / file, text);
    EXPECT_TRUE(is_user_mistake(run_program({"import", model_, "--out", out_}), says));
    EXPECT_FALSE(fs::exists(out_));
    fs::remove(fs::path(model_) / file);
  };
  const std::string model = model_ + "/tokenizer.model: at byte ", json = model_ + "/tokenizer.json: ";
  refused("tokenizer.model", "bytes as they are", model);
  const auto whole = sentencepiece_model({"ab", "a", "b"});
  refused("tokenizer.model", whole.substr(0, whole.size() - 3), model);
  refused("tokenizer.json", "{}", json + "model: got nothing, expected an object");
  const auto document = byte_level_json(byte_level_step(true)).dump();
  refused("tokenizer.json", document.substr(0, document.size() / 2), json + "at byte ");
}

// A limit on the size of files makes the last file fail, as a full disk does.
TEST_F(Checkpoints, AFailureLeavesNothingAndTheCommandCanBeRepeated) {
  write_text(fs::path(model_) / "tokenizer.json", byte_level_json(byte_level_step(true)).dump());
  const nlohmann::json config{{"eos_token", "<|eos|>"}, {"comment", std::string(1 << 20, 'x')}};
  write_text(fs::path(model_) / "tokenizer_config.json", config.dump());
  for (const char* command : {"import", "export"}) {
    const auto out = folder_.file(command);
    const auto failed = run_command({"bash", "-c",
                                     std::string("trap '' XFSZ; ulimit -f 512; exec ") + EFLA_PROGRAM + " " + command +
                                         " '" + model_ + "' --out '" + out + "'"});
    EXPECT_EQ(failed.exit_code, 1) << failed.err;
    EXPECT_NE(failed.err.find("File too large"), std::string::npos) << failed.err;
    EXPECT_FALSE(fs::exists(out));
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), {}), fs::exists(folder_.file("import")) ? 3 : 2);
    const auto again = run_program({command, model_, "--out", out});
    EXPECT_EQ(again.exit_code, 0) << again.err;
    EXPECT_EQ(read_text(out + "/tokenizer_config.json"), config.dump());
  }
}

TEST_F(Checkpoints, TheBytesOfARunGoAlong) {
  write_text(fs::path(model_) / "run.json", R"({"data": {"train": {"tokenizer": "bytes"}}})");
  for (const char* command : {"import", "export"}) {
    const auto result = run_program({command, model_, "--out", folder_.file(command)});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out.find("with its tokenizer"), std::string::npos) << result.out;
    const auto tokenizer = data::load_tokenizer(folder_.file(command) + "/tokenizer.json");
    EXPECT_EQ(tokenizer->encode("a\xc3\xa9"), data::load_tokenizer("bytes")->encode("a\xc3\xa9"));
    EXPECT_EQ(tokenizer->eos(), data::load_tokenizer("bytes")->eos());
  }
}

TEST_F(Checkpoints, ATokenizerJsonGoesAlong) {
  write_text(fs::path(model_) / "tokenizer.json", byte_level_json(byte_level_step(true)).dump());
  write_text(fs::path(model_) / "tokenizer_config.json", R"({"eos_token": "<|eos|>"})");
  const auto imported = folder_.file("imported");
  for (const auto& [command, from, to] :
       {std::array{std::string("import"), model_, imported}, std::array{std::string("export"), imported, out_}}) {
    const auto result = run_program({command, from, "--out", to});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out.find("with its tokenizer"), std::string::npos) << result.out;
    for (const char* file : {"tokenizer.json", "tokenizer_config.json"}) {
      EXPECT_EQ(read_text(fs::path(to) / file), read_text(fs::path(model_) / file));
    }
  }
}

TEST_F(Checkpoints, OfTwoTokenizersTheOneWithTheAddedTokensGoesAlong) {
  const auto model = sentencepiece_model({"\u2581hi", "hi", "h", "i", "\u2581"});
  auto files = data::tokenizer_json(write_text(folder_ / "small.model", model));
  files.tokenizer["added_tokens"].push_back(test::added_token(264, "<|im_end|>", true, false));
  files.config["eos_token"] = "<|im_end|>";
  write_text(fs::path(model_) / "tokenizer.model", model);
  write_text(fs::path(model_) / "tokenizer.json", files.tokenizer.dump());
  write_text(fs::path(model_) / "tokenizer_config.json", files.config.dump());
  ASSERT_EQ(run_program({"import", model_, "--out", out_}).exit_code, 0);
  const auto both = data::load_tokenizer(out_ + "/tokenizer.json");
  EXPECT_EQ(both->encode("hi<|im_end|>"), (std::vector<std::int32_t>{259, 264}));
  EXPECT_EQ(both->eos(), 264);

  // Without a tokenizer.json the same tokens lie in a file of their own.
  fs::remove(fs::path(model_) / "tokenizer.json");
  write_text(fs::path(model_) / "added_tokens.json", R"({"<|im_end|>": 264})");
  for (const char* command : {"import", "export"}) {
    const auto to = folder_.file(command);
    ASSERT_EQ(run_program({command, model_, "--out", to}).exit_code, 0);
    const auto name = to + (command == std::string("import") ? "/tokenizer.model" : "/tokenizer.json");
    EXPECT_EQ(data::load_tokenizer(name)->encode("hi<|im_end|>"), (std::vector<std::int32_t>{259, 264}));
    EXPECT_EQ(data::load_tokenizer(name)->eos(), 264);
  }
}

TEST_F(Checkpoints, LogitsSurviveImportAndExport) {
  const auto imported = folder_.file("imported"), exported = folder_.file("exported");
  const auto result = run_program({"import", model_, "--out", imported});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("deltanet, 1 layers, 56 parameters, model_type delta_net"), std::string::npos)
      << result.out;
  EXPECT_EQ(run_program({"export", imported, "--out", exported}).exit_code, 0);
  EXPECT_EQ(read_text(exported + "/model.safetensors"), read_text(imported + "/model.safetensors"));
  EXPECT_EQ(read_text(exported + "/config.json"), read_text(imported + "/config.json"));
  for (const auto& model : {model_, imported, exported}) {
    const auto logits = run_program({"logits", model, "--ids", ids_, "--out", out_});
    ASSERT_EQ(logits.exit_code, 0) << logits.err;
    const io::SafetensorsFile file(out_);
    ASSERT_NE(file.find("logits"), nullptr);
    EXPECT_EQ(file.find("logits")->shape, (std::vector<std::int64_t>{1, 2, 3}));
    // norm([1, 0]) = [√2, 0], norm([1, 1]) = [1, 1]
    const float root = std::sqrt(2.0F);
    const std::vector<float> expected{root, 3 * root, 5 * root, 3, 7, 11}, got = floats(*file.find("logits"));
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5F) << i;
  }
}

TEST_F(Checkpoints, SaysWhatIsWrong) {
  const auto out = folder_.file("new");
  EXPECT_TRUE(is_user_mistake(run_program({"import", folder_.file("none"), "--out", out}), "no such folder"));
  EXPECT_TRUE(is_user_mistake(run_program({"import", model_, "--out", model_}), "import: --out"));
  EXPECT_TRUE(is_user_mistake(run_program({"logits", model_, "--ids", model_ + "/model.safetensors", "--out", out_}),
                              "has no tensor input_ids"));
  const std::vector<std::int64_t> ids{0, 3};
  io::write_safetensors(ids_, std::vector{entry("input_ids", TensorType::I64, {1, 2}, ids)});
  EXPECT_TRUE(
      is_user_mistake(run_program({"logits", model_, "--ids", ids_, "--out", out_}), "token 3, expected 0 to 2"));
  EXPECT_TRUE(
      is_user_mistake(run_program({"logits", model_, "--ids", ids_, "--out", folder_.file("no/out")}), "--out"));

  config_["hidden_act"] = "gelu";
  write_config();
  EXPECT_TRUE(is_user_mistake(run_program({"import", model_, "--out", out}), "config.json: hidden_act: got \"gelu\""));
  config_["hidden_act"] = "swish";
  config_["use_gate"] = true;
  write_config();
  EXPECT_TRUE(is_user_mistake(run_program({"import", model_, "--out", out}),
                              "has no tensor model.layers.0.attn.g_proj.weight"));
  EXPECT_FALSE(fs::exists(out));
}

}  // namespace
}  // namespace efla::test
