// efla eval lm on a tiny model and the small files of tests/support/lm_tasks.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/eval/language_model_scorer.h"
#include "efla/eval/lm_benchmark.h"
#include "efla/io/json.h"
#include "efla/nn/models/language_model_file.h"
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
