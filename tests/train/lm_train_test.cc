// Training of language models by one process: steps, runs in a folder that go on to the same bits, checkpoints.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "efla/io/json.h"
#include "efla/train/run.h"
#include "efla/train/tasks/lm_task.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/train/lm_stand_in.h"
#include "tests/train/lm_training.h"

namespace efla::train {
namespace {

using test::expect_bad_content;
using test::expect_error;
using test::read_text;
using test::small_language_model;
using test::small_options;
using test::values_of;

TEST_F(LmTraining, LearnsAndHasTheSameBitsOnAnyThreads) {
  auto options = small_options();
  options.steps = 60;
  const auto two = train(2, 60, *alone_, options);
  EXPECT_LT(two.losses.back(), 0.6 * two.losses.front());
  for (const int copies : {1, 3}) {
    const auto other = train(copies, 60, *alone_, options);
    EXPECT_EQ(other.losses, two.losses) << copies;
    EXPECT_EQ(other.norms, two.norms) << copies;
    EXPECT_EQ(other.parameters, two.parameters) << copies;
  }
}

// The loss and the gradient are means over all targets of the step, however they are cut.
TEST_F(LmTraining, MicroBatchesAreOneBatch) {
  const auto parts = train(1, 1, *alone_);
  auto whole = small_options();
  whole.micro_batch = 8;
  const auto one = train(1, 1, *alone_, whole);
  EXPECT_NEAR(parts.losses[0], one.losses[0], 1e-6);
  EXPECT_NEAR(parts.norms[0], one.norms[0], 1e-6);

  const auto model = small_language_model(1);
  data::PackedBatches batches(*corpus_, {16, 8, whole.seed, 0, 1});
  const torch::Tensor loss = model.loss(make_batch(batches.next(), torch::kCPU));
  loss.backward();
  double squares = 0.0;
  for (const auto& [name, parameter] : model.parameters) {
    if (parameter.grad().defined()) squares += parameter.grad().square().sum().item<double>();
  }
  EXPECT_NEAR(one.losses[0], loss.item<double>(), 1e-6);
  EXPECT_NEAR(one.norms[0], std::sqrt(squares), 1e-6);
}

TEST_F(LmTraining, AStepThatClipsMovesByTheClippedGradient) {
  // With eps far above every moment AdamW's first step is the gradient times lr / eps.
  auto options = small_options();
  options.warmup_steps = 0;
  options.weight_decay = 0.0;
  options.eps = 1.0;
  const auto start = values_of(FlatParameters(small_language_model(1).parameters, torch::kCPU).values());
  for (const double clip : {0.0, 0.01}) {
    options.clip = clip;
    const auto course = train(1, 1, *alone_, options);
    double moved = 0.0;
    for (std::size_t i = 0; i < start.size(); ++i) moved += std::pow(course.parameters[i] - start[i], 2);
    const double norm = clip == 0.0 ? course.norms[0] : clip;
    ASSERT_GT(course.norms[0], 0.05);
    // m / (√v + 1) = g / (|g| + 1), a little under g.
    EXPECT_LT(std::sqrt(moved), options.lr * norm);
    EXPECT_GT(std::sqrt(moved), options.lr * norm * 0.7);
  }
}

TEST_F(LmTraining, ARunLeavesMetricsAndCheckpoints) {
  auto options = small_options();
  options.evaluate_every = 5;
  options.sample_every = 6;
  options.checkpoint_every = 4;
  ASSERT_EQ(run(folder_ / "run", options), RunEnd::finished);
  std::map<std::string, std::vector<std::int64_t>> steps;
  for (const auto& line : timeless_metrics(folder_ / "run")) {
    steps[line.at("event").get<std::string>()].push_back(line.at("step").get<std::int64_t>());
  }
  EXPECT_EQ(steps["step"].size(), 12U);
  EXPECT_EQ(steps["evaluation"], (std::vector<std::int64_t>{5, 10, 12}));
  EXPECT_EQ(steps["sample"], (std::vector<std::int64_t>{6, 12}));
  std::vector<std::int64_t> kept;
  for (const auto& saved : io::CheckpointFolder(folder_ / "run").list()) kept.push_back(saved.step);
  EXPECT_EQ(kept, (std::vector<std::int64_t>{8, 12}));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "run" / "checkpoints"), {}), 2);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run" / "checkpoints" / "step-000012" / "trainer.json"));
}

TEST_F(LmTraining, InterruptedAndResumedEqualsUninterrupted) {
  auto options = small_options();
  options.evaluate_every = 4;
  options.checkpoint_every = 5;
  options.sample_every = 3;
  ASSERT_EQ(run(folder_ / "whole", options), RunEnd::finished);
  std::int64_t seen = 0;
  RunEvents events;
  events.step = [&](const StepResult&, double) { ++seen; };
  events.stop = [&] { return seen >= 3; };  // in the fourth step, and at once in the evaluation after it
  ASSERT_EQ(run(folder_ / "parts", options, 2, events), RunEnd::stopped);
  EXPECT_EQ(io::CheckpointFolder(folder_ / "parts").latest()->step, 4);
  seen = -10;
  events.step = [&](const StepResult& result, double) {
    if (result.step == 9) throw std::runtime_error("died");
  };
  EXPECT_THROW(run(folder_ / "parts", options, 3, events), std::runtime_error);
  EXPECT_EQ(io::CheckpointFolder(folder_ / "parts").latest()->step, 5);
  std::filesystem::create_directory(folder_ / "parts" / "checkpoints" / ".step-000009.tmp-1");
  ASSERT_EQ(run(folder_ / "parts", options), RunEnd::finished);
  expect_same_run(folder_ / "whole", folder_ / "parts");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "parts" / "checkpoints" / ".step-000009.tmp-1"));
  ASSERT_EQ(run(folder_ / "parts", options), RunEnd::finished) << "a finished run has nothing left to do";
  expect_same_run(folder_ / "whole", folder_ / "parts");
}

TEST_F(LmTraining, StopsAtALossThatIsNotFiniteAndNamesTheLastCheckpoint) {
  auto options = small_options();
  options.checkpoint_every = 2;
  const auto calls = std::make_shared<std::atomic<int>>(0);
  const auto make = [calls] {
    LmReplica replica = small_language_model(1);
    replica.loss = [calls, loss = replica.loss](const LmBatch& batch) {
      return loss(batch) * (++*calls > 18 ? std::numeric_limits<double>::infinity() : 1.0);
    };
    return replica;
  };
  try {
    run(folder_ / "run", options, 1, {}, make);
    FAIL() << "went on";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("step 5"), std::string::npos) << text;
    EXPECT_NE(text.find("step-000004"), std::string::npos) << text;
  }
  EXPECT_EQ(io::CheckpointFolder(folder_ / "run").latest()->step, 4);
}

TEST_F(LmTraining, StopsAtAValidationLossThatIsNotFiniteAndNamesTheLastCheckpoint) {
  auto options = small_options();
  options.evaluate_every = 3;
  const auto make = [] {
    LmReplica replica = small_language_model(1);
    replica.loss = [loss = replica.loss](const LmBatch& batch) {
      return loss(batch) * (torch::GradMode::is_enabled() ? 1.0 : std::numeric_limits<double>::infinity());
    };
    return replica;
  };
  const auto expect_end = [&](const std::string& folder, std::int64_t checkpoint_every, const std::string& named) {
    options.checkpoint_every = checkpoint_every;
    try {
      run(folder_ / folder, options, 1, {}, make);
      FAIL() << "went on";
    } catch (const NonFinite& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("after step 3: the validation loss is inf"), std::string::npos) << text;
      EXPECT_NE(text.find(named), std::string::npos) << text;
    }
  };
  expect_end("before", 2, "the last good checkpoint is " + (folder_ / "before/checkpoints/step-000002").string());
  expect_end("same", 3, (folder_ / "same/checkpoints/step-000003").string() + " has this model");
}

TEST_F(LmTraining, ACheckpointThatCannotBeWrittenLeavesTheOthers) {
  io::CheckpointFolder checkpoints(folder_ / "run");
  const auto write = [](const std::string& text) {
    return [text](const std::filesystem::path& folder) {
      test::write_text(folder / "model.safetensors", text);
      if (text != "half") test::write_text(folder / "trainer.json", text);
    };
  };
  checkpoints.add(3, write("three"));
  EXPECT_THROW(checkpoints.add(4,
                               [&](const std::filesystem::path& folder) {
                                 write("half")(folder);
                                 throw std::runtime_error("full");
                               }),
               std::runtime_error);
  EXPECT_EQ(checkpoints.latest()->step, 3);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "run" / "checkpoints"), {}), 1);
  checkpoints.add(3, write("again"));
  EXPECT_EQ(read_text(checkpoints.path_of(3) / "model.safetensors"), "again");
  checkpoints.add(1234567, write("late"));
  checkpoints.add(20, write("early"));
  EXPECT_EQ(checkpoints.latest()->step, 1234567);
  std::filesystem::create_directory(checkpoints.path_of(2000000));  // somebody's
  EXPECT_EQ(checkpoints.latest()->step, 1234567);
  test::write_text(checkpoints.path_of(2000000) / "model.safetensors", "alone");
  EXPECT_EQ(checkpoints.latest()->step, 1234567);
  EXPECT_EQ(checkpoints.ignored(), std::vector{checkpoints.path_of(2000000)});
  checkpoints.keep_newest(1);
  EXPECT_EQ(checkpoints.latest()->step, 1234567);
  EXPECT_EQ(checkpoints.list().size(), 1U);
  EXPECT_TRUE(std::filesystem::exists(checkpoints.path_of(2000000)));
}

TEST_F(LmTraining, ACheckpointOfAnotherRunIsRefused) {
  auto options = small_options();
  options.steps = 4;
  options.warmup_steps = 1;
  ASSERT_EQ(run(folder_ / "run", options), RunEnd::finished);
  options.seed = 7;
  expect_error([&] { run(folder_ / "run", options); }, "seed", "got 7, expected 42 as in");
  options.seed = 42;
  const auto trainer = io::CheckpointFolder(folder_ / "run").latest()->path / "trainer.json";
  test::write_text(trainer, "{\"format\": \"other\"}");
  expect_bad_content([&] { run(folder_ / "run", options); }, -1,
                     "format: got \"other\", expected \"efla checkpoint 2\"");
}

TEST_F(LmTraining, EvaluationIsTheMeanOverTheTargets) {
  ThreadPool pool(2);
  std::vector<LmReplica> copies;
  const DataParallel model_copies(
      2, [&] { return copies.emplace_back(small_language_model(1)).parameters; }, pool);
  auto options = small_options();
  const TokenBytes bytes{std::vector<std::int64_t>(test::kSmallVocabulary, 3), -1};
  const auto result = evaluate(model_copies, copies, *validation_, options, *alone_, bytes);

  const data::TokenWindows windows(*validation_, options.sequence_length);
  const auto model = small_language_model(1);
  double loss = 0.0;
  std::int64_t counted = 0;
  for (std::int64_t i = 0; i < windows.count(); ++i) {
    const LmBatch batch = make_batch(windows.read(std::vector<std::int64_t>{i}), torch::kCPU);
    if (batch.counted > 0) loss += model.loss(batch).item<double>() * static_cast<double>(batch.counted);
    counted += batch.counted;
  }
  EXPECT_EQ(result.tokens, counted);
  EXPECT_NEAR(result.loss, loss / static_cast<double>(counted), 1e-6);
  EXPECT_DOUBLE_EQ(result.perplexity, std::exp(result.loss));
  ASSERT_TRUE(result.bits_per_byte.has_value());
  EXPECT_NEAR(*result.bits_per_byte, result.loss / std::log(2.0) / 3.0, 1e-9);
  options.evaluate_tokens = 33;  // three windows
  EXPECT_LE(evaluate(model_copies, copies, *validation_, options, *alone_).tokens, 48);
  EXPECT_FALSE(evaluate(model_copies, copies, *validation_, options, *alone_).bits_per_byte.has_value());
}

}  // namespace
}  // namespace efla::train
