#include "experiments/synthetic/run.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "efla/io/json.h"
#include "efla/report/html.h"
#include "efla/torch/autocast.h"
#include "efla/torch/context.h"
#include "efla/torch/graph_replay.h"
#include "efla/train/run.h"
#include "efla/train/training_memory.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using train::SequenceClassifier;
namespace fs = std::filesystem;

// Seconds. A GPU may compute an epoch in less time than a checkpoint takes.
constexpr double kCheckpointPause = 30.0;

SequenceClassifier make_sequence_classifier(const SyntheticRun& run) {
  const auto model = std::make_shared<const nn::SequenceModel>(run.model, nn::Initialiser(run.training.seed));
  const bool bfloat16 = run.precision == "bfloat16";
  return {nn::named_parameters(*model), [model, bfloat16](const torch::Tensor& ids, const torch::Tensor& places) {
            const auto precision = bfloat16 && ids.is_cuda() ? std::make_unique<libtorch::Bfloat16OnGpu>() : nullptr;
            return model->logits(ids, places);
          }};
}

// Returns [{"step", "loss", "accuracy"}]: each evaluation with the mean loss of the steps before it.
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

bool tests_differ_in(const SyntheticRun& run, const std::string& parameter) {
  return std::any_of(run.test_tasks.begin(), run.test_tasks.end(), [&](const data::synthetic::Task& test) {
    const auto& first = run.test_tasks.front().parameters;
    return test.parameters.contains(parameter) && test.parameters.at(parameter) != first.at(parameter);
  });
}

// Returns the entry of a run that made `steps` steps; the model has its parameters. Throws Stopped.
ordered_json entry_of(const SyntheticRun& run, const fs::path& metrics, std::int64_t steps,
                      const SequenceClassifier& model, bool diverged, const RunContext& context) {
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
                     {"mixer", run.mixer},
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
    libtorch::GraphReplay replay;
    // The first test was measured at the end of the training.
    const double accuracy = i == 0 ? curve.back().at("accuracy").get<double>()
                                   : train::evaluate(model, task, run.training.seed, run.test_examples,
                                                     run.training.batch_size, context.pool, replay, context.stop);
    diverged = std::isnan(accuracy);
    ordered_json test{{"length", task.length}};
    if (tests_differ_in(run, "pairs")) test["pairs"] = static_cast<std::int64_t>(task.parameters.at("pairs"));
    test["accuracy"] = accuracy;
    entry["tests"].push_back(test);
  }
  if (diverged) entry["tests"] = ordered_json::array();
  entry["diverged"] = diverged;
  entry["curve"] = curve;
  return entry;
}

}  // namespace

json description(const SyntheticRun& run) {
  json tests = json::array();
  for (const auto& test : run.test_tasks) tests.push_back(test.parameters);
  return {{"task", {{"name", run.training_task.name}, {"parameters", run.training_task.parameters}}},
          {"tests", {{"parameters", tests}, {"examples", run.test_examples}, {"every", run.evaluate_every}}},
          {"model", nn::to_json(run.model)},
          {"precision", run.precision},
          {"training", train::to_json(run.training)},
          {"enough", run.enough ? json(*run.enough) : json()}};
}

std::optional<ordered_json> execute(const SyntheticRun& run, const fs::path& folder, const RunContext& context) {
  const torch::Device device = libtorch::torch_device(context.device);
  train::require_training_memory("synthetic study", "sizes vocab, hidden, layers", run.model.least_parameters(),
                                 device);
  const libtorch::OwnStream stream(context.device);
  train::SequenceTask task([&] { return make_sequence_classifier(run); }, run.training_task, run.training,
                           {&run.test_tasks.front(), run.test_examples, run.enough});
  const int copies = context.device.is_cpu() ? context.pool.threads() : 1;
  train::DataParallel model(
      copies, [&] { return task.add_copy(); }, context.pool, device);
  const auto alone = train::ProcessGroup::join({}, torch::kCPU);
  train::RunOptions options;
  options.evaluate_every = run.evaluate_every;
  options.checkpoint_evaluated = true;
  options.checkpoint_pause = kCheckpointPause;
  train::RunEvents events;
  events.stop = context.stop;
  events.step = [&](const train::StepResult& step, double) {
    context.progress(static_cast<double>(step.step) / static_cast<double>(run.training.steps),
                     "loss " + report::fixed(step.loss, 4));
  };
  bool diverged = false;
  try {
    const auto end = train::train_in_folder({folder, description(run), options}, task, model,
                                            train::update_options(run.training), *alone, events);
    if (end == train::RunEnd::stopped) return {};
  } catch (const train::NonFinite&) {
    diverged = true;
  }
  const fs::path metrics = folder / train::kMetricsFile;
  std::int64_t steps = 0;  // made
  for (const auto& line : io::read_json_lines(metrics)) steps = line.at("step").get<std::int64_t>();
  try {
    return entry_of(run, metrics, steps, task.model(), diverged, context);
  } catch (const Stopped&) {
    return {};
  }
}

}  // namespace efla::experiments
