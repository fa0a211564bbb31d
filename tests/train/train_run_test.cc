// Runs in a folder: interrupted runs go on to the same bits, checkpoints refuse what is not theirs; the study's
// results.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/eval/perturb.h"
#include "efla/io/json.h"
#include "efla/train/checkpoint.h"
#include "efla/train/tasks/image_task.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/train/stand_in.h"

namespace efla::train {
namespace {

using eval::Classifier;
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

ImageRun small_spec() {
  ImageRun spec;
  spec.model = {{"kind", "small"}, {"hidden", 24}};
  spec.data = describe("small", kTrain, kTest);
  spec.training.epochs = 3;
  spec.training.batch_size = 16;
  spec.training.lr = 0.01;
  return spec;
}

RunEnd run(
    const std::filesystem::path& folder, ImageRun spec, int threads, const RunEvents& events = {},
    const ImageTask::MakeClassifier& make = [] { return small_classifier(1); }) {
  ThreadPool pool(threads);
  spec.folder = folder;
  return train_images(spec, make, kTrain, kTest, pool, events).end;
}

std::int64_t last_checkpoint(const std::filesystem::path& folder) {
  return io::CheckpointFolder(folder).require_latest().step;
}

// The files of the latest checkpoint, one after another.
std::string checkpoint_bytes(const std::filesystem::path& folder) {
  const auto path = io::CheckpointFolder(folder).require_latest().path;
  return read_text(path / "model.safetensors") + read_text(path / "optimizer.safetensors") +
         read_text(path / "trainer.json");
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
  EXPECT_EQ(checkpoint_bytes(a), checkpoint_bytes(b));
  EXPECT_EQ(timeless_metrics(a), timeless_metrics(b));
}

// Stops in the step after `steps` steps of this call, or in the evaluation before it.
RunEvents stop_after(std::int64_t steps, std::int64_t& seen) {
  RunEvents events;
  events.step = [&seen](const StepResult&, double) { ++seen; };
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
  ASSERT_EQ(run(parts.path(), small_spec(), 1, stop_after(3, seen)), RunEnd::stopped);
  EXPECT_EQ(last_checkpoint(parts.path()), 4);
  seen = 0;  // the next one stops at an epoch's end, in its evaluation
  ASSERT_EQ(run(parts.path(), small_spec(), 2, stop_after(10, seen), [] { return small_classifier(9); }),
            RunEnd::stopped);
  EXPECT_EQ(last_checkpoint(parts.path()), 14);
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
  events.step = [](const StepResult& result, double) {
    if (result.step == 9) throw std::runtime_error("died");
  };
  EXPECT_THROW(run(died.path(), spec, 1, events), std::runtime_error);
  EXPECT_EQ(last_checkpoint(died.path()), 7);
  EXPECT_EQ(timeless_metrics(died.path()).size(), 10U);
  ASSERT_EQ(run(died.path(), spec, 1), RunEnd::finished);
  expect_same_run(whole.path(), died.path());
}

TEST(Run, RefusesMetricsThatEndBeforeTheCheckpoint) {
  const TempFolder folder;
  ASSERT_EQ(run(folder.path(), small_spec(), 1), RunEnd::finished);
  const auto metrics = folder / kMetricsFile;
  const auto whole = read_text(metrics);
  std::size_t end = 0;
  for (int line = 0; line < 5; ++line) end = whole.find('\n', end) + 1;
  write_text(metrics, whole.substr(0, end));
  expect_bad_content([&] { run(folder.path(), small_spec(), 1); }, -1,
                     "ends at step 5, expected the step of the checkpoint, 21");
  EXPECT_EQ(read_text(metrics), whole.substr(0, end));
  std::filesystem::remove(metrics);
  EXPECT_EQ(run(folder.path(), small_spec(), 1), RunEnd::finished);
  // A process that was killed before its first step after that has made the file again.
  write_text(metrics, "");
  EXPECT_EQ(run(folder.path(), small_spec(), 1), RunEnd::finished);
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
  auto calls = std::make_shared<int>(0);
  const auto make = [=] {
    auto classifier = small_classifier(1);
    classifier.forward = [=, forward = classifier.forward](const torch::Tensor& x) {
      return forward(x) * (++*calls > 20 ? std::numeric_limits<double>::infinity() : 1.0);
    };
    return classifier;
  };
  try {
    run(folder.path(), small_spec(), 1, {}, make);
    FAIL() << "went on";
  } catch (const NonFinite& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("step 8: loss nan, gradient norm nan; "), std::string::npos) << text;
    EXPECT_NE(text.find((folder / "checkpoints/step-000007").string()), std::string::npos) << text;
  }
  EXPECT_EQ(last_checkpoint(folder.path()), 7);
}

TEST(Checkpoint, GivesBackParametersMomentsAndStep) {
  const TempFolder folder;
  const auto save = [&](const std::string& from, const std::string& to, std::uint64_t seed, int steps) {
    ThreadPool pool(1);
    ImageTask task([=] { return small_classifier(seed); }, kTrain, kTest, small_spec().training);
    DataParallel model(
        1, [&] { return task.add_copy(); }, pool);
    const auto alone = ProcessGroup::join({}, torch::kCPU);
    Trainer trainer(task, model, update_options(small_spec().training), *alone);
    if (!from.empty()) trainer.restore(folder / from, {{"x", 1}});
    for (int i = 0; i < steps; ++i) trainer.step();
    EXPECT_EQ(trainer.steps_done(), 3);
    EXPECT_EQ(trainer.examples_done(), 48);
    std::filesystem::create_directory(folder / to);
    trainer.save(folder / to, {{"x", 1}});
    return parameter_bytes(task.classifier());
  };
  const auto saved = save("", "a", 1, 3);
  EXPECT_EQ(save("a", "b", 2, 0), saved);
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "trainer.json"}) {
    EXPECT_EQ(read_text(folder / "a" / file), read_text(folder / "b" / file)) << file;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "a"), {}), 3);
}

TEST(Checkpoint, OfAnotherConfigurationIsRefusedWithTheFieldAndBothValues) {
  const TempFolder folder;
  std::int64_t seen = 0;
  ASSERT_EQ(run(folder.path(), small_spec(), 1, stop_after(4, seen)), RunEnd::stopped);
  const auto before = checkpoint_bytes(folder.path());
  const auto refused = [&](const std::string& field, const std::string& says, const std::function<void(ImageRun&)>& f) {
    auto spec = small_spec();
    f(spec);
    expect_error([&] { run(folder.path(), spec, 1); }, field, says);
  };
  refused("model.hidden", "got 32, expected 24 as in", [](auto& s) { s.model["hidden"] = 32; });
  refused("training.lr", "got 0.02, expected 0.01 as in", [](auto& s) { s.training.lr = 0.02; });
  refused("training.schedule", "\"constant\"", [](auto& s) { s.training.schedule = Schedule::constant; });
  refused("data.digest", "got \"other\", expected \"", [](auto& s) { s.data["digest"] = "other"; });
  refused("model.extra", "got true, expected nothing", [](auto& s) { s.model["extra"] = true; });
  refused("model.kind", "got nothing, expected \"small\"", [](auto& s) { s.model.erase("kind"); });
  EXPECT_EQ(checkpoint_bytes(folder.path()), before);
  auto moved = small_spec();
  moved.data["source"] = "another place";
  EXPECT_EQ(run(folder.path(), moved, 1), RunEnd::finished);
}

// As after a process that could not remove it.
TEST(Checkpoint, AnOldOneThatStayedIsRemovedWhenAFinishedRunResumes) {
  const TempFolder folder;
  ASSERT_EQ(run(folder.path(), small_spec(), 1), RunEnd::finished);
  const auto newest = io::CheckpointFolder(folder.path()).require_latest();
  const auto old = io::CheckpointFolder(folder.path()).path_of(newest.step - 1);
  std::filesystem::copy(newest.path, old);
  const auto before = checkpoint_bytes(folder.path());
  EXPECT_EQ(run(folder.path(), small_spec(), 1), RunEnd::finished);
  EXPECT_FALSE(std::filesystem::exists(old));
  EXPECT_EQ(checkpoint_bytes(folder.path()), before);
}

TEST(Checkpoint, RefusesFoldersThatAreNone) {
  const TempFolder folder;
  const auto refused = [&](const std::string& trainer, const std::string& says) {
    write_text(folder / "trainer.json", trainer);
    expect_bad_content([&] { read_trainer_state(folder.path()); }, -1, says);
  };
  refused("{}", "trainer.json: format: got nothing, expected a text");
  refused(R"({"format": "x"})", "format: got \"x\", expected \"efla checkpoint 2\"");
  const json whole = {{"format", "efla checkpoint 2"},
                      {"step", 3},
                      {"examples", 7},
                      {"position", json::object()},
                      {"config", {{"x", 1}}}};
  const auto changed = [&](const char* field, const json& value) {
    json trainer = whole;
    trainer[field] = value;
    return trainer.dump();
  };
  json without = whole;
  without.erase("step");
  refused(without.dump(), "step: got nothing, expected a whole number of at least 0");
  refused(changed("step", "3x"), "step: got \"3x\", expected a whole number of at least 0");
  refused(changed("step", -3), "step: got -3");
  refused(changed("examples", 1.5), "examples: got 1.5");
  refused(changed("config", 1), "config: got 1, expected an object");
  without.erase("config");
  without["step"] = 3;
  refused(without.dump(), "config: got nothing, expected an object");
  write_text(folder / "trainer.json", whole.dump());
  EXPECT_EQ(read_trainer_state(folder.path()).step, 3);

  const auto classifier = small_classifier(1);
  const auto model = folder / "model.safetensors";
  io::write_safetensors(model, {});
  expect_bad_content([&] { read_parameters(folder.path(), classifier.parameters); }, -1, "has no tensor w1");
  const std::vector<float> values(6);
  const io::ByteView bytes(reinterpret_cast<const std::uint8_t*>(values.data()), 24);
  const std::vector<io::NamedTensor> tensors{{"w1", io::TensorType::F32, {2, 3}, bytes}};
  io::write_safetensors(model, tensors);
  expect_bad_content([&] { read_parameters(folder.path(), classifier.parameters); }, -1,
                     "w1 is F32 [2, 3], expected F32 [24, 16]");
}

}  // namespace
}  // namespace efla::train
