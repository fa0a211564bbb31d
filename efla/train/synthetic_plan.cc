// Which runs each study has.
#include <algorithm>
#include <cstdio>

#include "efla/base/error.h"
#include "efla/train/distinct.h"
#include "efla/train/synthetic_study.h"

namespace efla::train {
namespace {

using data::synthetic::make_task;
using data::synthetic::Parameters;

// One setting of a task: what differs from the task's baseline.
struct Setting {
  std::string label;
  Parameters parameters;
  std::int64_t examples = 0;  // of the training set; 0: the baseline's
};

struct TaskPlan {
  std::string name;
  Parameters parameters;
  std::int64_t examples;          // of the training set; 0: new ones in every step
  std::int64_t epochs_or_steps;   // epochs where there is a training set
  std::vector<Setting> settings;  // the baseline first
  std::string title = {};         // in the study's table; none: the task's name
  std::int64_t hidden = 0;        // 0: the study's
};

struct StudyPlan {
  std::vector<TaskPlan> tasks;
  std::vector<std::int64_t> times;     // lengths of the tests, as multiples of the training length
  std::vector<Parameters> mqar_tests;  // of mqar, in place of the training task at other lengths
  nn::SequenceModelConfig model;
  SyntheticTraining training;
  std::vector<double> lrs, weight_decays;
  std::vector<std::uint64_t> seeds;
  std::int64_t test_examples = 1000;
  std::int64_t evaluations = 10;  // while training without epochs; with epochs one after each
  std::optional<double> enough;
};

std::string shortest(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

void vary(TaskPlan& task, const char* parameter, const std::vector<double>& values) {
  for (const double value : values) {
    task.settings.push_back({std::string(parameter) + " " + shortest(value), {{parameter, value}}, 0});
  }
}

void vary_examples(TaskPlan& task) {
  for (const std::int64_t n : {6400, 3200, 1600, 800}) {
    task.settings.push_back({"examples " + std::to_string(n), {}, n});
  }
}

// MAD's 66 settings at the papers' scale, the six baselines at the others.
std::vector<TaskPlan> mad_tasks(Scale scale) {
  const bool all = scale == Scale::paper;
  const std::int64_t n = scale == Scale::tiny ? 256 : scale == Scale::small ? 3200 : 12800;
  const std::int64_t epochs = scale == Scale::tiny ? 2 : scale == Scale::small ? 10 : 200;
  // Memorisation has 256 examples, of 16 pairs each, whatever the scale: more epochs are as many steps.
  const std::int64_t memorisation_epochs = scale == Scale::small ? 100 : epochs;
  std::vector<TaskPlan> tasks{
      {"compression", {}, n, epochs, {{}}},       {"fuzzy-recall", {}, n, epochs, {{}}},
      {"in-context-recall", {}, n, epochs, {{}}}, {"memorisation", {}, 256, memorisation_epochs, {{}}},
      {"noisy-recall", {}, n, epochs, {{}}},      {"selective-copying", {}, n, epochs, {{}}}};
  for (auto& task : tasks) {
    if (!all) continue;
    if (task.name == "memorisation") {
      vary(task, "vocab", {512, 1024, 2048, 4096, 8192});
      continue;
    }
    const bool noisy = task.name == "noisy-recall", copying = task.name == "selective-copying";
    vary(task, "vocab", noisy ? std::vector<double>{48, 80, 144} : std::vector<double>{32, 64, 128});
    if (task.name == "compression") {
      vary(task, "length", {64, 128, 256});
    } else {
      vary(task, "length", copying ? std::vector<double>{512, 1024} : std::vector<double>{256, 512, 1024});
    }
    vary_examples(task);
    if (noisy) vary(task, "noise", {0.4, 0.6, 0.8});
    if (copying) vary(task, "copied", {32, 64, 96});
  }
  return tasks;
}

StudyPlan mad(Scale scale) {
  StudyPlan plan;
  plan.tasks = mad_tasks(scale);
  plan.times = {1};
  plan.model = {.hidden = 128, .layers = 2, .heads = 4};
  plan.training = {.batch_size = 128, .lr_floor = 1e-6, .clip = 0.0};
  plan.lrs = {1e-4, 5e-4, 1e-3};
  plan.weight_decays = {0.0, 0.1};
  plan.seeds = {12345};
  plan.test_examples = 1280;
  plan.enough = 0.999;
  if (scale == Scale::paper) return plan;
  plan.model.hidden = scale == Scale::small ? 64 : 32;
  plan.training.batch_size = 32;
  plan.test_examples = scale == Scale::small ? 320 : 64;
  plan.lrs = {scale == Scale::small ? 2e-3 : 1e-3};
  plan.weight_decays = {0.1};
  return plan;
}

StudyPlan extrapolation(Scale scale) {
  StudyPlan plan;
  plan.times = {1, 2, 4};
  plan.training = {.batch_size = 64};
  plan.weight_decays = {0.01};
  const auto set = [&](double length, std::int64_t steps, double symbols, double vocab, double pairs, double stacks) {
    plan.tasks = {{"palindrome", {{"symbols", symbols}, {"length", length}}, 0, steps, {{}}},
                  {"mqar", {{"vocab", vocab}, {"length", length}, {"pairs", pairs}}, 0, steps, {{}}},
                  {"stack", {{"vocab", 2 + stacks + symbols}, {"length", length}, {"stacks", stacks}}, 0, steps, {{}}}};
  };
  if (scale == Scale::paper) {
    set(1024, 30000, 64, 8192, 64, 64);
    plan.model = {.hidden = 256, .layers = 2, .heads = 2, .head_dim = 128};
    plan.lrs = {1e-3};
    plan.seeds = {42, 123, 456};
    return plan;
  }
  const bool small = scale == Scale::small;
  set(small ? 64 : 32, small ? 400 : 40, 16, 64, small ? 8 : 4, 8);
  plan.model = {.hidden = small ? 64 : 32, .layers = 2, .heads = 2};
  plan.lrs = {3e-3};
  plan.seeds = small ? std::vector<std::uint64_t>{42, 123, 456} : std::vector<std::uint64_t>{42};
  plan.test_examples = small ? 512 : 64;
  plan.evaluations = small ? 10 : 2;
  return plan;
}

// The standard set of Arora et al. at the papers' scale; a quarter of its lengths at the others. A mixer's head has 64
// dimensions, or the model's width.
StudyPlan mqar_study(Scale scale) {
  StudyPlan plan;
  const bool paper = scale == Scale::paper, small = scale == Scale::small;
  const double longest = paper ? 256 : 64, vocab = paper ? 8192 : 256;
  const std::int64_t examples = paper ? 180000 : small ? 7200 : 256, epochs = paper ? 32 : small ? 8 : 2;
  const std::vector<std::int64_t> widths =
      paper ? std::vector<std::int64_t>{64, 128, 256} : std::vector<std::int64_t>{small ? 64 : 16};
  for (const auto width : widths) {
    plan.tasks.push_back({"mqar-set",
                          {{"vocab", vocab}, {"length", longest}},
                          examples,
                          epochs,
                          {{}},
                          "mqar, width " + std::to_string(width),
                          width});
  }
  const double shortest = longest / 4;
  for (const auto& [length, pairs] :
       {std::pair{1.0, 16.0}, {1.0, 8.0}, {1.0, 4.0}, {2.0, 4.0}, {4.0, 4.0}, {8.0, 4.0}, {16.0, 4.0}}) {
    plan.mqar_tests.push_back({{"vocab", vocab}, {"length", length * shortest}, {"pairs", length * shortest / pairs}});
  }
  plan.model = {.layers = 2};
  plan.training = {.batch_size = paper ? 256 : 64};
  plan.lrs = paper   ? std::vector<double>{1e-3, 3.1623e-3, 1e-2, 3.1623e-2}
             : small ? std::vector<double>{3e-3, 1e-2}
                     : std::vector<double>{1e-2};
  plan.weight_decays = {0.1};
  plan.seeds = {123};
  plan.test_examples = paper ? 1000 : small ? 500 : 32;
  return plan;
}

StudyPlan state_tracking(Scale scale) {
  StudyPlan plan;
  const std::int64_t steps = scale == Scale::tiny ? 60 : scale == Scale::small ? 600 : 20000;
  const double length = scale == Scale::tiny ? 16 : 32;
  for (const char* task : {"parity", "modular-counting", "s3", "s5"}) {
    plan.tasks.push_back({task, {{"length", length}}, 0, steps, {{}}});
  }
  plan.times = {1, 2, 4, 8};
  plan.training = {.batch_size = 64};
  plan.model = {.hidden = 128, .layers = 2, .heads = 4};
  plan.lrs = {1e-2, 3e-3, 1e-3};
  plan.weight_decays = {0.01};
  plan.seeds = {1, 2, 3};
  plan.test_examples = 512;
  if (scale == Scale::paper) {
    plan.training.batch_size = 256;
    return plan;
  }
  plan.model.hidden = 32;
  plan.lrs = {1e-2, 3e-3};
  if (scale == Scale::small) return plan;
  plan.model = {.hidden = 16, .layers = 1, .heads = 1};
  plan.lrs = {1e-2};
  plan.seeds = {1};
  plan.test_examples = 64;
  plan.evaluations = 2;
  return plan;
}

StudyPlan plan_of(Study study, Scale scale) {
  switch (study) {
    case Study::mad:
      return mad(scale);
    case Study::mqar:
      return mqar_study(scale);
    case Study::extrapolation:
      return extrapolation(scale);
    case Study::state_tracking:
      return state_tracking(scale);
  }
  return {};
}

std::vector<std::string> compared_mixers(Study study) {
  switch (study) {
    case Study::mad:
    case Study::mqar:
      return {"efla", "deltanet"};
    case Study::extrapolation:
      return {"kda", "kda-exact", "kda-exact-nol2"};
    case Study::state_tracking:
      return {"deltanet", "deltanet-neg", "deltanet-neg-fla", "trapezoid", "efla"};
  }
  return {};
}

// Apart from mixer, learning rate, weight decay and seed.
SyntheticRun run_of(const StudyPlan& plan, const TaskPlan& task, const Setting& setting) {
  SyntheticRun run;
  run.task = task.title.empty() ? task.name : task.title;
  run.setting = setting.label;
  Parameters parameters = task.parameters;
  for (const auto& [name, value] : setting.parameters) parameters[name] = value;
  run.training_task = make_task(task.name, parameters);
  for (const auto times : plan.times) {
    Parameters longer = run.training_task.parameters;
    longer["length"] *= static_cast<double>(times);
    run.test_tasks.push_back(make_task(task.name, longer));
  }
  for (const auto& test : plan.mqar_tests) run.test_tasks.push_back(make_task("mqar", test));
  run.test_examples = plan.test_examples;
  run.enough = plan.enough;
  run.model = plan.model;
  if (task.hidden > 0) {
    run.model.hidden = task.hidden;
    run.model.heads = std::max<std::int64_t>(task.hidden / 64, 1);
  }
  run.model.vocab = run.training_task.vocab;
  run.model.reconstructs = run.training_task.reconstructs;
  run.training = plan.training;
  run.training.examples = setting.examples > 0 ? setting.examples : task.examples;
  const std::int64_t epoch = run.training.steps_per_epoch();
  run.training.steps = task.epochs_or_steps * std::max<std::int64_t>(epoch, 1);
  run.evaluate_every = epoch > 0 ? epoch : std::max<std::int64_t>(run.training.steps / plan.evaluations, 1);
  return run;
}

std::string name_of(const SyntheticRun& run) {
  std::string setting = run.setting;
  std::replace(setting.begin(), setting.end(), ' ', '-');
  std::string task = run.task;
  std::erase(task, ',');
  std::replace(task.begin(), task.end(), ' ', '-');
  return task + (setting.empty() ? "" : "-" + setting) + "-" + run.model.mixer + "-lr" + shortest(run.training.lr) +
         "-wd" + shortest(run.training.weight_decay) + "-seed" + std::to_string(run.training.seed);
}

}  // namespace

std::string_view study_name(Study study) {
  switch (study) {
    case Study::mad:
      return "mad";
    case Study::mqar:
      return "mqar";
    case Study::extrapolation:
      return "extrapolation";
    case Study::state_tracking:
      return "state-tracking";
  }
  return {};
}

std::string_view scale_name(Scale scale) {
  return scale == Scale::tiny ? "tiny" : scale == Scale::small ? "small" : "paper";
}

Scale scale_from_name(std::string_view name) {
  for (const Scale scale : {Scale::tiny, Scale::small, Scale::paper}) {
    if (name == scale_name(scale)) return scale;
  }
  throw Error("reproduce", "--scale", std::string("'").append(name).append("'"), "tiny, small or paper");
}

SyntheticStudyOptions completed(SyntheticStudyOptions options) {
  const StudyPlan plan = plan_of(options.study, options.scale);
  if (options.mixers.empty()) options.mixers = compared_mixers(options.study);
  if (options.seeds.empty()) options.seeds = plan.seeds;
  if (options.lrs.empty()) options.lrs = plan.lrs;
  require_distinct("--mixers", options.mixers);
  require_distinct("--seeds", options.seeds);
  require_distinct("--lr", options.lrs);
  return options;
}

std::vector<SyntheticRun> plan_synthetic(const SyntheticStudyOptions& given) {
  const auto options = completed(given);
  const StudyPlan plan = plan_of(options.study, options.scale);
  std::vector<SyntheticRun> runs;
  for (const auto seed : options.seeds) {
    for (const auto& task : plan.tasks) {
      for (const auto& setting : task.settings) {
        const SyntheticRun common = run_of(plan, task, setting);
        for (const auto& mixer : options.mixers) {
          for (const double lr : options.lrs) {
            for (const double weight_decay : plan.weight_decays) {
              SyntheticRun run = common;
              run.model.mixer = mixer;
              run.training.lr = lr;
              run.training.weight_decay = weight_decay;
              run.training.seed = seed;
              run.name = name_of(run);
              nn::validate(run.model);
              validate(run.training);
              runs.push_back(std::move(run));
            }
          }
        }
      }
    }
  }
  return runs;
}

}  // namespace efla::train
