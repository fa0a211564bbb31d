// A small configuration of efla train lm and what its runs leave behind, for tests of the program.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "tests/support/program.h"

namespace efla::test {

inline constexpr const char* kConfiguration = R"(
[model]
hidden_size = 32
num_hidden_layers = 1
num_heads = 1
intermediate_size = 48

[data]
train = "TRAIN"
validation = "VALIDATION"
tokenizer = "bytes"

[training]
sequence_length = 32
tokens_per_step = 256
micro_batch = 2
steps = 24
warmup_steps = 2
lr = 1e-2
min_lr = 1e-3
evaluate_every = 8
evaluate_tokens = 128
sample_every = 12
sample_tokens = 8
checkpoint_every = 3
)";

inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

class TrainLm : public testing::Test {
 protected:
  TrainLm() {
    Random random(1);
    for (const char* split : {"train", "validation"}) {
      std::string text;
      for (int i = 0; i < 400; ++i) text += random.below(2) == 0 ? "the state forgets. " : "the delta rule learns. ";
      const auto file = write_text(folder_ / (std::string(split) + ".txt"), text);
      const auto result =
          run_program({"data", "tokenize", file.string(), "--tokenizer", "bytes", "--out", path(split)});
      if (result.exit_code != 0) throw std::runtime_error(result.err);
    }
    auto text = replaced(kConfiguration, "TRAIN", path("train"));
    write_text(folder_ / "config.toml", replaced(text, "VALIDATION", path("validation")));
  }

  std::string path(const std::string& name) const { return folder_.file(name); }

  std::vector<std::string> train(const std::string& run, const std::vector<std::string>& settings = {}) const {
    std::vector<std::string> command{"train", "lm", path("config.toml"), "--out", path(run)};
    for (const auto& setting : settings) command.insert(command.end(), {"--set", setting});
    return command;
  }
  std::vector<std::string> resume(const std::string& run) const { return {"train", "lm", "--resume", path(run)}; }

  static std::string shell_line(const std::vector<std::string>& command) {
    std::string line = EFLA_PROGRAM;
    for (const auto& word : command) line += " '" + word + "'";
    return line;
  }

  // Runs a command until metrics.jsonl has grown by `lines` lines, and sends a signal `seconds` later.
  // Exit code kEndedBefore where it did not live that long.
  static constexpr int kEndedBefore = 99;
  ProgramResult interrupt(const std::vector<std::string>& command, const std::string& run, std::size_t lines,
                          double seconds, const std::string& signal) const {
    const std::string metrics = path(run) + "/metrics.jsonl";
    const std::size_t wanted = (std::filesystem::exists(metrics) ? lines_of(metrics) : 0) + lines;
    return run_command({"sh", "-c",
                        shell_line(command) + " & efla=$!; while [ \"$(cat '" + metrics +
                            "' 2>/dev/null | wc -l)\" -lt " + std::to_string(wanted) +
                            " ]; do sleep 0.005; kill -0 $efla 2>/dev/null || exit 99; done; sleep " +
                            std::to_string(seconds) + "; kill -" + signal + " $efla; wait $efla"});
  }

  static std::size_t lines_of(const std::string& file) {
    const auto text = read_text(file);
    return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
  }

  std::vector<nlohmann::json> timeless_metrics(const std::string& run) const {
    std::vector<nlohmann::json> lines;
    std::istringstream text(read_text(path(run) + "/metrics.jsonl"));
    for (std::string line; std::getline(text, line);) {
      lines.push_back(nlohmann::json::parse(line));
      lines.back().erase("seconds");
      lines.back().erase("tokens_per_second");
    }
    return lines;
  }

  std::vector<std::string> checkpoints(const std::string& run) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path(run) + "/checkpoints")) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  void expect_same_run(const std::string& a, const std::string& b) const {
    EXPECT_EQ(timeless_metrics(a), timeless_metrics(b));
    EXPECT_EQ(checkpoints(a), checkpoints(b));
    for (const char* file : {"config.json", "model.safetensors", "optimizer.safetensors", "trainer.json"}) {
      const std::string last = "/checkpoints/" + checkpoints(a).back() + "/";
      EXPECT_EQ(read_text(path(a) + last + file), read_text(path(b) + last + file)) << file;
    }
  }

  TempFolder folder_;
};

}  // namespace efla::test
