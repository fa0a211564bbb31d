#include "experiments/synthetic/plan.h"

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "efla/base/error.h"
#include "efla/io/checkpoint_folder.h"
#include "efla/io/fields.h"
#include "efla/report/html.h"
#include "experiments/synthetic/report.h"

namespace efla::experiments {
namespace {

using data::synthetic::make_task;
using data::synthetic::Parameters;
using nlohmann::json;

// One setting of a task: what differs from the task's baseline.
struct Setting {
  std::string label;
  Parameters parameters;
  std::int64_t examples;  // of the training set
};

std::vector<Setting> settings_of(const json& task) {
  const std::int64_t examples = task.value("examples", std::int64_t{0});
  std::vector<Setting> settings{{"", {}, examples}};
  for (const json& varied : task.value("vary", json::array())) {
    for (const auto& [parameter, values] : varied.items()) {
      for (const double value : values) {
        auto& setting = settings.emplace_back(Setting{parameter + " " + report::compact(value), {}, examples});
        if (parameter == "examples") {
          setting.examples = static_cast<std::int64_t>(value);
        } else {
          setting.parameters[parameter] = value;
        }
      }
    }
  }
  return settings;
}

Parameters parameters_of(const json& table) {
  Parameters parameters;
  for (const auto& [name, value] : table.items()) parameters[name] = value.get<double>();
  return parameters;
}

// Returns a run without its mixer, learning rate, weight decay and seed.
SyntheticRun run_of(const json& plan, const json& task, const Setting& setting) {
  const std::string name = task.at("name");
  SyntheticRun run;
  run.task = task.value("title", name);
  run.setting = setting.label;
  Parameters parameters = parameters_of(task.value("parameters", json::object()));
  for (const auto& [parameter, value] : setting.parameters) parameters[parameter] = value;
  run.training_task = make_task(name, parameters);
  for (const double times : plan.value("times", json::array())) {
    Parameters longer = run.training_task.parameters;
    longer["length"] *= times;
    run.test_tasks.push_back(make_task(name, longer));
  }
  for (const json& test : plan.value("tests", json::array())) {
    run.test_tasks.push_back(make_task(plan.at("test").get<std::string>(), parameters_of(test)));
  }
  run.test_examples = plan.value("test_examples", run.test_examples);
  if (plan.contains("enough")) run.enough = plan.at("enough").get<double>();

  const json& model = plan.at("model");
  run.model.hidden = task.value("hidden", model.value("hidden", run.model.hidden));
  run.model.layers = model.value("layers", run.model.layers);
  run.model.heads = task.contains("hidden") ? std::max<std::int64_t>(run.model.hidden / 64, 1)
                                            : model.value("heads", run.model.heads);
  run.model.head_dim = model.value("head_dim", run.model.head_dim);
  run.model.vocab = run.training_task.vocab;
  run.model.reconstructs = run.training_task.reconstructs;

  run.precision = plan.value("precision", run.precision);
  const json& training = plan.at("training");
  run.training.batch_size = training.value("batch_size", run.training.batch_size);
  run.training.lr_floor = training.value("lr_floor", run.training.lr_floor);
  run.training.clip = training.value("clip", run.training.clip);
  run.training.examples = setting.examples;
  const std::int64_t epoch = run.training.steps_per_epoch();
  if (epoch > 0) {
    run.training.steps = task.at("epochs").get<std::int64_t>() * epoch;
    run.evaluate_every = epoch;
  } else {
    run.training.steps = task.at("steps");
    run.evaluate_every = std::max<std::int64_t>(run.training.steps / plan.value("evaluations", 10), 1);
  }
  return run;
}

// Sets the mixer of a run from NAME or NAME:N.
void set_mixer(const std::string& label, SyntheticRun& run) {
  run.mixer = label;
  const auto colon = label.find(':');
  run.model.mixer = label.substr(0, colon);
  if (colon == std::string::npos) return;
  const std::string steps = label.substr(colon + 1);
  const auto* end = steps.data() + steps.size();
  if (const auto [stop, error] = std::from_chars(steps.data(), end, run.model.steps_per_token);
      error != std::errc() || stop != end || run.model.steps_per_token < 1) {
    throw Error("synthetic study", "mixers", "'" + label + "'", "the name of a mixer, or NAME:N for N steps per token");
  }
}

std::string name_of(const SyntheticRun& run) {
  const auto setting = word_of(run.setting);
  return word_of(run.task) + (setting.empty() ? "" : "-" + setting) + "-" + run.mixer + "-lr" +
         report::compact(run.training.lr) + "-wd" + report::compact(run.training.weight_decay) + "-seed" +
         std::to_string(run.training.seed);
}

void check_task_entry(const io::Fields& entry) {
  for (const char* name : {"task", "setting", "mixer"}) entry.get<std::string>(name);
  for (const char* name : {"lr", "weight_decay"}) entry.get<double>(name);
  entry.get<std::uint64_t>("seed");
  const auto tests = entry.objects("tests");
  if (!entry.get<bool>("diverged") && tests.empty())
    entry.refuse("tests", "at least one, of a run that did not diverge");
  for (const auto& test : tests) {
    test.get<std::int64_t>("length");
    test.get<double>("accuracy");
  }
  for (const auto& point : entry.objects("curve")) point.get<std::int64_t>("step");
}

}  // namespace

std::string word_of(std::string name) {
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::vector<SyntheticRun> plan_runs(const json& settings) {
  std::vector<SyntheticRun> runs;
  const auto add = [&](SyntheticRun run, const json& seed, const json& mixer, const json& lr, const json& decay) {
    set_mixer(mixer, run);
    run.training.lr = lr;
    run.training.weight_decay = decay;
    run.training.seed = seed;
    run.name = name_of(run);
    nn::validate(run.model);
    train::validate(run.training);
    runs.push_back(std::move(run));
  };
  for (const json& seed : settings.at("seeds")) {
    for (const json& task : settings.at("tasks")) {
      for (const json& lr : settings.at("lr")) {
        for (const Setting& setting : settings_of(task)) {
          const SyntheticRun common = run_of(settings, task, setting);
          for (const json& mixer : settings.at("mixers")) {
            for (const json& decay : settings.at("weight_decay")) add(common, seed, mixer, lr, decay);
          }
        }
      }
    }
  }
  return runs;
}

Study synthetic_study(const Plan& plan) {
  Study study{plan.study(), plan.settings(), {}, {}, {}, {}};
  for (auto& run : plan_runs(plan.settings())) {
    study.runs.push_back({run.name, description(run),
                          [run](const std::filesystem::path& folder, const RunContext& context) {
                            return execute(run, folder, context);
                          },
                          [](const std::filesystem::path& folder) {
                            std::filesystem::remove_all(folder / io::kCheckpointsFolder);  // a study has hundreds
                          }});
  }
  study.brief = [](const nlohmann::ordered_json& entry) {
    std::vector<std::string> accuracies;
    for (const auto& test : entry.at("tests")) accuracies.push_back(report::percent(test.at("accuracy").get<double>()));
    return entry.at("diverged").get<bool>() ? "diverged" : report::joined(accuracies, " ");
  };
  study.report = [plan](const Outcome& outcome) { return synthetic_report(plan, outcome); };
  study.check = check_task_entry;
  return study;
}

}  // namespace efla::experiments
