// Runs in a folder: interrupted runs go on to the same bits, checkpoints refuse what is not theirs; the study's
// results.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/io/json.h"
#include "efla/train/checkpoint.h"
#include "efla/train/run.h"
#include "efla/train/study.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/train/stand_in.h"

namespace efla::train {
namespace {

using nlohmann::json;
using test::expect_bad_content;
using test::expect_error;
using test::parameter_bytes;
using test::read_text;
using test::small_classifier;
using test::small_images;
using test::TempFolder;
using test::write_text;

const data::ImageSet kTrain = small_images(100, 1), kTest = small_images(60, 2);  // 7 steps an epoch

RunSpec small_spec() {
  RunSpec spec;
  spec.model = {{"kind", "small"}, {"hidden", 24}};
  spec.data = describe("small", kTrain, kTest);
  spec.training.epochs = 3;
  spec.training.batch_size = 16;
  spec.training.lr = 0.01;
  return spec;
}

RunEnd run(const std::filesystem::path& folder, const RunSpec& spec, int threads, const RunEvents& events = {},
           Classifier classifier = small_classifier(1)) {
  ThreadPool pool(threads);
  return train_in_folder(folder, spec, classifier, kTrain, kTest, pool, events);
}

// The metrics without what depends on the clock.
std::vector<json> timeless_metrics(const std::filesystem::path& folder) {
  auto lines = io::read_json_lines(folder / kMetricsFile);
  for (auto& line : lines) {
    line.erase("seconds");
    line.erase("images_per_second");
  }
  return lines;
}

void expect_same_run(const std::filesystem::path& a, const std::filesystem::path& b) {
  EXPECT_EQ(read_text(a / kCheckpointFile), read_text(b / kCheckpointFile));
  EXPECT_EQ(timeless_metrics(a), timeless_metrics(b));
}

// Stops after `steps` steps of this call.
RunEvents stop_after(std::int64_t steps, std::int64_t& seen) {
  RunEvents events;
  events.step = [&seen](const StepResult&, double, double) { ++seen; };
  events.stop = [&seen, steps] { return seen >= steps; };
  return events;
}

TEST(Run, WritesALineAStepAndAnEvaluationAnEpoch) {
  const TempFolder folder;
  ASSERT_EQ(run(folder.path(), small_spec(), 1), RunEnd::finished);
  const auto lines = timeless_metrics(folder.path());
  ASSERT_EQ(lines.size(), 24U);
  std::int64_t step = 0, evaluations = 0;
  for (const auto& line : lines) {
    if (line["event"] == "step") {
      EXPECT_EQ(line["step"], ++step);
      EXPECT_EQ(line["epoch"], (step - 1) / 7 + 1);
      for (const char* field : {"loss", "accuracy", "lr", "grad_norm"}) EXPECT_TRUE(line[field].is_number()) << field;
    } else {
      EXPECT_EQ(line["event"], "evaluation");
      EXPECT_EQ(line["step"], step);
      EXPECT_EQ(line["epoch"], ++evaluations);
      EXPECT_EQ(step % 7, 0);
    }
  }
  EXPECT_EQ(evaluations, 3);
  EXPECT_GT(lines.back()["accuracy"].get<double>(), lines[7]["accuracy"].get<double>()) << "it does not learn";
}

TEST(Run, InterruptedAndResumedEqualsUninterrupted) {
  const TempFolder whole, parts;
  ASSERT_EQ(run(whole.path(), small_spec(), 1), RunEnd::finished);
  std::int64_t seen = 0;
  ASSERT_EQ(run(parts.path(), small_spec(), 1, stop_after(4, seen)), RunEnd::stopped);
  EXPECT_EQ(Checkpoint(parts / kCheckpointFile).step(), 4);
  seen = 0;  // the next one stops at an epoch's end, in its evaluation
  ASSERT_EQ(run(parts.path(), small_spec(), 2, stop_after(10, seen), small_classifier(9)), RunEnd::stopped);
  EXPECT_EQ(Checkpoint(parts / kCheckpointFile).step(), 14);
  EXPECT_EQ(timeless_metrics(parts.path()).size(), 15U) << "the second evaluation was stopped";
  ASSERT_EQ(run(parts.path(), small_spec(), 1), RunEnd::finished);
  expect_same_run(whole.path(), parts.path());
  ASSERT_EQ(run(parts.path(), small_spec(), 1), RunEnd::finished) << "a finished run has nothing left to do";
  expect_same_run(whole.path(), parts.path());
}

TEST(Run, RepeatsTheStepsAfterTheLastCheckpointWhenTheProcessDied) {
  const TempFolder whole, died;
  auto spec = small_spec();
  ASSERT_EQ(run(whole.path(), spec, 1), RunEnd::finished);
  spec.checkpoint_every = 5;
  RunEvents events;
  events.step = [](const StepResult& result, double, double) {
    if (result.step == 9) throw std::runtime_error("died");
  };
  EXPECT_THROW(run(died.path(), spec, 1, events), std::runtime_error);
  EXPECT_EQ(Checkpoint(died / kCheckpointFile).step(), 7);
  EXPECT_EQ(timeless_metrics(died.path()).size(), 10U);
  ASSERT_EQ(run(died.path(), spec, 1), RunEnd::finished);
  expect_same_run(whole.path(), died.path());
}

TEST(Run, HasTheSameBitsOnAnyThreads) {
  const TempFolder one, three;
  ASSERT_EQ(run(one.path(), small_spec(), 1), RunEnd::finished);
  ASSERT_EQ(run(three.path(), small_spec(), 3), RunEnd::finished);
  expect_same_run(one.path(), three.path());
}

TEST(Run, DependsOnItsSeed) {
  const TempFolder one, two;
  auto spec = small_spec();
  ASSERT_EQ(run(one.path(), spec, 1), RunEnd::finished);
  spec.training.seed = 2;
  ASSERT_EQ(run(two.path(), spec, 1), RunEnd::finished);
  EXPECT_NE(timeless_metrics(one.path())[0]["loss"], timeless_metrics(two.path())[0]["loss"]);
}

TEST(Run, StopsAtALossThatIsNotFiniteAndNamesTheLastCheckpoint) {
  const TempFolder folder;
  auto classifier = small_classifier(1);
  auto calls = std::make_shared<int>(0);
  const auto forward = classifier.forward;
  classifier.forward = [=](const torch::Tensor& x) {
    return forward(x) * (++*calls > 20 ? std::numeric_limits<double>::infinity() : 1.0);
  };
  try {
    run(folder.path(), small_spec(), 1, {}, classifier);
    FAIL() << "went on";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("step 8"), std::string::npos) << text;
    EXPECT_NE(text.find((folder / kCheckpointFile).string() + " of step 7"), std::string::npos) << text;
  }
  EXPECT_EQ(Checkpoint(folder / kCheckpointFile).step(), 7);
}

TEST(Checkpoint, GivesBackParametersMomentsAndStep) {
  const TempFolder folder;
  const auto classifier = small_classifier(1);
  ThreadPool pool(1);
  Trainer trainer(classifier, kTrain, small_spec().training, pool);
  for (int i = 0; i < 3; ++i) trainer.step();
  trainer.save(folder / "a", {{"x", 1}});
  const auto other = small_classifier(2);
  Trainer restored(other, kTrain, small_spec().training, pool);
  restored.restore(folder / "a", {{"x", 1}});
  EXPECT_EQ(restored.steps_done(), 3);
  EXPECT_EQ(parameter_bytes(other), parameter_bytes(classifier));
  restored.save(folder / "b", {{"x", 1}});
  EXPECT_EQ(read_text(folder / "a"), read_text(folder / "b"));
  EXPECT_EQ(folder.files(), 2U);
}

TEST(Checkpoint, OfAnotherConfigurationIsRefusedWithTheFieldAndBothValues) {
  const TempFolder folder;
  std::int64_t seen = 0;
  ASSERT_EQ(run(folder.path(), small_spec(), 1, stop_after(4, seen)), RunEnd::stopped);
  const auto before = read_text(folder / kCheckpointFile);
  const auto refused = [&](const std::string& field, const std::string& says, const std::function<void(RunSpec&)>& f) {
    auto spec = small_spec();
    f(spec);
    expect_error([&] { run(folder.path(), spec, 1); }, field, says);
  };
  refused("model.hidden", "got 32, expected 24 as in", [](auto& s) { s.model["hidden"] = 32; });
  refused("training.lr", "got 0.02, expected 0.01 as in", [](auto& s) { s.training.lr = 0.02; });
  refused("training.schedule", "\"constant\"", [](auto& s) { s.training.schedule = Schedule::constant; });
  refused("data.source", "got \"other\", expected \"small\"", [](auto& s) { s.data["source"] = "other"; });
  refused("model.extra", "got true, expected nothing", [](auto& s) { s.model["extra"] = true; });
  refused("model.kind", "got nothing, expected \"small\"", [](auto& s) { s.model.erase("kind"); });
  EXPECT_EQ(read_text(folder / kCheckpointFile), before);
}

TEST(Checkpoint, RefusesFilesThatAreNone) {
  const TempFolder folder;
  const auto path = folder / "file.safetensors";
  const auto open = [&] { Checkpoint checkpoint(path); };
  io::write_safetensors(path, {}, {});
  expect_bad_content(open, -1, "not a checkpoint");
  io::write_safetensors(path, {}, {{"format", "efla checkpoint 1"}, {"step", "3"}});
  expect_bad_content(open, -1, "no step or no run");
  io::write_safetensors(path, {}, {{"format", "efla checkpoint 1"}, {"step", "3x"}, {"run", "{}"}});
  expect_bad_content(open, -1, "\"3x\"");
  io::write_safetensors(path, {}, {{"format", "efla checkpoint 1"}, {"step", "-3"}, {"run", "{}"}});
  expect_bad_content(open, -1, "\"-3\"");
  io::write_safetensors(path, {}, {{"format", "efla checkpoint 1"}, {"step", "3"}, {"run", "{"}});
  expect_bad_content(open, -1, "not a JSON object");
  io::write_safetensors(path, {}, {{"format", "efla checkpoint 1"}, {"step", "3"}, {"run", "{}"}});
  const Checkpoint empty(path);
  const auto classifier = small_classifier(1);
  expect_bad_content([&] { empty.read_parameters(classifier.parameters); }, -1, "has no tensor model.w1");
  const std::vector<float> values(6);
  const io::ByteView bytes(reinterpret_cast<const std::uint8_t*>(values.data()), 24);
  const std::vector<io::NamedTensor> tensors{{"model.w1", io::TensorType::F32, {2, 3}, bytes}};
  io::write_safetensors(path, tensors, {{"format", "efla checkpoint 1"}, {"step", "3"}, {"run", "{}"}});
  const Checkpoint other(path);
  expect_bad_content([&] { other.read_parameters(classifier.parameters); }, -1,
                     "model.w1 is F32 [2, 3], expected F32 [24, 16]");
}

TEST(Study, RunsTheHeadlineOverSeedsAndTheRestOnce) {
  StudyOptions options;
  options.seeds = {4, 5};
  options.lrs = {1e-3, 3e-3};
  std::vector<std::string> names;
  for (const auto& run : plan_study(options)) names.push_back(run.name);
  const std::vector<std::string> expected{"efla-layers1-lr0.003-seed4", "deltanet-layers1-lr0.003-seed4",
                                          "efla-layers1-lr0.003-seed5", "deltanet-layers1-lr0.003-seed5",
                                          "efla-layers1-lr0.001-seed4", "deltanet-layers1-lr0.001-seed4",
                                          "efla-layers2-lr0.003-seed4", "deltanet-layers2-lr0.003-seed4"};
  EXPECT_EQ(names, expected);
  options.first_mixer_lrs = true;
  EXPECT_EQ(plan_study(options).size(), 7U);
  options.seeds = {4, 4};
  expect_error([&] { plan_study(options); }, "seeds", "4 twice");
  options.seeds.clear();
  expect_error([&] { plan_study(options); }, "seeds", "an empty list");
}

TEST(Study, AveragesTheCurveOverStretchesOfAnEpoch) {
  std::vector<json> metrics;
  for (int step = 1; step <= 14; ++step) {
    metrics.push_back(
        {{"event", "step"}, {"step", step}, {"epoch", (step - 1) / 7 + 1}, {"loss", step}, {"accuracy", 0.5}});
    if (step % 7 == 0)
      metrics.push_back({{"event", "evaluation"}, {"step", step}, {"epoch", step / 7}, {"accuracy", 0.9}});
  }
  const auto curve = training_curve(metrics, 7, 4);
  ASSERT_EQ(curve.size(), 4U);
  EXPECT_EQ(curve[0]["step"], 4);
  EXPECT_EQ(curve[0]["train_loss"], 2.5);
  EXPECT_EQ(curve[0]["train_accuracy"], 0.5);
  EXPECT_FALSE(curve[0].contains("test_accuracy"));
  EXPECT_EQ(curve[1]["step"], 7);
  EXPECT_EQ(curve[1]["epoch"], 1.0);
  EXPECT_EQ(curve[1]["train_loss"], 6.0);
  EXPECT_EQ(curve[1]["test_accuracy"], 0.9);
  EXPECT_EQ(curve[3]["epoch"], 2.0);
  EXPECT_EQ(training_curve(metrics, 7, 100).size(), 14U);
}

TEST(Study, SummarizesTheHeadlineOverSeeds) {
  StudyOptions options;
  options.mixers = {"efla"};
  options.seeds = {1, 2};
  std::vector<nlohmann::ordered_json> runs;
  for (const auto& run : plan_study(options)) {
    const double accuracy = run.lr < 3e-3 || run.layers > 1 ? 0.1 : run.seed == 1 ? 0.8 : 0.9;
    nlohmann::ordered_json entry{
        {"mixer", run.mixer}, {"layers", run.layers}, {"lr", run.lr}, {"seed", run.seed}, {"clean_accuracy", accuracy}};
    for (const auto& panel : robustness_panels()) {
      for (const double level : panel.levels) {
        entry[std::string(panel.name)].push_back({{std::string(panel.level_name), level}, {"accuracy", accuracy}});
      }
    }
    runs.push_back(entry);
  }
  const auto mixers = summarize(options, runs);
  const auto& efla = mixers.at("efla");
  EXPECT_EQ(efla.at("lr"), 3e-3);
  EXPECT_EQ(efla.at("layers"), 1);
  EXPECT_EQ(efla.at("seeds"), json({1, 2}));
  EXPECT_NEAR(efla.at("clean_accuracy").get<double>(), 0.85, 1e-12);
  EXPECT_NEAR(efla.at("clean_std").get<double>(), std::sqrt(0.005), 1e-12);
  ASSERT_EQ(efla.at("dropout").size(), 8U);
  EXPECT_EQ(efla.at("dropout")[7].at("p"), 0.8);
  EXPECT_NEAR(efla.at("noise")[1].at("accuracy").get<double>(), 0.85, 1e-12);
  options.seeds = {1};
  EXPECT_TRUE(summarize(options, {runs[0]}).at("efla").at("clean_std").is_null());
}

}  // namespace
}  // namespace efla::train
