// The studies of synthetic tasks: runs that an interruption does not change, plans and scores.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "efla/io/json.h"
#include "experiments/plans.h"
#include "experiments/synthetic/plan.h"
#include "experiments/synthetic/scores.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::experiments {
namespace {

using data::synthetic::make_task;
using nlohmann::json;
using nlohmann::ordered_json;
using test::expect_error;

struct Events {
  std::function<bool()> stop = [] { return false; };
  std::function<void()> step = [] {};
};

// Executes one run as a study does.
std::optional<ordered_json> run_in_folder(const std::filesystem::path& folder, const SyntheticRun& run,
                                          ThreadPool& pool, const Events& events) {
  std::filesystem::create_directories(folder);
  return execute(run, folder, {pool, {}, events.stop, [&](double, const std::string&) { events.step(); }});
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
  run.model = {.vocab = run.training_task.vocab, .hidden = 16, .layers = 1, .heads = 2};
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
      int steps = 0;
      const Events events{[&] { return steps >= stop_after; }, [&] { ++steps; }};
      const auto entry = run_in_folder(broken, run, one, events);
      EXPECT_EQ(entry.has_value(), stop_after == 1000);
      if (entry) {
        EXPECT_EQ(without_times(*entry), without_times(*whole));
      }
    }
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

using PlanText = std::string_view (*)();

std::vector<SyntheticRun> runs_of(PlanText text, const std::string& scale, const json& given = json::object()) {
  return plan_runs(Plan(text(), "study", scale, given).settings());
}

TEST(SyntheticPlan, HasThePapersSettingsAtTheirScale) {
  const json efla{{"mixers", {"efla"}}};
  const auto runs = runs_of(mad_plan, "paper", efla);
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

  const auto recall = runs_of(mqar_plan, "paper", efla);
  EXPECT_EQ(recall.size(), 3U * 4U);
  EXPECT_EQ(recall.back().model.hidden, 256);
  EXPECT_EQ(recall.back().training.steps, 32 * ((180000 + 255) / 256));
  std::vector<std::pair<int, int>> sizes;
  for (const auto& test : recall.front().test_tasks) {
    sizes.emplace_back(test.length, static_cast<int>(test.parameters.at("pairs")));
  }
  EXPECT_EQ(sizes, (std::vector<std::pair<int, int>>{
                       {64, 4}, {64, 8}, {64, 16}, {128, 32}, {256, 64}, {512, 128}, {1024, 256}}));

  const auto longer = runs_of(extrapolation_plan, "paper");
  EXPECT_EQ(longer.size(), 27U);
  for (const auto& run : longer) {
    ASSERT_EQ(run.test_tasks.size(), 3U);
    for (const std::int64_t i : {0, 1, 2}) EXPECT_EQ(run.test_tasks[i].length, 1024 << i);
    EXPECT_EQ(run.training.steps, 30000);
  }
}

TEST(SyntheticPlan, NamedTasksAlone) {
  const auto runs = runs_of(mad_plan, "tiny", {{"tasks", {"memorisation", "compression"}}});
  ASSERT_EQ(runs.size(), 4U);
  EXPECT_EQ(runs.front().task, "compression");
  EXPECT_EQ(runs.back().task, "memorisation");
  EXPECT_EQ(runs_of(state_tracking_plan, "tiny", {{"tasks", {"parity"}}}).back().task, "parity");
}

TEST(SyntheticPlan, MixersMayNameTheirStepsPerToken) {
  const json given{{"mixers", {"deltaproduct-neg:3", "deltanet"}}, {"tasks", {"s5"}}};
  const auto runs = runs_of(state_tracking_plan, "tiny", given);
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_EQ(runs[0].mixer, "deltaproduct-neg:3");
  EXPECT_EQ(runs[0].model.mixer, "deltaproduct-neg");
  EXPECT_EQ(runs[0].model.steps_per_token, 3);
  EXPECT_EQ(runs[1].model.steps_per_token, 0);
  EXPECT_NE(runs[0].name, runs[1].name);
  for (const char* wrong : {"deltaproduct-neg:", "deltaproduct-neg:0", "deltaproduct-neg:2x"}) {
    test::expect_error([&] { runs_of(state_tracking_plan, "tiny", {{"mixers", {wrong}}}); }, "mixers", wrong);
  }
  test::expect_error([] { runs_of(state_tracking_plan, "tiny", {{"mixers", {"gdn:2"}}}); }, "steps_per_token", "2");
}

TEST(SyntheticPlan, EveryScaleOfEveryStudyIsWhole) {
  for (const PlanText text : {mad_plan, mqar_plan, extrapolation_plan, state_tracking_plan}) {
    for (const char* scale : {"tiny", "small", "paper"}) {
      const auto runs = runs_of(text, scale);
      EXPECT_FALSE(runs.empty());
      // --tasks separates names by commas.
      for (const auto& run : runs) EXPECT_EQ(run.task.find(','), std::string::npos) << run.task;
    }
  }
  expect_error([] { runs_of(mad_plan, "tiny", {{"mixers", {"elfa"}}}); }, "mixer", "nearest: efla");
  expect_error([] { runs_of(mad_plan, "tiny", {{"seeds", {1, 1}}}); }, "seeds", "1 twice");
  expect_error([] { runs_of(mad_plan, "tiny", {{"lr", {2.0}}}); }, "lr", "at most 1");
  expect_error(
      [] {
        runs_of(mad_plan, "tiny", {{"tasks", {"compression", "recall"}}});
      },
      "tasks", "one of compression, fuzzy-recall");
  expect_error([] { runs_of(mad_plan, "tiny", {{"tasks", json::array()}}); }, "tasks", "at least one");
  expect_error([] { runs_of(mad_plan, "huge"); }, "scale", "one of paper, small, tiny");
}

json settings_of(PlanText text) { return Plan(text(), "study", "paper", {}).settings(); }

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
  const auto scores = score_runs(settings_of(mqar_plan), runs);
  ASSERT_EQ(scores.size(), 1U);
  EXPECT_EQ(scores[0].at("lr"), 0.2);
}

TEST(SyntheticScores, TakeTheBestOfEachSettingOverSeeds) {
  // The second learning rate is better at the training length, though not at twice the length.
  const std::vector<ordered_json> runs{entry_of("", 0.1, 1, {0.5, 0.9}), entry_of("", 0.1, 2, {0.6, 0.9}),
                                       entry_of("", 0.2, 1, {0.7, 0.4}), entry_of("", 0.2, 2, {0.5, 0.2})};
  const auto scores = score_runs(settings_of(extrapolation_plan), runs);
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
  const json settings = settings_of(state_tracking_plan);
  const std::vector<ordered_json> runs{entry_of("", 0.1, 1, {0.8}), entry_of("", 0.2, 1, {}),
                                       entry_of("vocab 32", 0.1, 1, {}), entry_of("vocab 32", 0.2, 1, {0.4})};
  const auto score = score_runs(settings, runs)[0];
  EXPECT_EQ(score.at("settings"), 2);
  EXPECT_EQ(score.at("diverged"), 2);
  EXPECT_TRUE(score.at("lr").is_null());
  EXPECT_DOUBLE_EQ(score.at("accuracy")[0].at("mean"), 0.6);
  EXPECT_TRUE(score.at("accuracy")[0].at("std").is_null());
  EXPECT_TRUE(score.at("accuracy")[0].at("paper").is_null());

  const auto none = score_runs(settings, {entry_of("", 0.1, 1, {}), entry_of("", 0.1, 2, {})})[0];
  EXPECT_EQ(none.at("diverged"), 2);
  EXPECT_EQ(none.at("seeds"), 0);
  EXPECT_TRUE(none.at("accuracy").empty());
  const auto half = score_runs(settings, {entry_of("", 0.1, 1, {}), entry_of("", 0.1, 2, {0.5})})[0];
  EXPECT_DOUBLE_EQ(half.at("accuracy")[0].at("mean"), 0.5);
  EXPECT_EQ(half.at("seeds"), 1);
}

TEST(SyntheticScores, HaveThePapersFiguresBesideAMixerThatAlwaysDiverged) {
  auto other = entry_of("", 0.1, 1, {0.5, 0.9});
  other["mixer"] = "efla";
  const auto scores = score_runs(settings_of(extrapolation_plan), {entry_of("", 0.1, 1, {}), other});
  const auto& points = scores[0].at("accuracy");
  ASSERT_EQ(points.size(), 2U);
  EXPECT_TRUE(points[0].at("mean").is_null());
  EXPECT_DOUBLE_EQ(points[0].at("paper"), 0.9897);
  EXPECT_EQ(points[1].at("length"), 128);
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
}  // namespace efla::experiments
