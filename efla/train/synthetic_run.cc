#include "efla/train/synthetic_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "efla/io/json.h"
#include "efla/train/metrics.h"
#include "efla/train/run.h"

namespace efla::train {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kResultFile = "result.json";

SequenceClassifier make_classifier(const SyntheticRun& run) {
  const auto model = std::make_shared<const nn::SequenceModel>(run.model, nn::Initialiser(run.training.seed));
  SequenceClassifier classifier;
  for (const auto& parameter : model->named_parameters()) {
    classifier.parameters.emplace_back(parameter.key(), parameter.value());
  }
  classifier.logits = [model](const torch::Tensor& ids, const torch::Tensor& places) {
    return model->logits(ids, places);
  };
  return classifier;
}

ordered_json step_line(const SyntheticStep& step, double seconds) {
  return {{"event", "step"}, {"step", step.step},           {"loss", step.loss},
          {"lr", step.lr},   {"grad_norm", step.grad_norm}, {"seconds", seconds}};
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

class Training {
 public:
  Training(const fs::path& folder, const SyntheticRun& run, ThreadPool& pool, const SyntheticEvents& events)
      : folder_(folder),
        run_(run),
        pool_(pool),
        events_(events),
        classifier_(make_classifier(run)),
        trainer_(classifier_, run.training_task, run.training, pool) {
    if (fs::exists(checkpoint())) trainer_.restore(checkpoint(), description(run));
  }

  std::optional<ordered_json> run() {
    Metrics metrics(folder_ / kMetricsFile, trainer_.steps_done());
    try {
      const bool diverged = !train(metrics);
      return result(metrics, diverged);
    } catch (const Stopped&) {
      save();
      return {};
    }
  }

 private:
  fs::path checkpoint() const { return folder_ / kCheckpointFile; }
  void save() const { trainer_.save(checkpoint(), description(run_)); }

  double measure(const data::synthetic::Task& task) const {
    return evaluate(classifier_, task, run_.training.seed, run_.test_examples, run_.training.batch_size, pool_,
                    events_.stop);
  }

  // Until all steps are done or the accuracy is enough; false where it diverged.
  bool train(Metrics& metrics) {
    const auto before = curve_of(folder_ / kMetricsFile);
    std::optional<double> accuracy;
    if (!before.empty()) accuracy = before.back().at("accuracy").get<double>();
    for (;;) {
      const std::int64_t done = trainer_.steps_done();
      const bool last = done == run_.training.steps;
      if (done > 0 && (last || done % run_.evaluate_every == 0) && metrics.last_step("evaluation") < done) {
        save();
        accuracy = measure(run_.test_tasks.front());
        if (std::isnan(*accuracy)) return false;
        metrics.write(
            {{"event", "evaluation"}, {"step", done}, {"accuracy", *accuracy}, {"seconds", metrics.seconds()}});
      }
      if (last || (accuracy && run_.enough && *accuracy >= *run_.enough)) return true;
      if (events_.stop && events_.stop()) throw Stopped();
      const auto start = std::chrono::steady_clock::now();
      const SyntheticStep step = trainer_.step();
      if (!step.updated) return false;
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      metrics.write(step_line(step, metrics.seconds() + seconds));
      if (events_.step) events_.step(run_, step);
    }
  }

  ordered_json result(const Metrics& metrics, bool diverged) const {
    std::int64_t parameters = 0;
    for (const auto& [name, tensor] : classifier_.parameters) parameters += tensor.numel();
    const std::int64_t steps = trainer_.steps_done(), epoch = run_.training.steps_per_epoch();
    const std::int64_t sequences =
        epoch == 0 ? steps * run_.training.batch_size
                   : steps / epoch * run_.training.examples + steps % epoch * run_.training.batch_size;
    ordered_json entry{{"name", run_.name},
                       {"task", run_.task},
                       {"setting", run_.setting},
                       {"mixer", run_.model.mixer},
                       {"lr", run_.training.lr},
                       {"weight_decay", run_.training.weight_decay},
                       {"seed", run_.training.seed},
                       {"parameters", parameters},
                       {"steps", steps},
                       {"train_seconds", metrics.seconds()},
                       {"sequences_per_second", static_cast<double>(sequences) / std::max(metrics.seconds(), 1e-9)},
                       {"diverged", false},
                       {"tests", ordered_json::array()}};
    const auto curve = curve_of(folder_ / kMetricsFile);
    for (std::size_t i = 0; i < run_.test_tasks.size() && !diverged; ++i) {
      const auto& task = run_.test_tasks[i];
      // The first was measured at the end of the training.
      const double accuracy = i == 0 ? curve.back().at("accuracy").get<double>() : measure(task);
      diverged = std::isnan(accuracy);
      ordered_json test{{"length", task.length}};
      if (run_.training_task.name == "mqar-set") test["pairs"] = static_cast<std::int64_t>(task.parameters.at("pairs"));
      test["accuracy"] = accuracy;
      entry["tests"].push_back(test);
    }
    if (diverged) entry["tests"] = ordered_json::array();
    entry["diverged"] = diverged;
    entry["curve"] = curve;
    return entry;
  }

  fs::path folder_;
  const SyntheticRun& run_;
  ThreadPool& pool_;
  const SyntheticEvents& events_;
  SequenceClassifier classifier_;
  SyntheticTrainer trainer_;
};

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
  auto entry = Training(folder, run, pool, events).run();
  if (!entry) return {};
  io::write_file_atomically(kept, entry->dump(2) + "\n");
  fs::remove(folder / kCheckpointFile);  // a study has hundreds
  return entry;
}

}  // namespace efla::train
