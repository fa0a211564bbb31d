// efla reproduce mad, extrapolation and state-tracking: the studies of synthetic tasks, from training to the report.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/progress_bar.h"
#include "cli/study.h"
#include "cli/support/command_line.h"
#include "cli/support/threads.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/report/synthetic_report.h"
#include "efla/train/synthetic_study.h"

namespace efla::cli {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

struct SyntheticStudy {
  train::SyntheticStudyOptions options;
  std::string scale = "small", out;
  int threads = 0;
};

// The runs side by side as one bar.
class StudyProgress {
 public:
  StudyProgress(const std::string& title, std::size_t runs) : bar_(title), done_(runs, 0.0) {}

  void step(std::size_t run, const train::SyntheticRun& spec, const train::StepResult& step) {
    const std::lock_guard lock(mutex_);
    done_[run] = static_cast<double>(step.step) / static_cast<double>(spec.training.steps);
    draw(fmt::format("{}: loss {:.4f}", spec.name, step.loss));
  }

  void finished(std::size_t run, const ordered_json& entry) {
    const std::lock_guard lock(mutex_);
    done_[run] = 1.0;
    ++finished_;
    std::string accuracies;
    for (const auto& test : entry.at("tests")) {
      accuracies += fmt::format(" {:.1f} %", 100.0 * test.at("accuracy").get<double>());
    }
    bar_.line(fmt::format("{} of {}: {}{}", finished_, done_.size(), entry.at("name").get<std::string>(),
                          entry.at("diverged").get<bool>() ? " diverged" : accuracies));
  }

  void clear() { bar_.clear(); }

 private:
  void draw(const std::string& text) {
    double share = 0.0;
    for (const double part : done_) share += part / static_cast<double>(done_.size());
    bar_.draw(share, text, /*plain_line=*/false);
  }

  ProgressBar bar_;
  std::mutex mutex_;
  std::vector<double> done_;  // share of each run
  std::size_t finished_ = 0;
};

std::string percent_text(const ordered_json& point, const char* mean, const char* deviation) {
  if (point.at(mean).is_null()) return "-";
  auto text = fmt::format("{:.1f}", 100.0 * point.at(mean).get<double>());
  if (!point.at(deviation).is_null()) text += fmt::format(" +- {:.1f}", 100.0 * point.at(deviation).get<double>());
  return text;
}

void print_scores(const ordered_json& scores) {
  fmt::print("{:<18}{:<17}{:>8}{:>9}  {:>8}  {:>14}  {:>14}\n", "task", "mixer", "lr", "diverged", "length", "accuracy",
             "paper");
  for (const auto& score : scores) {
    const auto lr = score.at("lr").is_null() ? std::string("-") : fmt::format("{:g}", score.at("lr").get<double>());
    const auto diverged = fmt::format("{}/{}", score.at("diverged").get<int>(), score.at("runs").get<int>());
    std::string start = fmt::format("{:<18}{:<17}{:>8}{:>9}", score.at("task").get<std::string>(),
                                    score.at("mixer").get<std::string>(), lr, diverged);
    if (score.at("accuracy").empty()) fmt::print("{}\n", start);
    for (const auto& point : score.at("accuracy")) {
      auto length = std::to_string(point.at("length").get<std::int64_t>());
      if (point.contains("pairs")) length += "/" + std::to_string(point.at("pairs").get<std::int64_t>());
      fmt::print("{}  {:>8}  {:>14}  {:>14}\n", start, length, percent_text(point, "mean", "std"),
                 percent_text(point, "paper", "paper_std"));
      start.assign(start.size(), ' ');
    }
  }
}

std::vector<ordered_json> run_all(const std::vector<train::SyntheticRun>& plan, const fs::path& folder,
                                  const std::string& title, ThreadPool& pool) {
  std::vector<ordered_json> entries(plan.size());
  StudyProgress progress(title, plan.size());
  // A run's own work stays on the thread that the run was given; the last alone has all of them.
  pool.run(static_cast<std::int64_t>(plan.size()), [&](std::int64_t i, int) {
    if (interrupted()) return;
    train::SyntheticEvents events;
    events.stop = interrupted;
    events.step = [&](const train::SyntheticRun& run, const train::StepResult& step) {
      progress.step(static_cast<std::size_t>(i), run, step);
    };
    const auto entry = train::run_in_folder(folder / plan[i].name, plan[i], pool, events);
    if (!entry) return;
    progress.finished(static_cast<std::size_t>(i), *entry);
    entries[i] = *entry;
  });
  progress.clear();
  if (std::any_of(entries.begin(), entries.end(), [](const ordered_json& entry) { return entry.is_null(); })) {
    stop_study();
  }
  return entries;
}

void reproduce_synthetic(const SyntheticStudy& study) {
  auto given = study.options;
  given.scale = train::scale_from_name(study.scale);
  const auto options = train::completed(given);
  const auto plan = train::plan_synthetic(options);
  const std::string name(train::study_name(options.study));
  ThreadPool& pool = use_threads(study.threads);
  const fs::path folder = study.out;
  json wanted{{"study", name},
              {"scale", study.scale},
              {"mixers", options.mixers},
              {"seeds", options.seeds},
              {"lr", options.lrs}};
  // Another version of the program may plan other runs.
  for (const auto& run : plan) wanted["training"][run.name] = train::description(run);
  const auto lock = prepare_study_folder(folder, wanted, "reproduce " + name);
  watch_for_interrupts();

  const auto runs = run_all(plan, folder / "runs", name, pool);
  ordered_json results{{"schema", 1},
                       {"study", name},
                       {"scale", study.scale},
                       {"command", command_line()},
                       {"environment", study_environment(pool)},
                       {"scores", train::summarize_synthetic(options, runs)}};
  if (options.study == train::Study::state_tracking) results["eigenvalues"] = train::eigenvalues(options.mixers);
  results["runs"] = runs;
  const fs::path report = folder / "report.html";
  io::write_file_atomically(folder / "results.json", results.dump(2) + "\n");
  io::write_file_atomically(report, report::render_synthetic_report(json(results)));
  print_scores(results.at("scores"));
  fmt::print("\nreport: {}\n", fs::absolute(report).lexically_normal().string());
}

void add_study(CLI::App& reproduce, train::Study which, const std::string& about) {
  auto* command = reproduce.add_subcommand(std::string(train::study_name(which)), about);
  const auto study = std::make_shared<SyntheticStudy>();
  study->options.study = which;
  command->add_option("--out", study->out, "Folder for runs, results.json and report.html; an unfinished one goes on")
      ->required();
  command->add_option("--scale", study->scale, "tiny (minutes), small, or paper (the papers' sizes and steps)")
      ->capture_default_str();
  command->add_option("--mixers", study->options.mixers, "Mixers, with commas between; none: those of the study")
      ->delimiter(',');
  command->add_option("--seeds", study->options.seeds, "Seeds; none: those of the scale")->delimiter(',');
  command->add_option("--lr", study->options.lrs, "Learning rates to choose from; none: those of the scale")
      ->delimiter(',');
  add_threads_option(*command, study->threads);
  command->callback([study] { reproduce_synthetic(*study); });
}

}  // namespace

void add_synthetic_studies(CLI::App& reproduce) {
  add_study(reproduce, train::Study::mad, "MAD's six synthetic tasks (table 2 of the EFLA paper)");
  add_study(reproduce, train::Study::mqar,
            "Multi-query associative recall: the standard training set, tested at seven sizes");
  add_study(reproduce, train::Study::extrapolation,
            "Palindrome, MQAR and Stack at one, two and four times the training length (the second paper's table 1)");
  add_study(reproduce, train::Study::state_tracking,
            "Parity, counting and permutations beyond the training length, which need eigenvalues below zero");
}

}  // namespace efla::cli
