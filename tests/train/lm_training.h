// What the tests of language models' training share: a corpus, and runs over it.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "efla/io/json.h"
#include "efla/train/run.h"
#include "efla/train/tasks/lm_task.h"
#include "efla/train/trainer.h"
#include "tests/support/temp_folder.h"
#include "tests/train/lm_stand_in.h"

namespace efla::train {

using test::small_language_model;
using test::small_options;
using test::values_of;

class LmTraining : public testing::Test {
 protected:
  LmTraining() {
    test::write_small_corpus(folder_ / "train", 60, 1);
    test::write_small_corpus(folder_ / "validation", 15, 2);
    corpus_.emplace(folder_ / "train");
    validation_.emplace(folder_ / "validation");
  }

  // What steps leave behind: losses, norms, and the parameters.
  struct Course {
    std::vector<double> losses, norms;
    std::vector<float> parameters;
  };

  Course train(int copies, int steps, ProcessGroup& group, const LmTrainOptions& options = small_options()) {
    ThreadPool pool(copies);
    LmTask task([] { return small_language_model(1); }, {&*corpus_, nullptr, {}}, options, group);
    DataParallel model(
        copies, [&] { return task.add_copy(); }, pool);
    Trainer trainer(task, model, update_options(options), group);
    Course course;
    for (int i = 0; i < steps; ++i) {
      const auto result = trainer.step();
      EXPECT_TRUE(result.updated);
      EXPECT_EQ(result.step, i + 1);
      course.losses.push_back(result.loss);
      course.norms.push_back(result.grad_norm);
    }
    course.parameters = values_of(model.parameters().values());
    return course;
  }

  RunEnd run(const std::filesystem::path& folder, const LmTrainOptions& options, int copies = 2,
             const RunEvents& events = {}, const std::function<LmReplica()>& make = {}) {
    std::filesystem::create_directories(folder);
    return run_in(*alone_, folder, options, copies, events, make);
  }

  RunEnd run_in(ProcessGroup& group, const std::filesystem::path& folder, const LmTrainOptions& options, int copies,
                const RunEvents& events, const std::function<LmReplica()>& make = {}) {
    ThreadPool pool(copies);
    LmFiles files;
    files.sample = [] { return std::string("a sample"); };
    LmTask task(
        make ? make : [] { return small_language_model(1); }, {&*corpus_, &*validation_, {}}, options, group,
        torch::kCPU, files);
    DataParallel model(
        copies, [&] { return task.add_copy(); }, pool);
    return train_in_folder({folder, {{"seed", options.seed}}, run_options(options, true)}, task, model,
                           update_options(options), group, events);
  }

  test::TempFolder folder_;
  std::optional<io::TokenFolder> corpus_, validation_;
  std::unique_ptr<ProcessGroup> alone_ = ProcessGroup::join({}, torch::kCPU);
};

// The metrics without what depends on the clock.
inline std::vector<nlohmann::json> timeless_metrics(const std::filesystem::path& folder) {
  auto lines = io::read_json_lines(folder / kMetricsFile);
  for (auto& line : lines) {
    line.erase("seconds");
    line.erase("tokens_per_second");
  }
  return lines;
}

inline void expect_same_run(const std::filesystem::path& a, const std::filesystem::path& b) {
  EXPECT_EQ(timeless_metrics(a), timeless_metrics(b));
  const auto last = io::CheckpointFolder(a).latest(), other = io::CheckpointFolder(b).latest();
  ASSERT_TRUE(last && other);
  EXPECT_EQ(last->step, other->step);
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "trainer.json"}) {
    EXPECT_EQ(test::read_text(last->path / file), test::read_text(other->path / file)) << file;
  }
}

}  // namespace efla::train
