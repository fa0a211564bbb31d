// efla train lm and efla report as a user meets them: runs and what they leave behind, kills at any moment, Ctrl-C, a
// full disk, and mistakes.
#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "efla/base/memory.h"
#include "efla/base/random.h"
#include "tests/cli/train_lm_run.h"

namespace efla::test {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

const std::string kTasks = std::string(EFLA_SOURCE_DIR) + "/tests/support/lm_tasks";

TEST_F(TrainLm, LeavesARunThatLearnsAndReportsOnIt) {
  const auto result = run_program(train("run"));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("validation  perplexity "), std::string::npos) << result.out;
  EXPECT_NE(result.err.find("tokens/s"), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find('\r'), std::string::npos) << "a bar, and no terminal";
  const auto metrics = timeless_metrics("run");
  ASSERT_EQ(metrics.size(), 24U + 3U + 2U);
  EXPECT_LT(metrics[26].at("loss").get<double>(), metrics[0].at("loss").get<double>() - 1.0);
  EXPECT_EQ(metrics.back().at("event"), "sample");
  EXPECT_TRUE(metrics[8].at("bits_per_byte").is_number()) << metrics[8];
  EXPECT_EQ(checkpoints("run"), (std::vector<std::string>{"step-000021", "step-000024"}));
  EXPECT_EQ(std::distance(fs::directory_iterator(path("run") + "/tensorboard"), {}), 1);
  const auto run = json::parse(read_text(path("run") + "/run.json"));
  EXPECT_EQ(run.at("config").at("model").at("vocab_size"), 258);
  EXPECT_EQ(run.at("config").at("training").at("weight_decay"), 0.1);

  ASSERT_EQ(run_program({"export", path("run"), "--out", path("exported")}).exit_code, 0);
  for (const char* file : {"config.json", "tokenizer.json", "tokenizer_config.json"}) {
    EXPECT_EQ(read_text(path("run") + "/checkpoints/step-000024/" + file), read_text(path("exported") + "/" + file))
        << file;
  }

  ASSERT_EQ(run_program(train("other", {"training.lr=1e-3", "model.mixer=\"deltanet\""})).exit_code, 0);
  const auto report = run_program({"report", path("run"), path("other"), "--out", path("report.html")});
  ASSERT_EQ(report.exit_code, 0) << report.err;
  const auto page = read_text(path("report.html"));
  for (const char* part : {"training.lr", "model.model_type", "delta_net", "Validation perplexity"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  EXPECT_TRUE(
      is_user_mistake(run_program({"report", path("run"), path("other"), path("run") + "/", "--out", path("twice")}),
                      "report: RUN: got '" + path("run") + "/' twice, expected each run once"));
  EXPECT_FALSE(fs::exists(path("twice")));
  const auto metrics_before = read_text(path("run") + "/metrics.jsonl");
  write_text(path("other") + "/metrics.jsonl", metrics_before.substr(0, metrics_before.size() - 9));
  EXPECT_TRUE(is_user_mistake(run_program({"report", path("run"), path("other"), "--out", path("damaged.html")}),
                              path("other") + "/metrics.jsonl: line 29: is cut off"));
  EXPECT_FALSE(fs::exists(path("damaged.html")));
  const auto replacing = run_program({"report", path("run"), "--out", path("run") + "/metrics.jsonl"});
  EXPECT_EQ(replacing.exit_code, 2);
  EXPECT_NE(replacing.err.find("--out"), std::string::npos) << replacing.err;
  EXPECT_EQ(read_text(path("run") + "/metrics.jsonl"), metrics_before);
}

TEST_F(TrainLm, KilledAtAnyMomentGoesOnToTheSameBits) {
  ASSERT_EQ(run_program(train("whole", {"training.steps=90"})).exit_code, 0);
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  auto command = train("killed", {"training.steps=90"});
  int kills = 0;
  for (int i = 0; i < 5; ++i) {
    const auto result = interrupt(command, "killed", 1 + random.below(6), 0.03 * random.uniform(), "KILL");
    ASSERT_TRUE(result.exit_code == 137 || result.exit_code == kEndedBefore) << result.exit_code << result.err;
    kills += result.exit_code == 137 ? 1 : 0;
    command = resume("killed");
  }
  EXPECT_GE(kills, 2);
  const auto result = run_program(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  expect_same_run("whole", "killed");
}

TEST_F(TrainLm, CtrlCSavesAndSaysHowToGoOn) {
  ASSERT_EQ(run_program(train("whole")).exit_code, 0);
  const auto stopped = interrupt(train("stopped"), "stopped", 2, 0.0, "INT");
  ASSERT_EQ(stopped.exit_code, 130) << stopped.err;
  EXPECT_NE(stopped.err.find("efla train lm --resume " + path("stopped")), std::string::npos) << stopped.err;
  const auto other =
      run_program({"train", "lm", path("config.toml"), "--resume", path("stopped"), "--set", "training.lr=1"});
  EXPECT_TRUE(is_user_mistake(other, "efla: train lm: training.lr: got 1"));
  ASSERT_EQ(run_program(resume("stopped")).exit_code, 0);
  expect_same_run("whole", "stopped");
}

TEST_F(TrainLm, AFullDiskLeavesTheCheckpointBefore) {
  ASSERT_EQ(interrupt(train("run"), "run", 5, 0.0, "KILL").exit_code, 137);
  auto before = checkpoints("run");
  std::erase_if(before, [](const std::string& name) { return name.front() == '.'; });  // killed while it saved
  ASSERT_FALSE(before.empty());
  const auto model_bytes = fs::file_size(path("run") + "/checkpoints/" + before.back() + "/model.safetensors");
  // Blocks of 512 bytes: the model fits, the optimizer's moments do not.
  const auto full = run_command(
      {"sh", "-c", "ulimit -f " + std::to_string(model_bytes * 3 / 2 / 512) + "; exec " + shell_line(resume("run"))});
  EXPECT_EQ(full.exit_code, 1) << full.err;
  EXPECT_NE(full.err.find("was not saved"), std::string::npos) << full.err;
  EXPECT_NE(full.err.find("the last good checkpoint is " + path("run") + "/checkpoints/" + before.back()),
            std::string::npos)
      << full.err;
  EXPECT_EQ(checkpoints("run"), before);
  EXPECT_EQ(run_program(resume("run")).exit_code, 0);
}

// Replicas are as many as micro-batches in a step; an evaluation has more batches than that.
TEST_F(TrainLm, AnyNumberOfThreadsTrainsToTheSameBits) {
  const std::vector<std::string> settings{"training.tokens_per_step=128", "training.evaluate_tokens=1024"};
  const auto with_threads = [&](const std::string& run, const std::string& threads) {
    auto command = train(run, settings);
    command.insert(command.end(), {"--threads", threads});
    return run_program(command);
  };
  for (const char* threads : {"1", "2", "3", "7"}) {
    const auto result = with_threads(threads, threads);
    ASSERT_EQ(result.exit_code, 0) << threads << " threads: " << result.err;
    expect_same_run("1", threads);
  }
}

// LibTorch and BLAS split a sum over the threads they find, and an evaluation or a sample must not change how many.
TEST_F(TrainLm, NothingThatIsObservedChangesWhatIsTrained) {
  const auto with = [&](const std::string& run, std::vector<std::string> settings) {
    settings.insert(settings.end(), {"model.hidden_size=64", "training.sequence_length=128",
                                     "training.tokens_per_step=1024", "training.micro_batch=4", "training.steps=8"});
    auto command = train(run, settings);
    command.insert(command.end(), {"--threads", "1"});
    ASSERT_EQ(run_program(command).exit_code, 0);
  };
  with("observed", {"training.evaluate_every=2", "training.sample_every=3"});
  with("unobserved", {"training.evaluate_every=0", "training.sample_every=0"});
  const std::string model = "/checkpoints/step-000008/model.safetensors";
  EXPECT_EQ(read_text(path("observed") + model), read_text(path("unobserved") + model));
}

TEST_F(TrainLm, Mistakes) {
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"training.warmup=3"})), "nearest: training.warmup_steps"));
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"model.hiden_size=3"})), "hidden_size"));
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"data.train=\"nowhere\""})), "nowhere"));
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"data.train=./no/where"})), "no/where")) << "without quotes";
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"data.train=2026/tokens"})), "2026/tokens"));
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"model.mixer=eflaa"})), "nearest: efla"));
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"model.vocab_size=100"})), "vocab_size = 100"));
  EXPECT_TRUE(is_user_mistake(
      run_program(train("run", {"model.vocab_size=100", "model.bos_token_id=1", "model.eos_token_id=2"})),
      "at least 258"));
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"training"})), "TABLE.KEY=VALUE"));
  for (const char* setting : {"data.validation=", "training.sample_prompt=  "}) {
    const auto result = run_program(train("run", {setting}));
    EXPECT_TRUE(
        is_user_mistake(result, std::string("--set: got '") + setting + "', expected a value; for an empty text "));
  }
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"lr=1"})), "nearest: training.lr"));
  EXPECT_TRUE(
      is_user_mistake(run_program(train("run", {"model.num_heads=5"})), "num_heads: got 5, expected a divisor of "));
  EXPECT_TRUE(
      is_user_mistake(run_program(train("run", {"training.lr=nan"})), "config.toml with --set: training.lr: got nan"));
  EXPECT_TRUE(is_user_mistake(
      run_program(train("run", {"model.hidden_size=65536", "model.num_hidden_layers=1000", "model.num_heads=512"})),
      "GB of memory that this process may use"));
  // A layer has 2 · 10⁸ parameters. The parameters of all layers take half of the memory, and training four times that.
  const auto layers = static_cast<std::int64_t>(usable_memory_bytes() / 8.0 / 2e8) + 1;
  EXPECT_TRUE(is_user_mistake(
      run_program(train("run", {"model.hidden_size=4096", "model.num_heads=32", "model.intermediate_size=11008",
                                "model.num_hidden_layers=" + std::to_string(layers)})),
      "parameters, their gradient and the optimiser's moments"));
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"training.precision=\"bfloat16\""})), "or the device cuda"));
  EXPECT_TRUE(is_user_mistake(run_program(train("run", {"training.evaluate_tokens=9223372036854775807"})), "0 (all)"));
  auto on_gpu = train("run");
  on_gpu.insert(on_gpu.end(), {"--device", "cuda"});
  EXPECT_TRUE(is_user_mistake(run_program(on_gpu), "no GPU kernels"));
  EXPECT_FALSE(fs::exists(path("run")));
  EXPECT_TRUE(is_user_mistake(run_program({"train", "lm", path("config.toml")}), "--out"));
  EXPECT_TRUE(is_user_mistake(run_program({"train", "lm", "--out", path("run")}), "CONFIG"));
  EXPECT_TRUE(is_user_mistake(run_program({"train", "lm", "--resume", path("none")}), "none"));
  fs::create_directory(path("half"));
  write_text(folder_ / "half/run.json", "{}");
  EXPECT_TRUE(is_user_mistake(run_program(resume("half")), "run.json: config: got nothing, expected an object"));
  const std::vector<std::pair<std::string, std::string>> wrong{
      {R"("training": {"lr": "high"})", "training.lr: got \"high\", expected a number"},
      {R"("training": {"micro_batch": 0})", "training.micro_batch: got 0, expected 1 to 65536"},
      {R"("trainig": {})", "trainig: got {}, expected no such field (nearest: training)"}};
  for (const auto& [content, says] : wrong) {
    write_text(folder_ / "half/run.json", R"({"config": {)" + content + "}}");
    EXPECT_TRUE(is_user_mistake(run_program(resume("half")), path("half") + "/run.json: config." + says));
  }
  const auto sound = read_text(path("config.toml"));
  for (const auto& [from, to, says] : std::vector<std::array<std::string, 3>>{
           {"lr = 1e-2", "lr = 5", "training.lr: got 5, expected a number above 0 and at most 1"},
           {"steps = 24", "steps = \"all\"", "training.steps: got \"all\", expected a whole number"},
           {"num_heads = 1", "num_heads = 5", "model.num_heads: got 5, expected a divisor of hidden_size"},
           {"num_heads = 1", "preset = \"efla-2m\"", "model.preset: got 'efla-2m', expected one of"},
           {"[model]", "[model]\nvocab_size = 257\neos_token_id = 1",
            "model.vocab_size: got 257, expected at least 258"}}) {
    const auto file = write_text(folder_ / "wrong.toml", replaced(sound, from, to)).string();
    EXPECT_TRUE(is_user_mistake(run_program({"train", "lm", file, "--out", path("run")}), file + ": " + says));
  }
  write_text(folder_ / "broken.toml", "[training\n");
  EXPECT_TRUE(is_user_mistake(run_program({"train", "lm", path("broken.toml"), "--out", path("run")}), "line 1"));
  EXPECT_FALSE(fs::exists(path("run"))) << "a mistake left a folder behind";
}

TEST_F(TrainLm, NamesNeedNotBeUtf8ExceptThoseOfTheData) {
  const std::vector<std::string> steps{"training.steps=2", "training.warmup_steps=1"};
  const auto trained = run_program(train("run\xff", steps));
  EXPECT_EQ(trained.exit_code, 0) << trained.err;
  fs::copy(path("train"), path("run\xff") + "/train");
  const auto refused =
      run_command({"sh", "-c", "cd '" + path("run\xff") + "' && " + shell_line(train("other", {"data.train=train"}))});
  EXPECT_TRUE(is_user_mistake(refused, "train lm: data.train: got ")) << refused.err;
  EXPECT_NE(refused.err.find("expected a path that is UTF-8"), std::string::npos) << refused.err;
  EXPECT_FALSE(fs::exists(path("other")));
}

TEST_F(TrainLm, RefusesADamagedTrainerJson) {
  ASSERT_EQ(run_program(train("run")).exit_code, 0);
  const std::string trainer = path("run") + "/checkpoints/step-000024/trainer.json";
  const auto whole = read_text(trainer);
  const auto refused = [&](const char* place, const json& value, const std::string& says) {
    auto changed = json::parse(whole);
    changed[json::json_pointer(place)] = value;
    write_text(trainer, changed.dump());
    EXPECT_TRUE(is_user_mistake(run_program(resume("run")), trainer + ": " + says));
  };
  refused("/position/index", 1000000, "position.index: got 1000000, expected 0 to ");
  refused("/position/epoch", -1, "position.epoch: got -1, expected 0 to ");
  refused("/position/epoch", INT64_MAX, "position.epoch: got 9223372036854775807, expected 0 to ");
  refused("/position/epoch", "first", "position.epoch: got \"first\", expected a whole number");
  refused("/position", json::object(), "position.epoch: got nothing, expected a whole number");
  refused("/step", 25, "step: got 25, expected at most 24, the steps of the run");
  auto changed = json::parse(whole);
  changed["config"]["training"]["lr"] = 0.5;
  write_text(trainer, changed.dump());
  EXPECT_TRUE(is_user_mistake(run_program(resume("run")), "training.lr: got 0.01, expected 0.5 as in " + trainer));
  write_text(trainer, whole);
  EXPECT_EQ(run_program(resume("run")).exit_code, 0);
}

// Tokens that are damaged are as good as others to a model: they must be found before it trains on them.
TEST_F(TrainLm, DamagedTokensAreFoundBeforeTraining) {
  for (const char* split : {"train", "validation"}) {
    const auto shard = folder_ / split / "shard-00000.tokens";
    const auto sound = read_text(shard);
    auto bytes = sound;
    bytes[200] = static_cast<char>(bytes[200] ^ 1);  // another token of the vocabulary
    write_text(shard, bytes);
    EXPECT_TRUE(
        is_user_mistake(run_program(train("run")), shard.string() + ": at byte 128: the token shard is corrupt"));
    EXPECT_FALSE(fs::exists(path("run")));
    write_text(shard, sound);
  }
}

TEST_F(TrainLm, Table1IsTheSameAfterAnInterruption) {
  const auto command = [&](const std::string& out) {
    return std::vector<std::string>{"reproduce", "table1", "--scale", "tiny",    "--tokens",  path(""),
                                    "--data",    kTasks,   "--out",   path(out), "--threads", "2"};
  };
  const auto whole = run_program(command("whole"));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_NE(whole.err.find("6 of 6: "), std::string::npos) << whole.err;  // two rates and a second seed, two mixers
  EXPECT_NE(whole.out.find("piqa acc"), std::string::npos) << whole.out;

  std::string line = EFLA_PROGRAM;
  for (const auto& word : command("broken")) line += " '" + word + "'";
  const auto stopped = run_command({"sh", "-c",
                                    line + " & efla=$!; while ! cat '" + path("broken") +
                                        "'/runs/*/metrics.jsonl 2>/dev/null | grep -q loss; do sleep 0.02; kill -0 "
                                        "$efla || exit 99; done; kill -INT $efla; wait $efla"});
  ASSERT_EQ(stopped.exit_code, 130) << stopped.err;
  EXPECT_FALSE(fs::exists(path("broken") + "/results.json"));
  const auto resumed = run_program(command("broken"));
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  const auto scores = [&](const std::string& out) {
    return json::parse(read_text(path(out) + "/results.json")).at("scores");
  };
  ASSERT_EQ(scores("whole").size(), 2U);
  EXPECT_EQ(scores("whole")[0].at("table_1").size(), 12U);
  EXPECT_EQ(scores("broken"), scores("whole"));
  EXPECT_TRUE(is_user_mistake(run_program({"reproduce", "table1", "--out", path("x"), "--tokens", path("nowhere")}),
                              "nowhere"));
  EXPECT_FALSE(fs::exists(path("x"))) << "a mistake left a folder behind";
  EXPECT_TRUE(is_user_mistake(run_program({"reproduce", "table1", "--scale", "large", "--tokenizer", "bytes",
                                           "--tokens", path(""), "--device", "cpu", "--out", path("y")}),
                              "training.precision"));
  EXPECT_FALSE(fs::exists(path("y"))) << "the corrected command could not have the folder";
}

// As where machines compute parts of a study and only small files travel between them.
TEST_F(TrainLm, Table1IsMadeOfPartsWithTheirResultsAlone) {
  const auto part = [&](const std::string& out, const std::vector<std::string>& more) {
    std::vector<std::string> command{"reproduce", "table1", "--scale", "tiny",    "--tokens",  path(""),
                                     "--seeds",   "1",      "--out",   path(out), "--threads", "1"};
    command.insert(command.end(), more.begin(), more.end());
    return run_program(command);
  };
  ASSERT_EQ(part("here", {"--mixers", "gdn", "--lr", "0.01"}).exit_code, 0);
  ASSERT_EQ(part("here", {"--mixers", "efla"}).exit_code, 0);
  fs::create_directories(path("there"));
  fs::copy_file(path("here") + "/study.json", path("there") + "/study.json");
  for (const auto& run : fs::directory_iterator(path("here") + "/runs")) {
    const fs::path to = path("there") + "/runs/" + run.path().filename().string();
    fs::create_directories(to);
    fs::copy_file(run.path() / "result.json", to / "result.json");
  }
  const auto whole = part("there", {"--mixers", "efla,gdn"});
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_FALSE(fs::exists(path("there") + "/runs/efla-lr0.01-seed1/metrics.jsonl")) << "trained again";
  fs::copy_file(path("there") + "/runs/gdn-lr0.01-seed1/result.json",
                path("there") + "/runs/efla-lr0.01-seed1/result.json", fs::copy_options::overwrite_existing);
  EXPECT_TRUE(is_user_mistake(part("there", {"--mixers", "efla,gdn"}),
                              "result.json: name: got \"gdn-lr0.01-seed1\", expected \"efla-lr0.01-seed1\""));
  EXPECT_TRUE(fs::exists(path("there") + "/runs/gdn-lr0.003-seed1/metrics.jsonl"));
  EXPECT_TRUE(is_user_mistake(part("there", {"--data", kTasks}), "--data: got true, expected false as in "));
}

}  // namespace
}  // namespace efla::test
