// efla train, eval and reproduce as a user meets them: runs, what they leave behind, Ctrl-C, and mistakes.
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "efla/base/memory.h"
#include "tests/support/idx.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

using nlohmann::json;
using Arguments = std::vector<std::string>;

Arguments operator+(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A run of a second: 40 images, two epochs of five steps.
Arguments small_run(const std::string& out) {
  return {"train",    "smnist", "--train-images", "40", "--test-images", "16",   "--epochs", "2",
          "--hidden", "16",     "--batch-size",   "8",  "--lr",          "0.01", "--out",    out};
}

std::vector<json> metrics_of(const std::string& run) {
  std::vector<json> lines;
  std::istringstream text(read_text(run + "/metrics.jsonl"));
  for (std::string line; std::getline(text, line);) lines.push_back(json::parse(line));
  return lines;
}

// The files of a run's only checkpoint, one after another.
std::string checkpoint_bytes(const std::string& run) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(run + "/checkpoints")) paths.push_back(entry.path());
  EXPECT_EQ(paths.size(), 1U) << run;
  std::string bytes = paths.at(0).filename().string();
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "trainer.json"})
    bytes += read_text(paths.at(0) / file);
  return bytes;
}

TEST(TrainCommand, LeavesMetricsAndACheckpoint) {
  const TempFolder folder;
  const auto run = folder.file("run");
  const auto result = run_program(small_run(run));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("test accuracy"), std::string::npos) << result.out;
  EXPECT_NE(result.err.find("images/s"), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find('\r'), std::string::npos) << "a bar, and no terminal";
  const auto metrics = metrics_of(run);
  ASSERT_EQ(metrics.size(), 12U);  // ten steps, two evaluations
  EXPECT_EQ(metrics[0].at("event"), "step");
  EXPECT_GT(metrics[0].at("loss").get<double>(), 0.0);
  EXPECT_EQ(metrics[11].at("event"), "evaluation");
  EXPECT_TRUE(std::filesystem::exists(run + "/checkpoints/step-000010/model.safetensors"));
}

TEST(TrainCommand, RemovesWhatKilledProcessesLeft) {
  const TempFolder folder;
  const auto run = folder.file("run");
  ASSERT_EQ(run_program(small_run(run)).exit_code, 0);
  const auto ended = start_command({"true"}, "/dev/null", "/dev/null");
  ASSERT_EQ(wait_for(ended), 0);
  const auto left = run + "/.training.json.tmp-" + std::to_string(ended) + "-0";
  write_text(left, "half of a file");
  const auto result = run_program({"train", "smnist", "--resume", run});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_FALSE(std::filesystem::exists(left));
}

TEST(TrainCommand, SameBitsForAnyThreadsAndEveryMixerRuns) {
  const TempFolder folder;
  for (const char* threads : {"1", "3"}) {
    ASSERT_EQ(run_program(small_run(folder.file(threads)) + Arguments{"--threads", threads}).exit_code, 0);
  }
  EXPECT_EQ(checkpoint_bytes(folder.file("1")), checkpoint_bytes(folder.file("3")));
  for (const char* mixer : {"deltanet-neg", "efla-adaptive", "efla-loose", "rk4", "longhorn", "trapezoid", "softmax"}) {
    const auto result = run_program(small_run(folder.file(mixer)) + Arguments{"--mixer", mixer, "--epochs", "1"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

TEST(TrainCommand, CtrlCSavesAndResumeGoesOnToTheSameBits) {
  const TempFolder folder;
  const auto whole = folder.file("whole"), broken = folder.file("broken");
  const Arguments longer{"--train-images", "400", "--epochs", "3"};
  ASSERT_EQ(run_program(small_run(whole) + longer).exit_code, 0);

  std::string line = EFLA_PROGRAM;
  for (const auto& word : small_run(broken) + longer) line += " '" + word + "'";
  const auto stopped = run_command({"sh", "-c",
                                    line + " & efla=$!; while [ ! -s '" + broken +
                                        "/metrics.jsonl' ]; do sleep 0.02; kill -0 $efla || exit 99; done; "
                                        "kill -INT $efla; wait $efla"});
  ASSERT_EQ(stopped.exit_code, 130) << stopped.err;
  EXPECT_NE(stopped.err.find("efla train smnist --resume " + broken), std::string::npos) << stopped.err;
  ASSERT_LT(metrics_of(broken).size(), metrics_of(whole).size());

  const auto other = run_program({"train", "smnist", "--resume", broken, "--mixer", "deltanet"});
  EXPECT_TRUE(is_user_mistake(other, "mixer"));
  const auto resumed = run_program({"train", "smnist", "--resume", broken});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(metrics_of(broken).size(), metrics_of(whole).size());
  EXPECT_EQ(checkpoint_bytes(broken), checkpoint_bytes(whole));
}

// What is begun anew gives the same bits, keeps other files, and is the same run.
TEST(TrainCommand, KilledBeforeItsFirstCheckpointBeginsAnew) {
  const TempFolder folder;
  const Arguments longer{"--train-images", "400", "--epochs", "1"};
  const auto whole = folder.file("whole");
  ASSERT_EQ(run_program(small_run(whole) + longer).exit_code, 0);
  for (const bool resumes : {false, true}) {
    const auto run = folder.file(resumes ? "resumed" : "again");
    const auto child =
        start_command(Arguments{EFLA_PROGRAM} + small_run(run) + longer, "/dev/null", folder.file("err"));
    const auto begun = [&] { return std::filesystem::exists(run + "/metrics.jsonl") && !metrics_of(run).empty(); };
    while (!begun() && ::kill(child, 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ::kill(child, SIGKILL);
    ASSERT_EQ(wait_for(child), 128 + SIGKILL) << read_text(folder.file("err"));
    ASSERT_FALSE(std::filesystem::exists(run + "/checkpoints"));
    write_text(run + "/mine", "precious");

    const auto other = Arguments{"--lr", "0.02"};
    EXPECT_TRUE(is_user_mistake(run_program(small_run(run) + longer + other), "train smnist: --lr: got 0.02"));
    EXPECT_TRUE(is_user_mistake(run_program(Arguments{"train", "smnist", "--resume", run} + other),
                                "train smnist: --lr: got 0.02"));
    const auto result = run_program(resumes ? Arguments{"train", "smnist", "--resume", run} : small_run(run) + longer);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(checkpoint_bytes(run), checkpoint_bytes(whole));
    EXPECT_EQ(metrics_of(run).size(), metrics_of(whole).size());
    EXPECT_EQ(read_text(run + "/mine"), "precious");
    EXPECT_TRUE(is_user_mistake(run_program(small_run(run) + longer), "which has a checkpoint"));
  }
  const auto damaged = folder.path() / "damaged";
  std::filesystem::create_directory(damaged);
  write_text(damaged / "training.json", R"({"model": {}, "data": 1})");
  for (const auto& command :
       {small_run(damaged.string()), Arguments{"train", "smnist", "--resume", damaged.string()}}) {
    EXPECT_TRUE(is_user_mistake(run_program(command), "training.json: model.mixer: got nothing, expected a text"));
  }
  auto begun = json::parse(read_text(folder.file("again") + "/training.json"));
  begun["training"]["batch_size"] = 0;
  write_text(damaged / "training.json", begun.dump());
  EXPECT_TRUE(is_user_mistake(run_program({"train", "smnist", "--resume", damaged.string()}),
                              "training.json: training.batch_size: got 0, expected 1 to 65536"));
}

TEST(TrainCommand, Mistakes) {
  const TempFolder folder;
  const auto run = folder.file("run");
  const auto with = [&](const Arguments& more) { return run_program(small_run(run) + more); };
  EXPECT_TRUE(is_user_mistake(with({"--mixer", "elfa"}), "nearest: efla"));
  EXPECT_TRUE(is_user_mistake(with({"--data", folder.file("nowhere")}), "nowhere"));
  EXPECT_TRUE(is_user_mistake(with({"--data", folder.file("\xff")}), "train smnist: --data: got "));
  EXPECT_TRUE(is_user_mistake(with({"--data", folder.file("\xff")}), "expected a path that is UTF-8"));
  const auto small = folder.path() / "small";
  std::filesystem::create_directory(small);
  for (const std::string split : {"train", "t10k"}) {
    write_text(small / (split + "-images-idx3-ubyte"), idx_bytes(0x803, {1, 2, 3}, "pixels"));
    write_text(small / (split + "-labels-idx1-ubyte"), idx_bytes(0x801, {1}, "\1"));
  }
  EXPECT_TRUE(is_user_mistake(with({"--data", small.string()}), "28 x 28"));
  EXPECT_TRUE(is_user_mistake(with({"--train-images", "100000001"}),
                              "train smnist: --train-images: got 100000001, expected at most the 100000000 built in"));
  EXPECT_TRUE(is_user_mistake(with({"--lr", "-1"}), "lr"));
  EXPECT_TRUE(is_user_mistake(with({"--hidden", "1000000000"}), "hidden"));
  EXPECT_TRUE(is_user_mistake(with({"--hidden", "65536", "--layers", "64"}), "GB of memory that this process may use"));
  // The parameters take half of the memory, and training four times that.
  const auto hidden = static_cast<std::int64_t>(std::sqrt(usable_memory_bytes() / (8.0 * 4.0 * 64.0)));
  EXPECT_TRUE(is_user_mistake(with({"--hidden", std::to_string(hidden), "--layers", "64", "--device", "cpu"}),
                              "parameters, their gradient and the optimiser's moments"));
  EXPECT_TRUE(is_user_mistake(with({"--seed", "-1"}), "--seed"));
  EXPECT_TRUE(is_user_mistake(with({"--heads", "3"}), "heads"));
  EXPECT_TRUE(is_user_mistake(with({"--pooling", "max"}), "pooling"));
  EXPECT_TRUE(is_user_mistake(run_program({"train", "smnist"}), "--out"));
  EXPECT_FALSE(std::filesystem::exists(run)) << "a mistake left a folder behind";

  std::filesystem::create_directory(run);
  std::ofstream(run + "/mine") << "precious";
  EXPECT_TRUE(is_user_mistake(with({}), "run"));
  EXPECT_EQ(read_text(run + "/mine"), "precious");
}

TEST(EvalCommand, MeasuresARun) {
  const TempFolder folder;
  const auto run = folder.file("run");
  ASSERT_EQ(run_program(small_run(run)).exit_code, 0);
  const auto result = run_program({"eval", "robustness", run, "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto measured = json::parse(result.out);
  EXPECT_EQ(measured.at("clean_accuracy"), metrics_of(run).back().at("accuracy"));
  for (const auto& [panel, level] : {std::pair{"dropout", "p"}, {"scale", "factor"}, {"noise", "sigma"}}) {
    ASSERT_GE(measured.at(panel).size(), 3U) << panel;
    for (const auto& point : measured.at(panel)) {
      EXPECT_TRUE(point.at(level).is_number());
      EXPECT_TRUE(point.at("accuracy") >= 0.0 && point.at("accuracy") <= 1.0) << point;
    }
  }
  std::filesystem::create_directory(run + "/checkpoints/step-000099");
  const auto again = run_program({"eval", "robustness", run, "--json"});
  EXPECT_EQ(again.out, result.out);
  EXPECT_NE(again.err.find("efla: eval robustness: " + run + "/checkpoints/step-000099 has no model.safetensors"),
            std::string::npos)
      << again.err;
  std::filesystem::copy(run + "/checkpoints/step-000010/model.safetensors",
                        run + "/checkpoints/step-000099/model.safetensors");
  const auto alone = run_program({"eval", "robustness", run, "--json"});
  EXPECT_EQ(alone.out, result.out);
  EXPECT_NE(alone.err.find(run + "/checkpoints/step-000099 has no trainer.json: it is ignored"), std::string::npos)
      << alone.err;
  std::filesystem::remove_all(run + "/checkpoints/step-000099");

  const auto other = folder.file("other");
  std::filesystem::create_directories(other + "/checkpoints/step-000001");
  write_text(other + "/checkpoints/step-000001/model.safetensors", "");
  const auto other_is = [&](const std::string& config, const std::string& says) {
    write_text(
        other + "/checkpoints/step-000001/trainer.json",
        R"({"format": "efla checkpoint 2", "step": 1, "examples": 1, "position": {}, "config": )" + config + "}");
    for (const Arguments& command : {Arguments{"eval", "robustness", other}, {"train", "smnist", "--resume", other}}) {
      EXPECT_TRUE(is_user_mistake(run_program(command), "step-000001/trainer.json: " + says));
    }
  };
  other_is(R"({"model": {}, "data": {"train_images": 1}, "training": {}})",
           "config.model.mixer: got nothing, expected a text");
  other_is(R"({"model": {"hidden_size": 128}, "data": {"train": "tokens"}, "training": {}})",
           "belongs to a run of another command than efla train smnist");
  EXPECT_TRUE(is_user_mistake(run_program({"eval", "robustness", folder.path()}), "has no checkpoint"));

  const std::string trainer = run + "/checkpoints/step-000010/trainer.json", whole = read_text(trainer);
  const auto refused = [&](const char* place, const json& value, const std::string& says) {
    auto changed = json::parse(whole);
    changed[json::json_pointer(place)] = value;
    write_text(trainer, changed.dump());
    for (const Arguments& command : {Arguments{"eval", "robustness", run}, {"train", "smnist", "--resume", run}}) {
      EXPECT_TRUE(is_user_mistake(run_program(command), trainer + ": " + says));
    }
  };
  refused("/config/model/hidden", "wide", "config.model.hidden: got \"wide\", expected a whole number below 2^63");
  refused("/config/model/layers", 0, "config.model.layers: got 0, expected 1 to 64");
  refused("/config/training/lr", 5, "config.training.lr: got 5, expected a number above 0 and at most 1");
  write_text(trainer, whole);
  const auto other_rate = run_program({"train", "smnist", "--resume", run, "--lr", "0.5"});
  EXPECT_TRUE(is_user_mistake(other_rate, "efla: train smnist: --lr: got 0.5, expected 0.01 as in " + trainer));
  EXPECT_TRUE(is_user_mistake(run_program({"train", "smnist", "--resume", run, "--train-images", "39"}),
                              "efla: train smnist: --train-images: got 39, expected 40 as in " + trainer));

  std::filesystem::resize_file(run + "/checkpoints/step-000010/model.safetensors", 100);
  const auto cut = run_program({"eval", "robustness", run});
  EXPECT_EQ(cut.exit_code, 2) << cut.err;
  EXPECT_NE(cut.err.find("step-000010/model.safetensors"), std::string::npos) << cut.err;
}

TEST(ReproduceCommand, WritesResultsAndReportAndGoesOn) {
  const TempFolder folder;
  const auto out = folder.file("study");
  const Arguments command{"reproduce",     "smnist",     "--out",    out,  "--train-images", "24",
                          "--test-images", "16",         "--epochs", "1",  "--seeds",        "1,2",
                          "--lr",          "0.01,0.001", "--layers", "1,2"};
  auto negative = command;
  negative[11] = "1,-1";
  const auto refused = run_program(negative);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("--seeds"), std::string::npos) << refused.err;
  EXPECT_FALSE(std::filesystem::exists(out));
  const auto result = run_program(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("report: " + out + "/report.html"), std::string::npos) << result.out;
  const auto results = json::parse(read_text(out + "/results.json"));
  EXPECT_EQ(results.at("study"), "smnist");
  ASSERT_EQ(results.at("scores").size(), 18U);  // three tests of two mixers: the headline, a learning rate, two layers
  for (const auto& score : results.at("scores")) {
    const auto& clean = score.at("accuracy").at(0);
    const auto level = score.at("task") == "dropout" ? "p" : score.at("task") == "scale" ? "factor" : "sigma";
    EXPECT_EQ(clean.at(level), score.at("task") == "scale" ? 1.0 : 0.0) << score;
    EXPECT_TRUE(clean.at("mean") >= 0.0 && clean.at("mean") <= 1.0) << score;
  }
  EXPECT_EQ(results.at("runs").size(), 8U);  // two mixers: two seeds, another learning rate, two layers
  EXPECT_EQ(results.at("settings").at("data"), "builtin");
  EXPECT_TRUE(results.at("environment").is_object());
  EXPECT_NE(results.at("command").get<std::string>().find("reproduce smnist"), std::string::npos);
  EXPECT_NE(read_text(out + "/report.html").find("built-in digit sequences"), std::string::npos);

  const auto again = run_program(command);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(json::parse(read_text(out + "/results.json")).at("scores"), results.at("scores"));
  EXPECT_TRUE(is_user_mistake(run_program(command + Arguments{"--epochs", "2"}), "reproduce smnist: --epochs: got 2"));
  EXPECT_TRUE(is_user_mistake(run_program({"reproduce", "smnist", "--out", folder.file("x"), "--mixers", "elfa"}),
                              "nearest: efla"));

  const auto file = out + "/runs/efla-layers1-lr0.01-seed1/result.json";
  auto entry = json::parse(read_text(file));
  entry.at("scale").erase(0);
  write_text(file, entry.dump());
  EXPECT_TRUE(is_user_mistake(run_program(command), file + ": scale: got [{"));
}

TEST(ReproduceCommand, KeepsARunThatDivergesAsAResult) {
  const TempFolder folder;
  const auto out = folder.file("study");
  // At this learning rate the state of rk4 grows without bound.
  const Arguments command{"reproduce", "smnist", "--out",        out, "--train-images", "48", "--test-images", "16",
                          "--epochs",  "2",      "--seeds",      "1", "--lr",           "1",  "--layers",      "1",
                          "--mixers",  "rk4",    "--batch-size", "8"};
  const auto result = run_program(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("rk4-layers1-lr1-seed1: diverged"), std::string::npos) << result.err;
  const auto results = json::parse(read_text(out + "/results.json"));
  EXPECT_EQ(results.at("runs").at(0).at("diverged"), true);
  EXPECT_EQ(results.at("scores").at(0).at("diverged"), 1);
  EXPECT_EQ(run_program(command).exit_code, 0);
}

}  // namespace
}  // namespace efla::test
