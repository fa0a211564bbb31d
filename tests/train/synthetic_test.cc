// Training on synthetic tasks: the model, the measures of accuracy, runs that go on, and the studies' plans and scores.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <set>

#include "efla/io/json.h"
#include "efla/train/synthetic_study.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::train {
namespace {

using data::synthetic::Accuracy;
using data::synthetic::Example;
using data::synthetic::kNoTarget;
using data::synthetic::make_task;
using SyntheticTask = data::synthetic::Task;
using nlohmann::json;
using nlohmann::ordered_json;
using test::expect_error;
using torch::Tensor;

nn::SequenceModelConfig small_model(const SyntheticTask& task, const std::string& mixer = "efla") {
  return {.mixer = mixer,
          .vocab = task.vocab,
          .hidden = 16,
          .layers = 1,
          .heads = 2,
          .head_dim = 0,
          .reconstructs = task.reconstructs};
}

Tensor random_ids(const SyntheticTask& task, std::int64_t batch) {
  torch::manual_seed(1);
  return torch::randint(task.vocab, {batch, task.length}, torch::kLong);
}

TEST(SequenceModel, TellsATokenFromThoseUpToIt) {
  const auto task = make_task("in-context-recall", {{"length", 20}});
  for (const char* mixer : {"efla", "kda", "softmax"}) {
    const nn::SequenceModel model(small_model(task, mixer), nn::Initialiser(1));
    const auto ids = random_ids(task, 2);
    auto later = ids.clone();
    later[1][10] = (later[1][10] + 1) % task.vocab;
    const auto places = torch::arange(2 * task.length);
    const auto logits = model.logits(ids, places), changed = model.logits(later, places);
    ASSERT_EQ(logits.sizes(), at::IntArrayRef({2 * task.length, task.vocab}));
    const std::int64_t change = task.length + 10;
    EXPECT_TRUE(torch::equal(logits.slice(0, 0, change), changed.slice(0, 0, change))) << mixer;
    EXPECT_FALSE(torch::equal(logits[change], changed[change])) << mixer;
    const auto some = torch::tensor({5, 30, 7}, torch::kLong);
    EXPECT_TRUE(torch::allclose(model.logits(ids, some), logits.index_select(0, some), 1e-5, 1e-6)) << mixer;
  }
}

TEST(SequenceModel, ReconstructsFromTheLastTokenAndThePosition) {
  const auto task = make_task("compression", {{"length", 12}});
  const nn::SequenceModel model(small_model(task), nn::Initialiser(1));
  const auto ids = random_ids(task, 2);
  const auto places = torch::arange(2 * task.length);
  const auto logits = model.logits(ids, places);
  // Whatever position is asked for, the first token matters to it; another sequence's does not.
  auto other = ids.clone();
  other[1][0] = (other[1][0] + 1) % task.vocab;
  const auto changed = model.logits(other, places);
  for (std::int64_t t = 0; t < task.length; ++t) {
    EXPECT_TRUE(torch::equal(changed[t], logits[t])) << t;
    EXPECT_FALSE(torch::equal(changed[task.length + t], logits[task.length + t])) << t;
    if (t > 0) {
      EXPECT_FALSE(torch::equal(logits[t], logits[t - 1])) << t;
    }
  }
}

TEST(SequenceModel, RefusesWhatItCannotBe) {
  const auto task = make_task("parity");
  const auto refused = [&](auto change, const char* field) {
    auto config = small_model(task);
    change(config);
    expect_error([&] { nn::SequenceModel(config, nn::Initialiser(1)); }, field, "");
  };
  refused([](auto& c) { c.mixer = "elfa"; }, "name");
  refused([](auto& c) { c.layers = 0; }, "layers");
  refused([](auto& c) { c.vocab = 0; }, "vocab");
}

// A task of four tokens a sequence that asks for what `targets` says, and a model that always answers 0.
SyntheticTask given_targets(std::vector<std::vector<std::int32_t>> targets, Accuracy accuracy) {
  SyntheticTask task;
  task.name = "given";
  task.vocab = 4;
  task.length = 4;
  task.accuracy = accuracy;
  const auto next = std::make_shared<std::size_t>(0);
  task.draw = [targets, next](Random&, data::Split, Example& example) {
    example.inputs.assign(4, 0);
    example.targets = targets[(*next)++];
  };
  return task;
}

SequenceClassifier constant_model() {
  SequenceClassifier model;
  model.logits = [](const Tensor&, const Tensor& places) {
    auto logits = torch::zeros({places.size(0), 4});
    logits.select(1, 0).fill_(1.0);
    return logits;
  };
  return model;
}

TEST(SyntheticAccuracy, IsNotANumberWhereALogitIsNotFinite) {
  ThreadPool pool(2);
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    const auto task = given_targets({{0, 0, 0, 1}, {0, 1, 1, 1}}, Accuracy::examples);
    auto model = constant_model();
    model.logits = [logits = model.logits, bad](const torch::Tensor& ids, const torch::Tensor& places) {
      auto result = logits(ids, places);
      result[1][3] = bad;  // not the class that is answered
      return result;
    };
    EXPECT_TRUE(std::isnan(evaluate(model, task, 1, 2, 2, pool)));
  }
}

TEST(SyntheticAccuracy, CountsByClassOrByExample) {
  constexpr auto kNo = kNoTarget;
  const std::vector<std::vector<std::int32_t>> targets{{0, 0, 0, 1}, {0, kNo, kNo, kNo}, {2, 2, kNo, 0}};
  ThreadPool pool(2);
  // In one batch: class 0 is right 5 of 5 times, classes 1 and 2 never are.
  EXPECT_DOUBLE_EQ(evaluate(constant_model(), given_targets(targets, Accuracy::classes), 1, 3, 3, pool), 1.0 / 3.0);
  // In batches of two: the mean of (1 + 0) / 2 and (1 + 0) / 2.
  EXPECT_DOUBLE_EQ(evaluate(constant_model(), given_targets(targets, Accuracy::classes), 1, 3, 2, pool), 0.5);
  // By example: 3/4, 1 and 1/3, whatever the batches.
  const double mean = (0.75 + 1.0 + 1.0 / 3.0) / 3.0;
  for (const std::int64_t batch : {1, 2, 3}) {
    EXPECT_DOUBLE_EQ(evaluate(constant_model(), given_targets(targets, Accuracy::examples), 1, 3, batch, pool), mean);
  }
}

TEST(SequenceTask, StopsAtALossThatIsNotFinite) {
  const auto synthetic = make_task("parity", {{"length", 8}});
  const auto weight = torch::zeros({2}, torch::requires_grad());
  const auto make = [&] {
    SequenceClassifier model;
    model.parameters = {{"weight", weight}};
    model.logits = [&](const Tensor&, const Tensor& places) {
      return weight.unsqueeze(0).expand({places.size(0), 2}) / 0.0;
    };
    return model;
  };
  const SyntheticTraining training{.steps = 2, .batch_size = 2};
  ThreadPool pool(1);
  SequenceTask task(make, synthetic, training);
  DataParallel model(
      1, [&] { return task.add_copy(); }, pool);
  const auto alone = ProcessGroup::join({}, torch::kCPU);
  Trainer trainer(task, model, update_options(training), *alone);
  EXPECT_FALSE(trainer.step().updated);
  EXPECT_EQ(trainer.steps_done(), 0);
  EXPECT_TRUE(torch::equal(weight, torch::zeros({2})));
}

SyntheticRun small_run(const std::string& name = "mqar") {
  SyntheticRun run;
  run.name = run.task = name;
  run.training_task = name == "mqar" ? make_task(name, {{"vocab", 16}, {"length", 16}, {"pairs", 2}})
                                     : make_task(name, {{"length", 16}});
  auto longer = run.training_task.parameters;
  longer["length"] *= 2;
  run.test_tasks = {run.training_task, make_task(name, longer)};
  run.test_examples = 40;
  run.model = small_model(run.training_task);
  run.training = {.steps = 30, .batch_size = 160, .lr = 1e-2};  // in two parts
  run.evaluate_every = 10;
  return run;
}

json without_times(json entry) {
  entry.erase("train_seconds");
  entry.erase("sequences_per_second");
  return entry;
}

TEST(SyntheticRun, LearnsAndWritesWhatItSaw) {
  const test::TempFolder folder;
  auto run = small_run();
  run.training.steps = 300;
  run.evaluate_every = 100;
  ThreadPool pool(2);
  const auto entry = run_in_folder(folder.path() / "run", run, pool, {});
  ASSERT_TRUE(entry.has_value());
  EXPECT_EQ(entry->at("steps"), 300);
  EXPECT_EQ(entry->at("diverged"), false);
  ASSERT_EQ(entry->at("tests").size(), 2U);
  EXPECT_EQ(entry->at("tests")[1].at("length"), 32);
  ASSERT_EQ(entry->at("curve").size(), 3U);
  EXPECT_LT(entry->at("curve")[2].at("loss"), 0.8 * entry->at("curve")[0].at("loss").get<double>());
  EXPECT_GT(entry->at("tests")[0].at("accuracy"), 0.3);  // one of seven values is chance
  EXPECT_EQ(io::read_json(folder.path() / "run/result.json"), json(*entry));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "run/checkpoints"));
}

TEST(SyntheticRun, GoesOnToTheSameBitsForAnyThreads) {
  const test::TempFolder folder;
  for (const bool epochs : {false, true}) {
    auto run = small_run();
    if (epochs) run.training.examples = 400;  // the last of three batches is smaller
    ThreadPool one(1), three(3);
    const auto name = epochs ? "epochs" : "fresh";
    const auto whole = run_in_folder(folder.path() / name, run, three, {});
    ASSERT_TRUE(whole.has_value());
    const auto broken = folder.path() / (std::string(name) + "-broken");
    for (const int stop_after : {7, 13, 1000}) {
      SyntheticEvents events;
      int steps = 0;
      events.stop = [&] { return steps >= stop_after; };
      events.step = [&](const SyntheticRun&, const StepResult&) { ++steps; };
      const auto entry = run_in_folder(broken, run, one, events);
      EXPECT_EQ(entry.has_value(), stop_after == 1000);
      if (entry) {
        EXPECT_EQ(without_times(*entry), without_times(*whole));
      }
    }
    run.training.lr = 2e-2;
    EXPECT_EQ(without_times(*run_in_folder(broken, run, one, {})), without_times(*whole)) << "a result is kept";
  }
}

TEST(SyntheticRun, TrainsOnExamplesOfSeveralLengthsToTheSameBitsForAnyThreads) {
  const test::TempFolder folder;
  auto run = small_run();
  run.training_task = make_task("mqar-set", {{"vocab", 64}, {"length", 64}});
  run.model.vocab = run.training_task.vocab;
  run.test_tasks = {make_task("mqar", {{"vocab", 64}, {"length", 16}, {"pairs", 1}}),
                    make_task("mqar", {{"vocab", 64}, {"length", 16}, {"pairs", 2}})};
  ThreadPool one(1), three(3);
  const auto first = run_in_folder(folder.path() / "one", run, one, {});
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(without_times(*first), without_times(*run_in_folder(folder.path() / "three", run, three, {})));
  EXPECT_EQ(first->at("tests")[1].at("pairs"), 2);
  EXPECT_LT(first->at("curve").back().at("loss"), first->at("curve")[0].at("loss").get<double>());
}

TEST(SyntheticRun, EndsWhenItIsGoodEnough) {
  const test::TempFolder folder;
  auto run = small_run();
  run.enough = 0.0;
  ThreadPool pool(1);
  const auto entry = run_in_folder(folder.path() / "run", run, pool, {});
  EXPECT_EQ(entry->at("steps"), 10);
  EXPECT_EQ(entry->at("curve").size(), 1U);
}

TEST(SyntheticPlan, HasThePapersSettingsAtTheirScale) {
  const auto runs = plan_synthetic({Study::mad, Scale::paper, {"efla"}, {}, {}});
  EXPECT_EQ(runs.size(), 66U * 6U);
  std::set<std::string> names;
  for (const auto& run : runs) names.insert(run.name);
  EXPECT_EQ(names.size(), runs.size());
  const auto& first = runs.front();
  EXPECT_EQ(first.task, "compression");
  EXPECT_TRUE(first.model.reconstructs);
  EXPECT_EQ(first.model.inner(), 352);
  EXPECT_EQ(first.training.steps, 200 * 100);
  EXPECT_EQ(first.enough, 0.999);

  const auto recall = plan_synthetic({Study::mqar, Scale::paper, {"efla"}, {}, {}});
  EXPECT_EQ(recall.size(), 3U * 4U);
  EXPECT_EQ(recall.back().model.hidden, 256);
  EXPECT_EQ(recall.back().training.steps, 32 * ((180000 + 255) / 256));
  std::vector<std::pair<int, int>> sizes;
  for (const auto& test : recall.front().test_tasks) {
    sizes.emplace_back(test.length, static_cast<int>(test.parameters.at("pairs")));
  }
  EXPECT_EQ(sizes, (std::vector<std::pair<int, int>>{
                       {64, 4}, {64, 8}, {64, 16}, {128, 32}, {256, 64}, {512, 128}, {1024, 256}}));

  const auto longer = plan_synthetic({Study::extrapolation, Scale::paper, {}, {}, {}});
  EXPECT_EQ(longer.size(), 27U);
  for (const auto& run : longer) {
    ASSERT_EQ(run.test_tasks.size(), 3U);
    for (const std::int64_t i : {0, 1, 2}) EXPECT_EQ(run.test_tasks[i].length, 1024 << i);
    EXPECT_EQ(run.training.steps, 30000);
  }
}

TEST(SyntheticPlan, EveryScaleOfEveryStudyIsWhole) {
  for (const Study study : {Study::mad, Study::mqar, Study::extrapolation, Study::state_tracking}) {
    for (const Scale scale : {Scale::tiny, Scale::small, Scale::paper}) {
      EXPECT_FALSE(plan_synthetic({study, scale, {}, {}, {}}).empty());
      EXPECT_EQ(scale_from_name(scale_name(scale)), scale);
    }
  }
  expect_error([] { plan_synthetic({Study::mad, Scale::tiny, {"elfa"}, {}, {}}); }, "name", "nearest: efla");
  expect_error([] { plan_synthetic({Study::mad, Scale::tiny, {}, {1, 1}, {}}); }, "--seeds", "1 twice");
  expect_error([] { plan_synthetic({Study::mad, Scale::tiny, {}, {}, {2.0}}); }, "lr", "at most 1");
  expect_error([] { scale_from_name("huge"); }, "--scale", "tiny, small or paper");
}

ordered_json entry_of(const std::string& setting, double lr, int seed, std::vector<double> accuracy) {
  ordered_json entry{{"task", "stack"}, {"setting", setting},  {"mixer", "kda"},
                     {"lr", lr},        {"weight_decay", 0.1}, {"seed", seed}};
  entry["diverged"] = accuracy.empty();
  entry["tests"] = ordered_json::array();
  std::int64_t length = 64;
  for (const double a : accuracy) {
    entry["tests"].push_back({{"length", length}, {"accuracy", a}});
    length *= 2;
  }
  return entry;
}

TEST(SyntheticScores, OfTheStandardSetCountAllItsSizes) {
  // Worse on the first test, better on the five that decide; the last two, which are longer than any example, do not.
  const std::vector<ordered_json> runs{entry_of("", 0.1, 1, {1.0, 0.5, 0.5, 0.5, 0.5, 0.9, 0.9}),
                                       entry_of("", 0.2, 1, {0.9, 0.7, 0.7, 0.7, 0.7, 0.1, 0.1})};
  const auto scores = summarize_synthetic({Study::mqar, Scale::paper, {}, {}, {}}, runs);
  ASSERT_EQ(scores.size(), 1U);
  EXPECT_EQ(scores[0].at("lr"), 0.2);
}

TEST(SyntheticScores, TakeTheBestOfEachSettingOverSeeds) {
  const SyntheticStudyOptions options{Study::extrapolation, Scale::paper, {}, {}, {}};
  // The second learning rate is better at the training length, though not at twice the length.
  const std::vector<ordered_json> runs{entry_of("", 0.1, 1, {0.5, 0.9}), entry_of("", 0.1, 2, {0.6, 0.9}),
                                       entry_of("", 0.2, 1, {0.7, 0.4}), entry_of("", 0.2, 2, {0.5, 0.2})};
  const auto scores = summarize_synthetic(options, runs);
  ASSERT_EQ(scores.size(), 1U);
  EXPECT_EQ(scores[0].at("lr"), 0.2);
  EXPECT_EQ(scores[0].at("runs"), 4);
  const auto& points = scores[0].at("accuracy");
  ASSERT_EQ(points.size(), 2U);
  EXPECT_DOUBLE_EQ(points[0].at("mean"), 0.6);
  EXPECT_NEAR(points[0].at("std"), std::sqrt(0.02), 1e-12);
  EXPECT_DOUBLE_EQ(points[1].at("mean"), 0.3);
  EXPECT_EQ(points[1].at("length"), 128);
  EXPECT_DOUBLE_EQ(points[0].at("paper"), 0.9897);
  EXPECT_DOUBLE_EQ(points[1].at("paper_std"), 0.0079);
}

TEST(SyntheticScores, AverageSettingsAndCountDivergences) {
  const SyntheticStudyOptions options{Study::state_tracking, Scale::paper, {}, {}, {}};
  const std::vector<ordered_json> runs{entry_of("", 0.1, 1, {0.8}), entry_of("", 0.2, 1, {}),
                                       entry_of("vocab 32", 0.1, 1, {}), entry_of("vocab 32", 0.2, 1, {0.4})};
  const auto score = summarize_synthetic(options, runs)[0];
  EXPECT_EQ(score.at("settings"), 2);
  EXPECT_EQ(score.at("diverged"), 2);
  EXPECT_TRUE(score.at("lr").is_null());
  EXPECT_DOUBLE_EQ(score.at("accuracy")[0].at("mean"), 0.6);
  EXPECT_TRUE(score.at("accuracy")[0].at("std").is_null());
  EXPECT_TRUE(score.at("accuracy")[0].at("paper").is_null());

  const auto none = summarize_synthetic(options, {entry_of("", 0.1, 1, {}), entry_of("", 0.1, 2, {})})[0];
  EXPECT_EQ(none.at("diverged"), 2);
  EXPECT_TRUE(none.at("accuracy").empty());
  const auto half = summarize_synthetic(options, {entry_of("", 0.1, 1, {}), entry_of("", 0.1, 2, {0.5})})[0];
  EXPECT_DOUBLE_EQ(half.at("accuracy")[0].at("mean"), 0.5);
}

TEST(SyntheticStudy, EigenvaluesAreThoseOfTheStepSizes) {
  const auto curves = eigenvalues({"deltanet", "deltanet-neg", "deltanet-neg-fla", "trapezoid", "efla", "kda"});
  const auto last = [&](const char* mixer) { return curves.at(mixer).back(); };
  EXPECT_EQ(last("deltanet"), ordered_json::array({1.0, 0.0}));
  EXPECT_EQ(last("deltanet-neg"), ordered_json::array({1.0, -1.0}));
  EXPECT_EQ(last("deltanet-neg-fla"), ordered_json::array({1.0, -1.0}));
  EXPECT_NEAR(last("trapezoid")[1], (1.0 - 3.0) / (1.0 + 3.0), 1e-12);
  EXPECT_NEAR(last("efla")[1], std::exp(-6.0), 1e-12);
  EXPECT_FALSE(curves.contains("kda"));
}

}  // namespace
}  // namespace efla::train
