#include "efla/train/synthetic_run.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "efla/io/json.h"
#include "efla/train/run.h"

namespace efla::train {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kResultFile = "result.json";

SequenceClassifier make_sequence_classifier(const SyntheticRun& run) {
  const auto model = std::make_shared<const nn::SequenceModel>(run.model, nn::Initialiser(run.training.seed));
  return {nn::named_parameters(*model),
          [model](const torch::Tensor& ids, const torch::Tensor& places) { return model->logits(ids, places); }};
}

// [{"step", "loss", "accuracy"}]: each evaluation with the mean loss of the steps before it.
ordered_json curve_of(const fs::path& metrics) {
  auto curve = ordered_json::array();
  double loss = 0.0, steps = 0.0;
  for (const auto& line : io::read_json_lines(metrics)) {
    if (line.at("event") == "step") {
      loss += line.at("loss").get<double>();
      steps += 1.0;
      continue;
    }
    curve.push_back(
        {{"step", line.at("step")}, {"loss", loss / std::max(steps, 1.0)}, {"accuracy", line.at("accuracy")}});
    loss = steps = 0.0;
  }
  return curve;
}

// Returns the entry of a run that was trained. `done` is how far it came; `model` has the parameters that it came to.
ordered_json result_of(const SyntheticRun& run, const fs::path& metrics, std::int64_t steps,
                       const SequenceClassifier& model, bool diverged, ThreadPool& pool, const StopFunction& stop) {
  std::int64_t parameters = 0;
  for (const auto& [name, tensor] : model.parameters) parameters += tensor.numel();
  const auto lines = io::read_json_lines(metrics);
  const double seconds = lines.empty() ? 0.0 : lines.back().at("seconds").get<double>();
  const std::int64_t epoch = run.training.steps_per_epoch();
  const std::int64_t sequences = epoch == 0
                                     ? steps * run.training.batch_size
                                     : steps / epoch * run.training.examples + steps % epoch * run.training.batch_size;
  ordered_json entry{{"name", run.name},
                     {"task", run.task},
                     {"setting", run.setting},
                     {"mixer", run.model.mixer},
                     {"lr", run.training.lr},
                     {"weight_decay", run.training.weight_decay},
                     {"seed", run.training.seed},
                     {"parameters", parameters},
                     {"steps", steps},
                     {"train_seconds", seconds},
                     {"sequences_per_second", static_cast<double>(sequences) / std::max(seconds, 1e-9)},
                     {"diverged", false},
                     {"tests", ordered_json::array()}};
  const auto curve = curve_of(metrics);
  for (std::size_t i = 0; i < run.test_tasks.size() && !diverged; ++i) {
    const auto& task = run.test_tasks[i];
    // The first was measured at the end of the training.
    const double accuracy =
        i == 0 ? curve.back().at("accuracy").get<double>()
               : evaluate(model, task, run.training.seed, run.test_examples, run.training.batch_size, pool, stop);
    diverged = std::isnan(accuracy);
    ordered_json test{{"length", task.length}};
    if (run.training_task.name == "mqar-set") test["pairs"] = static_cast<std::int64_t>(task.parameters.at("pairs"));
    test["accuracy"] = accuracy;
    entry["tests"].push_back(test);
  }
  if (diverged) entry["tests"] = ordered_json::array();
  entry["diverged"] = diverged;
  entry["curve"] = curve;
  return entry;
}

// Trains and measures; nothing where it was stopped.
std::optional<ordered_json> train_and_measure(const fs::path& folder, const SyntheticRun& run, ThreadPool& pool,
                                              const SyntheticEvents& events) {
  SequenceTask task([&] { return make_sequence_classifier(run); }, run.training_task, run.training,
                    {&run.test_tasks.front(), run.test_examples, run.enough});
  DataParallel model(
      pool.threads(), [&] { return task.add_copy(); }, pool);
  const auto alone = ProcessGroup::join({}, torch::kCPU);
  RunOptions options;
  options.evaluate_every = run.evaluate_every;
  options.checkpoint_evaluated = true;
  RunEvents run_events;
  run_events.stop = events.stop;
  run_events.step = [&](const StepResult& step, double) {
    if (events.step) events.step(run, step);
  };
  bool diverged = false;
  try {
    const auto end = train_in_folder({folder, description(run), options}, task, model, update_options(run.training),
                                     *alone, run_events);
    if (end == RunEnd::stopped) return {};
  } catch (const NonFinite&) {
    diverged = true;
  }
  std::int64_t steps = 0;  // made
  for (const auto& line : io::read_json_lines(folder / kMetricsFile)) steps = line.at("step").get<std::int64_t>();
  try {
    return result_of(run, folder / kMetricsFile, steps, task.model(), diverged, pool, events.stop);
  } catch (const Stopped&) {
    return {};
  }
}

}  // namespace

json description(const SyntheticRun& run) {
  json tests = json::array();
  for (const auto& test : run.test_tasks) tests.push_back(test.parameters);
  return {{"task", {{"name", run.training_task.name}, {"parameters", run.training_task.parameters}}},
          {"tests", {{"parameters", tests}, {"examples", run.test_examples}, {"every", run.evaluate_every}}},
          {"model", nn::to_json(run.model)},
          {"training", to_json(run.training)},
          {"enough", run.enough ? json(*run.enough) : json()}};
}

std::optional<ordered_json> run_in_folder(const fs::path& folder, const SyntheticRun& run, ThreadPool& pool,
                                          const SyntheticEvents& events) {
  const fs::path kept = folder / kResultFile;
  if (fs::exists(kept)) return ordered_json(io::read_json(kept));
  fs::create_directories(folder);
  auto entry = train_and_measure(folder, run, pool, events);
  if (!entry) return {};
  io::write_file_atomically(kept, entry->dump(2) + "\n");
  fs::remove_all(folder / kCheckpointsFolder);  // a study has hundreds
  return entry;
}

}  // namespace efla::train
