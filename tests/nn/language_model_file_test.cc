// Language models in folders: flash-linear-attention's checkpoints give its logits and its tokens, and what is wrong
// with a folder is said.
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/io/json.h"
#include "efla/nn/models/language_model_file.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/nn/named_tensor.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/torch_tensors.h"

namespace efla::nn {
namespace {

namespace fs = std::filesystem;
using test::expect_bad_content;
using test::expect_io_error;
using test::max_difference;
using torch::Tensor;

Tensor read_any(const io::SafetensorsFile& file, const std::string& name) {
  const auto* entry = file.find(name);
  const auto tensor = torch::empty(entry->shape, entry->type == io::TensorType::I64 ? torch::kLong : torch::kFloat);
  std::memcpy(tensor.data_ptr(), entry->bytes.data(), entry->bytes.size());
  return tensor;
}

std::vector<std::int64_t> greedy(const LanguageModel& model, Tensor logits, LanguageModelState& state,
                                 std::size_t count) {
  std::vector<std::int64_t> tokens;
  while (tokens.size() < count) {
    const auto next = logits.argmax(-1);
    tokens.push_back(next.item<std::int64_t>());
    logits = model.step(next, state);
  }
  return tokens;
}

// Made by flash-linear-attention on a GPU: three models of random weights, what they compute, and how they go on.
class Goldens : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!fs::is_directory(folder())) GTEST_SKIP() << "no fla-goldens in " << EFLA_SHARED_DATA;
  }

  static fs::path folder() { return fs::path(EFLA_SHARED_DATA) / "fla-goldens" / GetParam(); }

  static void expect_logits_and_greedy_tokens(torch::Device device) {
    const torch::NoGradGuard no_grad;
    const auto model = load_language_model(folder(), device);
    const io::SafetensorsFile golden(folder() / "golden.safetensors");
    const auto on_device = [&](const char* name) { return read_any(golden, name).to(device); };
    const double error = max_difference(model->logits(on_device("input_ids")).cpu(), read_any(golden, "logits"));
    EXPECT_LE(error, 5e-5);
    RecordProperty("max error", std::to_string(error));

    const auto wanted = read_any(golden, "greedy_ids");
    const std::vector<std::int64_t> tokens(wanted.data_ptr<std::int64_t>(),
                                           wanted.data_ptr<std::int64_t>() + wanted.numel());
    const auto prompt = on_device("prompt_ids");
    auto state = model->initial_state(1);
    EXPECT_EQ(greedy(*model, model->prefill(prompt, state), state, tokens.size()), tokens);
    auto slowly = model->initial_state(1);
    Tensor last;
    for (std::int64_t t = 0; t < prompt.size(1); ++t) last = model->step(prompt.select(1, t), slowly);
    EXPECT_EQ(greedy(*model, last, slowly, tokens.size()), tokens);
  }
};

TEST_P(Goldens, LogitsAndGreedyTokensAreFlashLinearAttentions) { expect_logits_and_greedy_tokens(torch::kCPU); }

TEST_P(Goldens, LogitsAndGreedyTokensOnAGpuAreFlashLinearAttentions) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "LibTorch has no GPU";
  expect_logits_and_greedy_tokens(torch::kCUDA);
}

TEST_P(Goldens, WrittenModelsHaveTheSameBits) {
  const auto model = load_language_model(folder());
  const test::TempFolder written;
  save_language_model(*model, written.path());
  const io::SafetensorsFile before(folder() / "model.safetensors"), after(written / "model.safetensors");
  ASSERT_EQ(before.tensors().size(), after.tensors().size());
  for (const auto& tensor : before.tensors()) {
    const auto* again = after.find(tensor.name);
    ASSERT_NE(again, nullptr) << tensor.name;
    EXPECT_EQ(again->shape, tensor.shape) << tensor.name;
    EXPECT_TRUE(std::ranges::equal(again->bytes, tensor.bytes)) << tensor.name;
  }
  EXPECT_EQ(io::read_json(written / "config.json")["model_type"],
            io::read_json(folder() / "config.json")["model_type"]);
  EXPECT_EQ(load_language_model_config(written.path()), model->config());
}

TEST_P(Goldens, WrittenModelsNameTheirClassesInTransformers) {
  const test::TempFolder written;
  save_language_model(*load_language_model(folder()), written.path());
  const auto config = io::read_json(written / "config.json");
  const std::string type = config["model_type"];
  const std::string name = type == "kda" ? "KDA" : type == "delta_net" ? "DeltaNet" : "GatedDeltaNet";
  EXPECT_EQ(config["auto_map"]["AutoConfig"], "efla_model." + name + "Config");
  EXPECT_EQ(config["auto_map"]["AutoModelForCausalLM"], "efla_model." + name + "ForCausalLM");
  EXPECT_NE(test::read_text(written / "efla_model.py").find("from efla.hf import"), std::string::npos);
}

// The package's configuration would take such a folder for a model of its own mixer efla.
TEST(LanguageModelFile, TypesThatThePackageDoesNotHaveNameNoClass) {
  for (const std::string mixer : {"comba", "deltaproduct", "gated-deltaproduct"}) {
    LanguageModelConfig config{.mixer = mixer, .vocab_size = 20, .hidden_size = 16, .num_hidden_layers = 1};
    config.num_heads = 1;
    const test::TempFolder written;
    save_language_model(LanguageModel(config, Initialiser(3)), written.path());
    const auto fields = io::read_json(written / "config.json");
    EXPECT_EQ(fields["model_type"], mixer == "comba" ? "comba" : "gated_deltaproduct");
    EXPECT_FALSE(fields.contains("auto_map"));
    EXPECT_FALSE(fs::exists(written / "efla_model.py"));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Goldens, testing::Values("delta_net-a", "gdn-a", "kda-a"),
                         [](const auto& info) { return std::string(info.param, std::string(info.param).find('-')); });

class ModelFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    LanguageModelConfig config{.mixer = "efla", .vocab_size = 20, .hidden_size = 16, .num_hidden_layers = 1};
    config.num_heads = 1;
    model_ = std::make_unique<LanguageModel>(config, Initialiser(3));
    save_language_model(*model_, folder_.path());
  }

  // Writes the weights again after a change of their entries.
  void rewrite(const std::function<void(std::vector<io::NamedTensor>&)>& change) {
    const io::SafetensorsFile file(folder_ / "model.safetensors");
    auto entries = file.tensors();
    change(entries);
    io::write_safetensors(folder_ / "changed", entries);
    fs::rename(folder_ / "changed", folder_ / "model.safetensors");
  }

  void expect_refused(const std::string& says) {
    expect_bad_content([&] { load_language_model(folder_.path()); }, -1, says);
  }

  void expect_same_model(const LanguageModel& other) {
    const auto a = model_->named_parameters(), b = other.named_parameters();
    ASSERT_EQ(a.size(), b.size());
    for (const auto& item : a) EXPECT_TRUE(torch::equal(item.value(), b[item.key()])) << item.key();
  }

  test::TempFolder folder_;
  std::unique_ptr<LanguageModel> model_;
};

TEST_F(ModelFolder, IsReadBackToTheSameBits) {
  const auto read = load_language_model(folder_.path());
  EXPECT_EQ(read->config(), model_->config());
  expect_same_model(*read);
}

TEST_F(ModelFolder, TheTokensThatEndATextMayBeSeveral) {
  const auto ends = [&](const std::string& config) {
    test::write_text(folder_ / "generation_config.json", config);
    return load_language_model(folder_.path())->config().eos_token_id;
  };
  using Ids = std::vector<std::int64_t>;
  EXPECT_EQ(ends("{}"), Ids{2});
  EXPECT_EQ(ends(R"({"eos_token_id": null, "do_sample": true})"), Ids{2});
  EXPECT_EQ(ends(R"({"eos_token_id": 7})"), Ids{7});
  EXPECT_EQ(ends(R"({"eos_token_id": [7, 19]})"), (Ids{7, 19}));
  const auto loaded = load_language_model(folder_.path());
  for (const auto& [text, says] : {std::pair{R"({"eos_token_id": [7, 20]})", "eos_token_id: got 20"},
                                   {R"({"eos_token_id": "x"})", "eos_token_id: got \"x\""}}) {
    test::write_text(folder_ / "generation_config.json", text);
    expect_refused(std::string("generation_config.json: ") + says);
  }
  fs::remove(folder_ / "generation_config.json");
  save_language_model(*loaded, folder_.path());
  EXPECT_EQ(load_language_model(folder_.path())->config().eos_token_id, (Ids{7, 19}));
  auto none = loaded->config();
  none.eos_token_id = {};
  save_language_model(LanguageModel(none, Initialiser(3)), folder_.path());
  EXPECT_EQ(load_language_model(folder_.path())->config().eos_token_id, Ids{});
}

TEST_F(ModelFolder, ShardsAreReadByTheirIndex) {
  nlohmann::json map;
  {
    const io::SafetensorsFile file(folder_ / "model.safetensors");
    const auto& all = file.tensors();
    for (std::size_t i = 0; i < all.size(); ++i) map[all[i].name] = i < 5 ? "a.safetensors" : "b.safetensors";
    io::write_safetensors(folder_ / "a.safetensors", std::span(all).first(5));
    io::write_safetensors(folder_ / "b.safetensors", std::span(all).subspan(5));
  }
  fs::remove(folder_ / "model.safetensors");
  const auto index = folder_ / "model.safetensors.index.json";
  test::write_text(index, nlohmann::json{{"weight_map", map}}.dump());
  expect_same_model(*load_language_model(folder_.path()));

  auto wrong = map;
  wrong["model.norm.weight"] = "../a.safetensors";
  test::write_text(index, nlohmann::json{{"weight_map", wrong}}.dump());
  expect_refused("expected the name of one beside it");
  wrong = map;
  wrong["model.norm.weight"] = map["model.norm.weight"] == "a.safetensors" ? "b.safetensors" : "a.safetensors";
  test::write_text(index, nlohmann::json{{"weight_map", wrong}}.dump());
  expect_refused("has no tensor model.norm.weight, which the index names");
  wrong = map;
  wrong.erase("model.norm.weight");
  test::write_text(index, nlohmann::json{{"weight_map", wrong}}.dump());
  expect_refused("has a tensor model.norm.weight that the index does not place there");
  test::write_text(index, "{}");
  expect_refused("weight_map: got nothing, expected an object");
}

TEST_F(ModelFolder, HalfPrecisionIsWidened) {
  for (const auto& [torch_type, type] :
       {std::pair{torch::kBFloat16, io::TensorType::BF16}, {torch::kHalf, io::TensorType::F16}}) {
    const auto narrow = model_->head().detach().to(torch_type);
    rewrite([&, type = type](auto& entries) {
      for (auto& entry : entries) {
        if (entry.name != "lm_head.weight") continue;
        entry.type = type;
        entry.bytes = {static_cast<const std::uint8_t*>(narrow.data_ptr()), static_cast<std::size_t>(narrow.nbytes())};
      }
    });
    EXPECT_TRUE(torch::equal(load_language_model(folder_.path())->head(), narrow.to(torch::kFloat)));
  }
}

TEST_F(ModelFolder, OfTiedEmbeddingsMayHoldTheHeadToo) {
  auto config = model_->config();
  config.tie_word_embeddings = true;
  model_ = std::make_unique<LanguageModel>(config, Initialiser(3));
  save_language_model(*model_, folder_.path());
  const auto head = model_->head().detach();
  const auto with_head = [&](const Tensor& values) {
    rewrite([&](auto& entries) {
      std::erase_if(entries, [](const auto& entry) { return entry.name == "lm_head.weight"; });
      entries.push_back(named_tensor("lm_head.weight", values));
    });
  };
  with_head(head);
  expect_same_model(*load_language_model(folder_.path()));
  with_head(head + 1.0);
  expect_refused("has a tensor lm_head.weight that differs from model.embeddings.weight, although tie_word_embeddings");
  with_head(head.t().contiguous());
  expect_refused("lm_head.weight is F32 [16, 20], expected F32 [20, 16]");
}

TEST_F(ModelFolder, SaysWhatIsWrong) {
  rewrite([](auto& entries) { entries.back().name = "lm_heat.weight"; });
  expect_refused("has no tensor lm_head.weight");
  rewrite([](auto& entries) { entries.back().name = "lm_head.weight"; });
  rewrite([](auto& entries) { entries.push_back({"lm_head.bias", io::TensorType::F32, {0}, {}}); });
  expect_refused("has a tensor lm_head.bias, which the model of its config.json has not (nearest: lm_head.weight)");
  rewrite([](auto& entries) { entries.pop_back(); });
  rewrite([](auto& entries) { std::swap(entries.back().shape[0], entries.back().shape[1]); });
  expect_refused("lm_head.weight is F32 [16, 20], expected F32 [20, 16]");
  fs::remove(folder_ / "model.safetensors");
  expect_io_error([&] { load_language_model(folder_.path()); }, IoError::Kind::missing, -1, "has neither");
  fs::remove(folder_ / "config.json");
  expect_io_error([&] { load_language_model(folder_.path()); }, IoError::Kind::missing, -1, "holds no language model");
  expect_io_error([&] { load_language_model(folder_ / "nothing"); }, IoError::Kind::missing, -1, "no such folder");
}

TEST_F(ModelFolder, OfARunIsItsLatestCheckpoint) {
  for (const char* name : {"step-9", "step-10", "step-x", "other"}) {
    const auto checkpoint = folder_ / "run/checkpoints" / name;
    fs::create_directories(checkpoint);
    for (const char* file : {"config.json", "model.safetensors", "trainer.json"}) {
      test::write_text(checkpoint / file, "{}");
    }
  }
  fs::create_directories(folder_ / "run/checkpoints/step-11");  // without a model
  EXPECT_EQ(language_model_folder(folder_ / "run"), folder_ / "run/checkpoints/step-10");
  EXPECT_EQ(language_model_folder(folder_.path()), folder_.path());
}

}  // namespace
}  // namespace efla::nn
