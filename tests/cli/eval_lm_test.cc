// efla eval lm on a tiny model and the small files of tests/support/lm_tasks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "efla/eval/language_model_scorer.h"
#include "efla/eval/lm_benchmark.h"
#include "efla/io/json.h"
#include "efla/nn/models/language_model_file.h"
#include "tests/nn/family_reference.h"
#include "tests/nn/random_family.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

using nlohmann::json;
using Arguments = std::vector<std::string>;

const std::string kData = std::string(EFLA_SOURCE_DIR) + "/tests/support/lm_tasks";

class EvalLm : public ::testing::Test {
 protected:
  void SetUp() override { save_model("model", 258); }

  void save_model(const std::string& name, std::int64_t vocab_size) {
    nn::LanguageModelConfig config;
    config.vocab_size = vocab_size;
    config.hidden_size = 32;
    config.num_hidden_layers = 1;
    config.num_heads = 2;
    std::filesystem::create_directory(folder_ / name);
    nn::save_language_model(nn::LanguageModel(config, nn::Initialiser(5)), folder_ / name);
  }

  ProgramResult eval(const Arguments& more, const std::string& model = "model") const {
    Arguments arguments{"eval", "lm", folder_.file(model), "--data", kData};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  }

  void expect_mistake(const Arguments& more, const std::string& says, const std::string& model = "model") const {
    const auto result = eval(more, model);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find(says), std::string::npos) << result.err << "\nexpected: " << says;
    EXPECT_EQ(result.out, "");
  }

  TempFolder folder_;
};

TEST_F(EvalLm, GivesTheScoresOfTheLibrary) {
  const auto out = folder_.file("scores.json");
  const auto result = eval({"--tokenizer", "bytes", "--json", "--out", out, "--max-length", "64", "--batch", "500"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("wikitext"), std::string::npos) << "NamesMistakes looks for what is said of a scored task";
  EXPECT_EQ(result.out, read_text(out));
  const auto found = json::parse(result.out);
  EXPECT_EQ(found.at("tokenizer"), "bytes");
  EXPECT_EQ(found.at("max_length"), 64);
  EXPECT_EQ(found.at("table_1").size(), 12U);

  const auto model = nn::load_language_model(folder_ / "model");
  const auto tokenizer = data::load_tokenizer("bytes");
  ThreadPool pool(2);
  std::vector<eval::LmTaskResult> results;
  for (const auto& info : data::lm_tasks()) {
    const auto task = data::load_lm_task(info.name, kData);
    const auto requests = eval::lm_task_requests(task, *tokenizer, {.max_length = 64}, pool);
    results.push_back(eval::evaluate_lm_task(task, requests, eval::make_scorer(*model), 100'000, pool));
    for (const auto& score : results.back().scores) {
      const double value = found.at("tasks").at(results.back().task).at(score.name).get<double>();
      EXPECT_NEAR(value, score.value, 1e-5 * score.value) << info.name << " " << score.name;
    }
  }
  EXPECT_NEAR(found.at("table_1").at("average").get<double>(), eval::table_average(results).value(), 1e-12);
}

// Returns the scores of a reference in float64.
std::vector<eval::TargetScore> reference_scores(const nn::FamilyReference& reference, const eval::ScoreBatch& batch) {
  std::vector<eval::TargetScore> scores;
  std::int64_t row = -1;
  std::vector<double> logits;
  for (const auto& target : batch.targets) {
    if (target.row != row) {
      row = target.row;
      const auto first = batch.tokens.begin() + row * batch.length;
      logits = reference.logits(std::vector<std::int32_t>(first, first + batch.length));
    }
    const auto vocab_size = std::ssize(logits) / batch.length;
    const std::span<const double> own(logits.data() + target.position * vocab_size,
                                      static_cast<std::size_t>(vocab_size));
    double sum = 0.0;
    for (const double z : own) sum += std::exp(z);
    scores.push_back({own[static_cast<std::size_t>(target.token)] - std::log(sum),
                      std::ranges::max_element(own) - own.begin() == target.token});
  }
  return scores;
}

TEST_F(EvalLm, ScoresAModelOfAFamily) {
  auto config = nn::random_family_config(true, 3);
  config["vocab_size"] = 260;
  std::filesystem::create_directory(folder_ / "family");
  nn::write_family_folder(folder_ / "family", config, nn::random_family_tensors(config, "model.", 4), false, false);
  const auto result = eval({"--tokenizer", "bytes", "--json", "--limit", "3", "--max-length", "64"}, "family");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto found = json::parse(result.out);
  EXPECT_EQ(found.at("mixer"), "olmo_hybrid");
  EXPECT_GT(found.at("parameters"), 1000);

  const nn::FamilyReference reference(folder_ / "family");
  const auto scorer = [&](const eval::ScoreBatch& batch) { return reference_scores(reference, batch); };
  const auto tokenizer = data::load_tokenizer("bytes");
  ThreadPool pool(2);
  for (const auto& info : data::lm_tasks()) {
    const auto task = data::load_lm_task(info.name, kData, 3);
    const auto requests = eval::lm_task_requests(task, *tokenizer, {.max_length = 64}, pool);
    const auto expected = eval::evaluate_lm_task(task, requests, scorer, 1000, pool);
    for (const auto& score : expected.scores) {
      const double value = found.at("tasks").at(expected.task).at(score.name).get<double>();
      EXPECT_NEAR(value, score.value, 1e-4 * std::abs(score.value)) << info.name << " " << score.name;
    }
  }
  EXPECT_EQ(eval({"--tokenizer", "bytes", "--tasks", "piqa", "--weights", "int8"}, "family").exit_code, 0);
}

TEST_F(EvalLm, PrintsATable) {
  const auto result = eval({"--tokenizer", "bytes", "--tasks", "piqa,wikitext", "--limit", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* line :
       {"task           metric                  value     stderr  examples\n", "piqa           acc_norm ",
        "wikitext       word_perplexity ", "wikitext: the text has <unk> for 3 words"}) {
    EXPECT_NE(result.out.find(line), std::string::npos) << line << "\n" << result.out;
  }
  EXPECT_EQ(result.out.find("average"), std::string::npos);
  EXPECT_LT(result.out.find("piqa"), result.out.find("wikitext"));
}

TEST_F(EvalLm, FindsTheTokenizerOfARun) {
  std::filesystem::create_directories(folder_ / "run/checkpoints");
  std::filesystem::rename(folder_ / "model", folder_ / "run/checkpoints/step-000010");
  write_text(folder_ / "run/checkpoints/step-000010/trainer.json", "{}");
  write_text(folder_ / "run/run.json", R"({"config": {"data": {"tokenizer": "bytes"}}})");
  const auto result = eval({"--tasks", "boolq", "--json"}, "run");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(json::parse(result.out).at("model"), folder_.file("run/checkpoints/step-000010"));
}

TEST_F(EvalLm, NamesMistakes) {
  expect_mistake({"--tasks", "piqa,arc_esay"}, "got 'arc_esay', expected a task's name, nearest is arc_easy");
  expect_mistake({"--tasks", "piqa,piqa"}, "got 'piqa' twice, expected each task once");
  expect_mistake({"--data", folder_.file("none")}, "none: there is no such folder");
  expect_mistake({"--data", folder_.path().string()}, "holds no wikitext-2.test.raw or wikitext-2.test.tokens");
  expect_mistake({}, "eval lm: --tokenizer: got none, and none in");
  const Arguments too_short{"--tokenizer", "bytes", "--max-length", "4"};
  expect_mistake(too_short, "--max-length: got 4, expected at least the");
  EXPECT_EQ(eval(too_short).err.find("wikitext"), std::string::npos) << "scored a task that all lengths suit";
  for (const char* value : {"-1", "1.5", "99999999999999999999"}) {
    expect_mistake({"--limit", value}, std::string("eval lm: --limit: got ") + value + ", expected 0 to 1099511627776");
  }
  expect_mistake({"--batch", "0"}, "--batch");
  expect_mistake({"--data", folder_.path().string()}, "nowhere: no such folder", "nowhere");
  save_model("small", 200);
  expect_mistake({"--tokenizer", "bytes"}, "got 258 tokens, of bytes, expected at most the 200 of the model", "small");
}

}  // namespace
}  // namespace efla::test
