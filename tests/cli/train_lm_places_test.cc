// efla train lm: what is refused before the start, and runs whose data moves.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "tests/cli/train_lm_run.h"
#include "tests/support/byte_level.h"
#include "tests/support/token_folder.h"

namespace efla::test {
namespace {

namespace fs = std::filesystem;

// A tokenizer with eos and without bos, as Qwen's.
TEST_F(TrainLm, ASampleThatCouldNotBeMadeIsRefusedBeforeTheStart) {
  const auto tokenizer = path("tokenizer.json");
  write_text(tokenizer, byte_level_json(byte_level_step(true)).dump());
  write_text(path("tokenizer_config.json"), R"({"eos_token": "<|eos|>"})");
  const auto tokenize =
      run_program({"data", "tokenize", path("train.txt"), "--tokenizer", tokenizer, "--out", path("own")});
  ASSERT_EQ(tokenize.exit_code, 0) << tokenize.err;
  std::vector<std::string> settings{"data.tokenizer=" + tokenizer, "data.train=" + path("own"),
                                    "data.validation=" + path("own")};
  EXPECT_TRUE(
      is_user_mistake(run_program(train("run", settings)), "training.sample_prompt: got \"\", expected a prompt"));
  EXPECT_FALSE(fs::exists(path("run")));

  // A run of a program that did not refuse it stood before a sample for ever.
  settings.emplace_back("training.sample_prompt=the");
  ASSERT_EQ(interrupt(train("run", settings), "run", 6, 0.0, "KILL").exit_code, 137);
  auto files = std::vector<fs::path>{path("run") + "/run.json"};
  for (const auto& name : checkpoints("run")) {
    if (name.front() == '.') continue;  // killed while it saved
    files.push_back(path("run") + "/checkpoints/" + name + "/trainer.json");
  }
  for (const auto& file : files) write_text(file, replaced(read_text(file), "\"the\"", "\"\""));
  const auto result = run_program(resume("run"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("no samples: training.sample_prompt is empty"), std::string::npos) << result.err;
}

TEST_F(TrainLm, TokensOfWhichNoneIsPredictedAreRefusedBeforeTheStart) {
  fs::create_directory(path("single"));
  const auto info = data::load_tokenizer("bytes")->info();
  write_token_folder(path("single"), {{info.eos}, {info.eos}}, 2, info);
  for (const char* field : {"data.train", "data.validation"}) {
    EXPECT_TRUE(
        is_user_mistake(run_program(train("run", {std::string(field) + "=" + path("single")})),
                        std::string(field) + ": got " + path("single") + ", whose documents have one token each"));
  }
  EXPECT_FALSE(fs::exists(path("run")));
}

// Everything moves, as to another machine, and the configuration of the run names the old places.
TEST_F(TrainLm, ARunMovesWithItsData) {
  const auto tokenizer = path("tokenizer.json");
  write_text(tokenizer, byte_level_json(byte_level_step(true)).dump());
  write_text(path("tokenizer_config.json"), R"({"eos_token": "<|eos|>"})");
  for (const auto& [text, tokens] : {std::pair("train.txt", "own"), {"validation.txt", "others"}}) {
    const auto tokenize =
        run_program({"data", "tokenize", path(text), "--tokenizer", tokenizer, "--out", path(tokens)});
    ASSERT_EQ(tokenize.exit_code, 0) << tokenize.err;
  }
  const std::vector<std::string> settings{"data.tokenizer=" + tokenizer, "data.train=" + path("own"),
                                          "data.validation=" + path("own"), "training.sample_prompt=the"};
  ASSERT_EQ(run_program(train("whole", settings)).exit_code, 0);
  ASSERT_EQ(interrupt(train("run", settings), "run", 6, 0.0, "KILL").exit_code, 137);
  fs::create_directory(path("new"));
  for (const char* name : {"run", "own", "tokenizer.json", "tokenizer_config.json"})
    fs::rename(path(name), path("new") + "/" + name);
  const std::string run = path("new") + "/run";
  const auto generated = run_program({"generate", run, "--prompt", "the", "--max-tokens", "2"});
  EXPECT_EQ(generated.exit_code, 0) << generated.err;  // with the checkpoint's copy of the tokenizer
  auto command = resume("new/run");
  for (const auto& [field, place] :
       {std::pair("data.train", "own"), {"data.validation", "own"}, {"data.tokenizer", "tokenizer.json"}}) {
    EXPECT_TRUE(is_user_mistake(run_program(command), std::string(field) + ": got " + path(place) +
                                                          ", which is not there any more, expected the place of the "
                                                          "same data, with --set " +
                                                          field + "=PLACE"));
    command.insert(command.end(), {"--set", std::string(field) + "=" + path("new") + "/" + place});
  }
  auto other = command;
  other.insert(other.end(), {"--set", "data.train=" + path("others")});
  EXPECT_TRUE(is_user_mistake(run_program(other), "train lm: data.train.")) << "tokens that are not the run's";
  other.back() = "training.lr=1e-3";
  EXPECT_TRUE(is_user_mistake(run_program(other), "a resumed run keeps its configuration"));
  ASSERT_EQ(interrupt(command, "new/run", 2, 0.0, "KILL").exit_code, 137);
  const auto result = run_program(resume("new/run"));  // run.json has the new places
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(timeless_metrics("whole"), timeless_metrics("new/run"));
  const std::string last = "/checkpoints/step-000024/";
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_EQ(read_text(path("whole") + last + file), read_text(run + last + file)) << file;
  }
}

}  // namespace
}  // namespace efla::test
