// efla reproduce smnist: the study of section 5.1 and appendix C of the EFLA paper, from training to the report.
#include <fmt/core.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/pixel_model.h"
#include "cli/progress.h"
#include "cli/study.h"
#include "cli/support/command_line.h"
#include "cli/support/threads.h"
#include "efla/base/error.h"
#include "efla/eval/robustness.h"
#include "efla/io/file.h"
#include "efla/io/folder_lock.h"
#include "efla/io/json.h"
#include "efla/report/smnist_report.h"
#include "efla/train/study.h"
#include "efla/train/tasks/image_task.h"

namespace efla::cli {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kReproduceSmnist = "reproduce smnist";
constexpr std::int64_t kCurvePoints = 60;

struct Study {
  fs::path folder;
  bool quick = false;
  std::string data = "builtin";
  train::StudyOptions options;
  train::ImageTraining training;
  std::int64_t train_images = 0, test_images = 0;
  int threads = 0;
};

// Sizes at which the whole of the quick study takes a few minutes on two cores; everything else is the full study's.
void make_quick(Study& study) {
  study.options.seeds = {1, 2};
  study.options.lrs = {3e-3, 1e-3};
  study.options.first_mixer_lrs = true;
  study.options.layers = {1};
  study.training.epochs = 3;
  study.training.batch_size = 16;
  study.train_images = 2500;
  study.test_images = 400;
}

json model_of(const train::StudyRun& run) {
  json model = default_model();
  model["mixer"] = run.mixer;
  model["layers"] = run.layers;
  // As in the calibration: one layer is the mixer alone, deeper models have an MLP in each layer.
  model["mlp_ratio"] = run.layers > 1 ? 2.0 : 0.0;
  return model;
}

// What a folder must agree on to be continued.
json description(const Study& study, const PixelData& data) {
  json training = train::to_json(study.training);
  training.erase("lr");
  training.erase("seed");
  return {{"mixers", study.options.mixers}, {"seeds", study.options.seeds}, {"lr", study.options.lrs},
          {"layers", study.options.layers}, {"quick", study.quick},         {"training", training},
          {"data", data.description}};
}

std::string train_command(const Study& study, const train::StudyRun& run, const train::ImageRun& spec) {
  const auto& data = spec.data;
  return fmt::format(
      "efla train smnist --mixer {} --layers {} --mlp-ratio {} --lr {} --seed {} --epochs {} --batch-size {} --data {} "
      "--train-images {} --test-images {} --out {}",
      run.mixer, run.layers, spec.model.at("mlp_ratio").dump(), run.lr, run.seed, spec.training.epochs,
      spec.training.batch_size, shell_word(study.data), data.at("train_images").dump(), data.at("test_images").dump(),
      run.name);
}

// Trains (or goes on with) one run, measures it, and keeps the entry of results.json's "runs" in its folder.
ordered_json train_run(const Study& study, const train::StudyRun& run, const std::string& title, const PixelData& data,
                       ThreadPool& pool) {
  const fs::path folder = study.folder / "runs" / run.name;
  const fs::path kept = folder / "result.json";
  if (fs::exists(kept)) return ordered_json(io::read_json(kept));
  fs::create_directories(folder);
  const io::FolderLock lock(folder, kReproduceSmnist,
                            "--out");  // efla train smnist --resume may be given this folder too

  train::ImageRun spec{folder, model_of(run), data.description, study.training};
  spec.training.lr = run.lr;
  spec.training.seed = run.seed;
  const std::int64_t steps = (data.train.count + spec.training.batch_size - 1) / spec.training.batch_size;
  Progress progress(title, steps, steps * spec.training.epochs);
  auto events = progress.events();
  events.stop = interrupted;
  const auto make = [&] { return make_classifier(spec.model, run.seed); };
  const auto [end, classifier] = train::train_images(spec, make, data.train, data.test, pool, events);
  if (end == train::RunEnd::stopped) stop_study();

  std::int64_t parameters = 0;
  for (const auto& [name, tensor] : classifier.parameters) parameters += tensor.numel();
  const auto metrics = io::read_json_lines(folder / train::kMetricsFile);
  const double seconds = metrics.back().at("seconds");
  ordered_json entry{{"name", run.name},
                     {"mixer", run.mixer},
                     {"layers", run.layers},
                     {"lr", run.lr},
                     {"seed", run.seed},
                     {"epochs", spec.training.epochs},
                     {"parameters", parameters},
                     {"images_per_second", static_cast<double>(data.train.count * spec.training.epochs) / seconds},
                     {"train_seconds", seconds}};
  entry["curve"] = train::training_curve(metrics, steps, kCurvePoints);
  entry["command"] = train_command(study, run, spec);
  try {
    const auto measured = eval::measure_robustness(classifier, data.test, pool, 0, interrupted,
                                                   [&](int done, int all) { progress.count("robustness", done, all); });
    entry.update(eval::to_json(measured));
  } catch (const Stopped&) {
    stop_study();
  }
  progress.clear();
  io::write_file_atomically(kept, entry.dump(2) + "\n");
  return entry;
}

ordered_json results_of(const Study& study, const PixelData& data, const std::vector<ordered_json>& runs,
                        const ThreadPool& pool) {
  // The data by the name that was given, which the results of another machine can be compared by; what it was, by its
  // digest.
  return {{"schema", 1},
          {"command", command_line()},
          {"data", study.data},
          {"train_images", data.description.at("train_images")},
          {"test_images", data.description.at("test_images")},
          {"data_digest", data.description.at("digest")},
          {"quick", study.quick},
          {"environment", study_environment(pool)},
          {"mixers", train::summarize(study.options, runs)},
          {"runs", runs}};
}

double accuracy_at(const ordered_json& entry, const char* panel, const char* level_name, double level) {
  for (const auto& point : entry.at(panel)) {
    if (point.at(level_name) == level) return point.at("accuracy");
  }
  throw Error(kReproduceSmnist, panel, "no measurement", fmt::format("one at {} {}", level_name, level));
}

void print_row(const std::string& mixer, const ordered_json& entry, const std::string& seeds) {
  fmt::print("{:<14}{:>6}{:>8g}  {:<8}{:>8.4f}{:>13.4f}{:>9.4f}{:>12.4f}\n", mixer, entry.at("layers").get<int>(),
             entry.at("lr").get<double>(), seeds, entry.at("clean_accuracy").get<double>(),
             accuracy_at(entry, "dropout", "p", 0.5), accuracy_at(entry, "scale", "factor", 4.0),
             accuracy_at(entry, "noise", "sigma", 0.2));
}

// The headline of each mixer, averaged over its seeds, then the runs of other configurations.
void print_table(const ordered_json& results) {
  fmt::print("{:<14}{:>6}{:>8}  {:<8}{:>8}{:>13}{:>9}{:>12}\n", "mixer", "layers", "lr", "seeds", "clean",
             "dropout 0.5", "scale 4", "noise 0.2");
  const auto& mixers = results.at("mixers");
  for (const auto& [mixer, entry] : mixers.items()) {
    std::string seeds;
    for (const auto& seed : entry.at("seeds")) {
      if (!seeds.empty()) seeds += ',';
      seeds += seed.dump();
    }
    print_row(mixer, entry, seeds);
  }
  for (const auto& run : results.at("runs")) {
    const auto& headline = mixers.at(run.at("mixer").get<std::string>());
    if (run.at("lr") == headline.at("lr") && run.at("layers") == headline.at("layers")) continue;
    print_row(run.at("mixer"), run, run.at("seed").dump());
  }
}

void reproduce_smnist(const Study& study) {
  const auto plan = train::plan_study(study.options);
  for (const auto& run : plan) {
    auto training = study.training;
    training.lr = run.lr;
    train::validate(training);
    make_classifier(model_of(run), run.seed);  // throws for what no run could be made of
  }
  const PixelData data = load_pixel_data(study.data, study.train_images, study.test_images);
  ThreadPool& pool = use_threads(study.threads);
  const auto lock = prepare_study_folder(study.folder, description(study, data), kReproduceSmnist);
  watch_for_interrupts();

  std::vector<ordered_json> runs;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const auto& run = plan[i];
    const auto title = fmt::format("[{}/{}] {}, {} layer{}, lr {}, seed {}", i + 1, plan.size(), run.mixer, run.layers,
                                   run.layers == 1 ? "" : "s", run.lr, run.seed);
    runs.push_back(train_run(study, run, title, data, pool));
  }
  const ordered_json results = results_of(study, data, runs, pool);
  const fs::path report = study.folder / "report.html";
  io::write_file_atomically(study.folder / "results.json", results.dump(2) + "\n");
  io::write_file_atomically(report, report::render_smnist_report(json(results)));
  print_table(results);
  fmt::print("\nreport: {}\n", fs::absolute(report).lexically_normal().string());
}

}  // namespace

void add_reproduce(CLI::App& program) {
  auto* reproduce = program.add_subcommand("reproduce", "Repeat a study of the papers");
  reproduce->require_subcommand(1);
  auto* command = reproduce->add_subcommand("smnist", "Robustness of digits read pixel by pixel (figures 1 and 2)");
  auto given = std::make_shared<Study>();
  auto out = std::make_shared<std::string>();
  command->add_option("--out", *out, "Folder for runs, results.json and report.html; an unfinished one goes on")
      ->required();
  command->add_flag("--quick", given->quick, "Few images, so that all of it takes a few minutes");
  command->add_option("--data", given->data, "builtin, or a folder with MNIST's files")->capture_default_str();
  // Values given here replace those of the full or the quick study.
  std::vector<std::pair<CLI::Option*, std::function<void(Study&)>>> settings;
  const auto list = [](CLI::Option* option) { return option->delimiter(','); };
  settings.push_back({list(command->add_option("--mixers", given->options.mixers, "Mixers, with commas between")),
                      [=](Study& s) { s.options.mixers = given->options.mixers; }});
  settings.push_back({list(command->add_option("--seeds", given->options.seeds, "Seeds of the headline runs")),
                      [=](Study& s) { s.options.seeds = given->options.seeds; }});
  settings.push_back(
      {list(command->add_option("--lr", given->options.lrs, "Learning rates; the highest is the headline's")),
       [=](Study& s) { s.options.lrs = given->options.lrs; }});
  settings.push_back(
      {list(command->add_option("--layers", given->options.layers, "Numbers of layers; the first is the headline's")),
       [=](Study& s) { s.options.layers = given->options.layers; }});
  settings.push_back({command->add_option("--epochs", given->training.epochs, "Passes over the training images"),
                      [=](Study& s) { s.training.epochs = given->training.epochs; }});
  settings.push_back({command->add_option("--batch-size", given->training.batch_size, "Images a step"),
                      [=](Study& s) { s.training.batch_size = given->training.batch_size; }});
  settings.push_back({command->add_option("--train-images", given->train_images, "First so many images; 0: all"),
                      [=](Study& s) { s.train_images = given->train_images; }});
  settings.push_back({command->add_option("--test-images", given->test_images, "First so many images; 0: all"),
                      [=](Study& s) { s.test_images = given->test_images; }});
  add_threads_option(*command, given->threads);
  add_synthetic_studies(*reproduce);
  command->callback([=] {
    Study study;
    study.folder = *out;
    study.quick = given->quick;
    study.data = given->data;
    study.threads = given->threads;
    if (study.quick) make_quick(study);
    for (const auto& [option, apply] : settings) {
      if (option->count() > 0) apply(study);
    }
    reproduce_smnist(study);
  });
}

}  // namespace efla::cli
