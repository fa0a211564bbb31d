#include "experiments/smnist/study.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "efla/base/shell_word.h"
#include "efla/eval/perturb.h"
#include "efla/eval/robustness.h"
#include "efla/io/fields.h"
#include "efla/io/json.h"
#include "efla/nn/models/pixel_classifier.h"
#include "efla/report/html.h"
#include "efla/torch/context.h"
#include "efla/train/tasks/image_task.h"
#include "efla/train/training_memory.h"
#include "experiments/smnist/digits.h"
#include "experiments/smnist/report.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr std::int64_t kCurvePoints = 60;

train::ImageRun spec_of(const DigitRun& run, const json& settings, const json& data) {
  json model = default_digit_model(), training = train::to_json(train::ImageTraining{});
  model["mixer"] = run.mixer;
  model["layers"] = run.layers;
  model["mlp_ratio"] = run.layers > 1 ? 2.0 : 0.0;  // one layer is the mixer alone
  training.merge_patch(settings.at("training"));
  training["lr"] = run.lr;
  training["seed"] = run.seed;
  return {/*folder=*/{}, model, data,
          train::image_training_from_json({training, io::refuse_argument("reproduce smnist"), "training"})};
}

std::string train_command(const DigitRun& run, const train::ImageRun& spec, const std::string& data) {
  std::string command = "efla train smnist --mixer " + run.mixer;
  const auto add = [&](const char* option, const std::string& value) {
    command += std::string(" ") + option + " " + value;
  };
  add("--layers", std::to_string(run.layers));
  add("--mlp-ratio", spec.model.at("mlp_ratio").dump());
  add("--lr", json(run.lr).dump());
  add("--seed", std::to_string(run.seed));
  add("--epochs", std::to_string(spec.training.epochs));
  add("--batch-size", std::to_string(spec.training.batch_size));
  add("--data", shell_word(data));
  add("--train-images", spec.data.at("train_images").dump());
  add("--test-images", spec.data.at("test_images").dump());
  add("--out", run.name);
  return command;
}

// Returns the entry of a run without its tests; `classifier` is nullptr if the run diverged.
ordered_json entry_of(const DigitRun& run, const train::ImageRun& spec, const eval::Classifier* classifier,
                      const std::vector<json>& metrics, std::int64_t steps_per_epoch) {
  ordered_json entry{{"name", run.name}, {"mixer", run.mixer}, {"layers", run.layers},          {"lr", run.lr},
                     {"seed", run.seed}, {"diverged", true},   {"epochs", spec.training.epochs}};
  if (classifier != nullptr) {
    std::int64_t parameters = 0;
    for (const auto& [name, tensor] : classifier->parameters) parameters += tensor.numel();
    const double seconds = metrics.back().at("seconds");
    const auto images = spec.data.at("train_images").get<std::int64_t>() * spec.training.epochs;
    entry["diverged"] = false;
    entry["parameters"] = parameters;
    entry["images_per_second"] = static_cast<double>(images) / seconds;
    entry["train_seconds"] = seconds;
  }
  entry["curve"] = training_curve(metrics, steps_per_epoch, kCurvePoints);
  return entry;
}

std::optional<ordered_json> execute(const DigitRun& run, train::ImageRun spec, const DigitData& data,
                                    const std::string& source, const fs::path& folder, const RunContext& context) {
  const torch::Device device = libtorch::torch_device(context.device);
  train::require_training_memory("smnist study", "sizes hidden, layers",
                                 nn::pixel_classifier_config_from_json(spec.model).least_parameters(), device);
  const libtorch::OwnStream stream(context.device);
  spec.folder = folder;
  const std::int64_t steps = (data.train.count + spec.training.batch_size - 1) / spec.training.batch_size;
  train::RunEvents events;
  events.stop = context.stop;
  events.step = [&](const train::StepResult& step, double) {
    context.progress(static_cast<double>(step.step) / static_cast<double>(steps * spec.training.epochs),
                     "loss " + report::fixed(step.loss, 4) + "  accuracy " + report::fixed(step.accuracy, 2));
  };
  const auto make = [&] { return make_digit_classifier(spec.model, run.seed); };
  train::ImageRunResult result;
  bool diverged = false;
  try {
    result = train::train_images(spec, make, data.train, data.test, context.pool, events, device);
  } catch (const train::NonFinite&) {
    diverged = true;
  }
  if (result.end == train::RunEnd::stopped) return {};
  auto entry = entry_of(run, spec, diverged ? nullptr : &result.classifier,
                        io::read_json_lines(folder / train::kMetricsFile), steps);
  entry["command"] = train_command(run, spec, source);
  if (diverged) return entry;
  try {
    const auto measured =
        eval::measure_robustness(result.classifier, data.test, context.pool, 0, context.stop, [&](int done, int all) {
          context.progress(1.0, "robustness " + std::to_string(done) + " of " + std::to_string(all));
        });
    entry.update(eval::to_json(measured));
  } catch (const Stopped&) {
    return {};
  }
  return entry;
}

void check_digit_entry(const io::Fields& entry) {
  entry.get<std::string>("mixer");
  entry.get<std::int64_t>("layers");
  entry.get<double>("lr");
  for (const auto& point : entry.objects("curve")) {
    for (const char* name : {"step", "epoch", "train_loss"}) point.get<double>(name);
    point.find<double>("test_accuracy");
  }
  if (entry.find<bool>("diverged").value_or(false)) return;
  for (const char* name : {"clean_accuracy", "images_per_second"}) entry.get<double>(name);
  for (const auto& panel : eval::robustness_panels()) {
    const auto levels = entry.objects(std::string(panel.name));
    if (levels.size() != panel.levels.size()) {
      entry.refuse(std::string(panel.name), "a list of " + std::to_string(panel.levels.size()) + " objects");
    }
    for (const auto& level : levels) level.get<double>("accuracy");
  }
}

}  // namespace

std::vector<DigitRun> plan_digit_runs(const json& settings) {
  const auto mixers = settings.at("mixers").get<std::vector<std::string>>();
  const auto seeds = settings.at("seeds").get<std::vector<std::uint64_t>>();
  const auto rates = settings.at("lr").get<std::vector<double>>();
  const auto layers = settings.at("layers").get<std::vector<std::int64_t>>();
  const double headline = *std::max_element(rates.begin(), rates.end());
  std::vector<DigitRun> runs;
  const auto add = [&](const std::string& mixer, std::int64_t n, double lr, std::uint64_t seed) {
    const auto name = mixer + "-layers" + std::to_string(n) + "-lr" + report::compact(lr) + "-seed";
    runs.push_back({name + std::to_string(seed), mixer, n, lr, seed});
  };
  for (const auto seed : seeds) {
    for (const auto& mixer : mixers) add(mixer, layers.front(), headline, seed);
  }
  for (const double lr : rates) {
    if (lr == headline) continue;
    for (const auto& mixer : mixers) {
      if (mixer == mixers.front() || !settings.at("first_mixer_rates")) add(mixer, layers.front(), lr, seeds.front());
    }
  }
  for (std::size_t i = 1; i < layers.size(); ++i) {
    for (const auto& mixer : mixers) add(mixer, layers[i], headline, seeds.front());
  }
  return runs;
}

ordered_json training_curve(const std::vector<json>& metrics, std::int64_t steps_per_epoch, std::int64_t points) {
  std::int64_t epochs = 1;
  for (const auto& line : metrics) epochs = std::max(epochs, line.at("epoch").get<std::int64_t>());
  const std::int64_t stretches = std::clamp(points / epochs, std::int64_t{1}, steps_per_epoch);  // per epoch
  auto curve = ordered_json::array();
  double loss = 0.0, accuracy = 0.0, count = 0.0;
  for (const auto& line : metrics) {
    if (line.at("event") == "evaluation") {
      if (!curve.empty()) curve.back()["test_accuracy"] = line.at("accuracy");
      continue;
    }
    loss += line.at("loss").get<double>();
    accuracy += line.at("accuracy").get<double>();
    count += 1.0;
    const auto step = line.at("step").get<std::int64_t>();
    const std::int64_t in_epoch = (step - 1) % steps_per_epoch;
    if ((in_epoch + 1) * stretches / steps_per_epoch == in_epoch * stretches / steps_per_epoch) continue;
    curve.push_back({{"step", step},
                     {"epoch", static_cast<double>(step) / static_cast<double>(steps_per_epoch)},
                     {"train_loss", loss / count},
                     {"train_accuracy", accuracy / count}});
    loss = accuracy = count = 0.0;
  }
  return curve;
}

Study digit_study(const Plan& plan, const std::string& source) {
  const json& settings = plan.settings();
  const auto data =
      std::make_shared<const DigitData>(load_digits(source, settings.at("train_images"), settings.at("test_images")));
  Study study{plan.study(), settings, {}, {}, {}, {}};
  study.settings["data"] = data->description;
  for (const auto& run : plan_digit_runs(settings)) {
    const auto spec = spec_of(run, settings, data->description);
    train::validate(spec.training);
    make_digit_classifier(spec.model, run.seed);  // throws for settings that no run can have
    study.runs.push_back({run.name, train::description(spec), [=](const fs::path& folder, const RunContext& context) {
                            return execute(run, spec, *data, source, folder, context);
                          }});
  }
  study.brief = [](const ordered_json& entry) {
    if (entry.value("diverged", false)) return std::string("diverged");
    return "clean accuracy " + report::percent(entry.at("clean_accuracy").get<double>());
  };
  // The report names the data as the user gave them, which is the same on every machine.
  auto shown = settings;
  shown["data"] = source;
  shown["data_digest"] = data->description.at("digest");
  shown["train_images"] = data->train.count;
  shown["test_images"] = data->test.count;
  study.report = [title = plan.title(), shown](const Outcome& outcome) { return digit_report(title, shown, outcome); };
  study.check = check_digit_entry;
  return study;
}

}  // namespace efla::experiments
