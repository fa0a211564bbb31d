// The program on a GPU beside the program on the CPU: losses, resumed runs, texts, logits and studies. Skipped, saying
// why, where there is no GPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "efla/io/safetensors/safetensors.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;

constexpr const char* kModel = R"(
[model]
hidden_size = 128
num_hidden_layers = 2
num_heads = 2
intermediate_size = 192
)";
constexpr const char* kTraining = R"(
[training]
sequence_length = 128
tokens_per_step = 1024
micro_batch = 4
steps = 50
warmup_steps = 5
lr = 3e-3
min_lr = 3e-4
evaluate_every = 25
evaluate_tokens = 512
checkpoint_every = 25
)";

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    const auto info = run_program({"info"});
    const auto at = info.out.find("gpus");
    ASSERT_NE(at, std::string::npos) << info.out;
    const std::string gpus = info.out.substr(at, info.out.find('\n', at) - at);
    if (gpus.find("none: ") != std::string::npos) GTEST_SKIP() << gpus;
    std::string text;
    for (int i = 0; i < 900; ++i) {
      text += i * i % 7 < 3 ? "the state forgets. " : "the delta rule learns. ";
      if (i % 13 == i / 100) text += "\n<|endoftext|>\n";  // so that batches have different numbers of documents
    }
    const auto file = write_text(folder_ / "text.txt", text);
    run({"data", "tokenize", file.string(), "--tokenizer", "bytes", "--out", path("tokens")});
    write_text(folder_ / "config.toml", std::string(kModel) + "mixer = \"" + mixer() + "\"\n[data]\ntrain = \"" +
                                            path("tokens") + "\"\nvalidation = \"" + path("tokens") +
                                            "\"\ntokenizer = \"bytes\"\n" + kTraining);
  }

  virtual std::string mixer() const { return "efla"; }
  std::string path(const std::string& name) const { return folder_.file(name); }

  static ProgramResult run(const Arguments& arguments) {
    auto result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result;
  }

  void train(const std::string& device, const std::string& name, const Arguments& more = {}) const {
    Arguments all{"train", "lm", path("config.toml"), "--out", path(name), "--device", device, "--threads", "2"};
    all.insert(all.end(), more.begin(), more.end());
    run(all);
  }
  void train(const std::string& device) const { train(device, device); }

  // Goes on from step 25 of a finished run, in a copy of it.
  void resume(const std::string& run_folder, const std::string& copy, const std::string& device) const {
    fs::copy(path(run_folder), path(copy), fs::copy_options::recursive);
    std::vector<fs::path> checkpoints;
    for (const auto& entry : fs::directory_iterator(path(copy) + "/checkpoints")) checkpoints.push_back(entry.path());
    ASSERT_EQ(checkpoints.size(), 2U);
    fs::remove_all(std::max(checkpoints[0], checkpoints[1]));
    run({"train", "lm", "--resume", path(copy), "--device", device, "--threads", "2"});
  }

  static std::vector<double> losses(const std::string& run_folder) {
    std::vector<double> values;
    std::istringstream text(read_text(run_folder + "/metrics.jsonl"));
    for (std::string line; std::getline(text, line);) values.push_back(json::parse(line).at("loss").get<double>());
    return values;
  }

  static void expect_near(const std::vector<double>& a, const std::vector<double>& b, double most) {
    ASSERT_EQ(a.size(), b.size());
    ASSERT_FALSE(a.empty());
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], most) << "line " << i + 1;
  }

  std::string parameters(const std::string& run_folder) const {
    return read_text(path(run_folder) + "/checkpoints/step-000050/model.safetensors");
  }

  TempFolder folder_;
};

class GpuLanguageModel : public Gpu, public testing::WithParamInterface<const char*> {
 protected:
  std::string mixer() const override { return GetParam(); }
};

TEST_P(GpuLanguageModel, TrainsResumesAndWritesAsOnTheCpu) {
  train("cpu");
  train("cuda");
  expect_near(losses(path("cpu")), losses(path("cuda")), 1e-3);

  resume("cuda", "again", "cuda");
  EXPECT_EQ(parameters("again"), parameters("cuda")) << "resumed on the GPU";
  resume("cpu", "moved", "cuda");
  expect_near(losses(path("cpu")), losses(path("moved")), 1e-3);
  resume("cuda", "back", "cpu");
  expect_near(losses(path("cuda")), losses(path("back")), 1e-3);
  train("cuda", "recomputed", {"--set", "training.recompute=true"});
  expect_near(losses(path("cuda")), losses(path("recomputed")), 1e-3);

  const auto reply = [&](const char* device, const Arguments& more) {
    Arguments all{"generate", path("cpu"), "--max-tokens", "32", "--device", device};
    all.insert(all.end(), more.begin(), more.end());
    return run(all).out;
  };
  const std::string text = reply("cpu", {"--prompt", "the delta "});
  EXPECT_EQ(reply("cuda", {"--prompt", "the delta ", "--save-session", path("session")}), text);
  EXPECT_EQ(reply("cuda", {"--load-session", path("session")}), reply("cpu", {"--load-session", path("session")}));
  const Arguments drawn{"--prompt", "the delta ", "--temperature",        "0.9", "--top-p", "0.8",
                        "--top-k",  "50",         "--repetition-penalty", "1.1", "--seed",  "3"};
  EXPECT_EQ(reply("cuda", drawn), reply("cpu", drawn));
}

TEST_P(GpuLanguageModel, DecodesWithWeightsInBfloat16) {
  train("cpu");
  const auto reply = [&](const char* device, const Arguments& more) {
    Arguments all{"generate", path("cpu"), "--max-tokens", "32", "--device", device, "--weights", "bfloat16"};
    all.insert(all.end(), more.begin(), more.end());
    return run(all).out;
  };
  const std::string text = reply("cuda", {"--prompt", "the delta ", "--save-session", path("session")});
  EXPECT_GE(text.size(), 32U) << text;
  EXPECT_GE(reply("cuda", {"--load-session", path("session"), "--prompt", "of the "}).size(), 32U);
  if (mixer() == "softmax") return;  // of which the CPU takes float32 alone
  EXPECT_EQ(reply("cpu", {"--prompt", "the delta "}), text);
  EXPECT_EQ(reply("cpu", {"--load-session", path("session")}), reply("cuda", {"--load-session", path("session")}));
}

TEST_P(GpuLanguageModel, ContinuesSeveralPromptsAsOneByOne) {
  train("cpu");
  std::string prompts, expected;
  const char* starts[] = {"the ",  "rule learns", "the state", "delta rule ", "s",
                          ". the", "forgets",     "the delta", "le",          "ar"};
  for (const char* start : starts) prompts += std::string(start) + "\n";
  write_text(folder_ / "prompts.txt", prompts);
  for (const char* weights : {"float32", "bfloat16"}) {
    const auto replies = [&](const char* device, const Arguments& more) {
      Arguments all{"generate", path("cpu"), "--device", device, "--weights", weights, "--stop", ". the st"};
      all.insert(all.end(), more.begin(), more.end());
      return run(all).out;
    };
    const auto together = replies("cuda", {"--prompts", path("prompts.txt"), "--max-tokens", "24"});
    for (const std::size_t i : {0, 4, 9}) {  // each is a run of the program
      const auto header = "==> prompt " + std::to_string(i + 1) + " <==\n";
      const auto alone = replies("cuda", {"--prompt", starts[i], "--max-tokens", "24"});
      EXPECT_NE(together.find(header + alone), std::string::npos) << weights << '\n' << together << "alone:\n" << alone;
    }
  }
}

// The next step has been launched when the ids of this one are read.
TEST_P(GpuLanguageModel, EndsAtALogitThatIsNotFiniteAsOnTheCpu) {
  train("cpu");
  const auto reply = [&](const char* device) {
    return run_program({"generate", path("cpu"), "--prompt", "the delta ", "--max-tokens", "32", "--device", device});
  };
  const std::string text = reply("cpu").out;
  ASSERT_GE(text.size(), 12U);
  const fs::path file = path("cpu") + "/checkpoints/step-000050/model.safetensors";
  std::string bytes = read_text(file);
  const io::SafetensorsContent content = io::parse_safetensors(io::as_bytes(bytes), file);
  for (const auto& tensor : content.tensors) {
    if (tensor.name != "model.embeddings.weight") continue;
    const auto row = tensor.bytes.subspan(tensor.bytes.size() / tensor.shape[0] * static_cast<unsigned char>(text[8]));
    const float nan = std::nanf("");
    std::memcpy(bytes.data() + (row.data() - io::as_bytes(bytes).data()), &nan, sizeof(nan));
  }
  io::write_safetensors(file, content.tensors, content.metadata);  // with the checksums of the changed bytes
  const ProgramResult expected = reply("cpu"), result = reply("cuda");
  EXPECT_EQ(expected.exit_code, 1);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.err.find("generate: the largest logit of a text is nan"), std::string::npos) << result.err;
  EXPECT_EQ(result.out, expected.out);
  EXPECT_EQ(text.compare(0, result.out.size(), result.out), 0);
}

TEST_P(GpuLanguageModel, LogitsAgreeWithTheCpu) {
  train("cpu");
  std::vector<std::int64_t> ids(2 * 300);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * i % 251);
  const io::NamedTensor entry{"input_ids",
                              io::TensorType::I64,
                              {2, 300},
                              {reinterpret_cast<const std::uint8_t*>(ids.data()), ids.size() * sizeof(ids[0])}};
  io::write_safetensors(path("ids.safetensors"), std::span(&entry, 1));
  std::vector<std::vector<float>> logits;
  for (const char* device : {"cpu", "cuda"}) {
    const std::string out = path(std::string("logits-") + device);
    run({"logits", path("cpu"), "--ids", path("ids.safetensors"), "--out", out, "--device", device});
    const io::SafetensorsFile file(out);
    const auto bytes = file.find("logits")->bytes;
    std::memcpy(logits.emplace_back(bytes.size() / sizeof(float)).data(), bytes.data(), bytes.size());
  }
  ASSERT_EQ(logits[0].size(), logits[1].size());
  float most = 0.0F;
  for (std::size_t i = 0; i < logits[0].size(); ++i) {
    ASSERT_TRUE(std::isfinite(logits[0][i]) && std::isfinite(logits[1][i])) << i;
    most = std::max(most, std::abs(logits[0][i] - logits[1][i]));
  }
  EXPECT_LT(most, 2e-4F);
  EXPECT_GT(most, 0.0F) << "computed twice on one device";
}

INSTANTIATE_TEST_SUITE_P(Mixers, GpuLanguageModel, testing::Values("efla", "deltanet", "gdn", "kda", "softmax"));

using GpuStudies = Gpu;

TEST_F(GpuStudies, DigitsTrainAndAreMeasuredAsOnTheCpu) {
  std::vector<json> measured;
  for (const char* device : {"cpu", "cuda"}) {
    run({"train", "smnist", "--train-images", "512", "--test-images", "64", "--batch-size", "32", "--epochs", "2",
         "--device", device, "--threads", "2", "--out", path(std::string("digits-") + device)});
    measured.push_back(json::parse(run({"eval", "robustness", path("digits-cpu"), "--device", device, "--json"}).out));
  }
  expect_near(losses(path("digits-cpu")), losses(path("digits-cuda")), 1e-3);
  EXPECT_NEAR(measured[0].at("clean_accuracy").get<double>(), measured[1].at("clean_accuracy").get<double>(), 1.0 / 64);
}

// Runs on one GPU share its streams and what LibTorch keeps for them, and must not see each other.
TEST_F(GpuStudies, RunsSideBySideLearnWhatRunsOneAfterTheOtherLearn) {
  std::vector<json> curves;
  for (const char* threads : {"1", "6"}) {
    const std::string out = path(std::string("threads-") + threads);
    run({"reproduce", "smnist", "--quick", "--mixers", "efla,deltanet", "--seeds", "1,2,3", "--lr", "3e-3", "--device",
         "cuda", "--threads", threads, "--out", out});
    const auto results = json::parse(read_text(out + "/results.json"));
    json& all = curves.emplace_back();
    for (const auto& one : results.at("runs")) all[one.at("name").get<std::string>()] = one.at("curve");
  }
  EXPECT_EQ(curves[0].size(), 6U);
  EXPECT_EQ(curves[0], curves[1]);
}

TEST_F(GpuStudies, LanguageModelsAreTrainedAndScoredAsOnTheCpu) {
  for (const char* split : {"train", "validation"}) fs::copy(path("tokens"), path(split), fs::copy_options::recursive);
  std::vector<json> scores;
  for (const char* device : {"cpu", "cuda"}) {
    const std::string out = path(std::string("table1-") + device);
    run({"reproduce", "table1", "--scale", "tiny", "--mixers", "efla", "--seeds", "1", "--tokens", path(""), "--data",
         std::string(EFLA_SOURCE_DIR) + "/tests/support/lm_tasks", "--device", device, "--out", out});
    scores.push_back(json::parse(read_text(out + "/results.json")).at("scores").at(0));
  }
  EXPECT_EQ(scores[0].at("lr"), scores[1].at("lr"));
  const auto word_loss = [](const json& score) {
    return std::log(score.at("table_1").at("wikitext word_perplexity").at("mean").get<double>());
  };
  EXPECT_NEAR(word_loss(scores[0]), word_loss(scores[1]), 1e-2);
}

// MAD's products are in bfloat16 on a GPU, with a decoder for compression. Its few symbols are each in many places of a
// batch, which are added in the same order every time.
TEST_F(GpuStudies, SequencesTrainInBfloat16AsOnTheCpuAndTwiceToTheSameBits) {
  std::vector<std::vector<double>> curves;
  for (const char* device : {"cpu", "cuda", "cuda"}) {
    const std::string out = path("mad-" + std::to_string(curves.size()));
    run({"reproduce", "mad", "--scale", "tiny", "--tasks", "compression,fuzzy-recall", "--device", device, "--out",
         out});
    const auto results = json::parse(read_text(out + "/results.json"));
    auto& all = curves.emplace_back();
    for (const auto& one : results.at("runs")) {
      for (const auto& point : one.at("curve")) all.push_back(point.at("loss"));
    }
  }
  ASSERT_EQ(curves[0].size(), 8U);
  expect_near(curves[0], curves[1], 2e-2);
  EXPECT_EQ(curves[1], curves[2]);
}

TEST_F(GpuStudies, AStudyOfSequencesEndsInAReport) {
  run({"reproduce", "state-tracking", "--scale", "tiny", "--mixers", "efla", "--seeds", "1", "--device", "cuda",
       "--out", path("study")});
  EXPECT_TRUE(fs::exists(path("study") + "/report.html"));
}

}  // namespace
}  // namespace efla::test
