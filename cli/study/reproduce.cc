// efla reproduce: the studies of experiments/, from training to the report.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/study/study.h"
#include "cli/support/count_option.h"
#include "cli/support/device.h"
#include "cli/support/name_option.h"
#include "cli/support/threads.h"
#include "cli/train/lm_run.h"
#include "efla/io/tokens/token_folder.h"
#include "efla/torch/context.h"
#include "experiments/plans.h"
#include "experiments/smnist/study.h"
#include "experiments/synthetic/plan.h"
#include "experiments/table1/study.h"

namespace efla::cli {
namespace {

struct StudyArguments {
  std::string out, scale = "small", data = "builtin", tokens = "tokens", tasks;
  bool quick = false;
  nlohmann::json given = nlohmann::json::object();  // settings in place of the plan's
  OptionNames options;
  std::string device = "auto";
  int threads = 0;
};

// Adds an option whose value goes into the settings, at a JSON pointer.
template <class T>
CLI::Option* add_study_setting(CLI::App& command, const std::shared_ptr<StudyArguments>& arguments,
                               const std::string& name, const char* place, const std::string& help) {
  arguments->options["settings." + argument_at(place)] = name;
  auto* option = command.add_option_function<T>(
      name, [=](const T& value) { arguments->given[nlohmann::json::json_pointer(place)] = value; }, help);
  return option->delimiter(',');
}

// Adds a command with the options that all studies have; `make` makes the study from the arguments.
template <class Make>
CLI::App& add_study(CLI::App& reproduce, const std::string& name, const std::string& about,
                    const std::shared_ptr<StudyArguments>& arguments, const Make& make) {
  auto* command = reproduce.add_subcommand(name, about);
  command
      ->add_option("--out", arguments->out,
                   "Folder for runs, results.json and report.html; an unfinished one is continued")
      ->required();
  add_study_setting<std::vector<std::string>>(*command, arguments, "--mixers", "/mixers",
                                              "Mixers, with commas between");
  add_study_setting<std::vector<std::uint64_t>>(*command, arguments, "--seeds", "/seeds", "Seeds")->check(seed_range());
  add_study_setting<std::vector<double>>(*command, arguments, "--lr", "/lr", "Learning rates");
  add_device_option(*command, arguments->device);
  add_threads_option(*command, arguments->threads);
  command->callback([=] {
    const Device device = libtorch::device_of(choose_device("reproduce " + name, arguments->device));
    ThreadPool& pool = use_threads(arguments->threads, device);
    const auto study = make(*arguments);
    name_options("reproduce " + name, arguments->options, [&] { run_study(study, arguments->out, pool, device); });
  });
  return *command;
}

void add_smnist(CLI::App& reproduce) {
  const auto arguments = std::make_shared<StudyArguments>();
  auto& command = add_study(reproduce, "smnist", "Robustness of digits read pixel by pixel (figures 1 and 2)",
                            arguments, [](const StudyArguments& a) {
                              const experiments::Plan plan(experiments::smnist_plan(), "smnist",
                                                           a.quick ? "quick" : "full", a.given);
                              return experiments::digit_study(plan, a.data);
                            });
  arguments->options["settings.scale"] = "--quick";
  arguments->options["settings.data.source"] = "--data";
  command.add_flag("--quick", arguments->quick, "Few images, so that all of it takes a few minutes");
  command.add_option("--data", arguments->data, "builtin, or a folder with MNIST's files")->capture_default_str();
  add_study_setting<std::vector<std::int64_t>>(command, arguments, "--layers", "/layers",
                                               "Numbers of layers; the first is the headline's");
  using Number = std::int64_t;
  add_study_setting<Number>(command, arguments, "--epochs", "/training/epochs", "Passes over the training images");
  add_study_setting<Number>(command, arguments, "--batch-size", "/training/batch_size", "Images per step");
  add_study_setting<Number>(command, arguments, "--train-images", "/train_images", "Use the first N images; 0: all");
  add_study_setting<Number>(command, arguments, "--test-images", "/test_images", "Use the first N images; 0: all");
}

void add_synthetic(CLI::App& reproduce, const std::string& name, std::string_view (*plan)(), const std::string& about) {
  const auto arguments = std::make_shared<StudyArguments>();
  auto& command = add_study(reproduce, name, about, arguments, [=](const StudyArguments& a) {
    return experiments::synthetic_study(experiments::Plan(plan(), name, a.scale, a.given));
  });
  arguments->options["settings.scale"] = "--scale";
  command.add_option("--scale", arguments->scale, "tiny (a minute), small, or paper (the papers' sizes and steps)")
      ->capture_default_str();
  add_study_setting<std::vector<std::string>>(command, arguments, "--tasks", "/tasks",
                                              "Tasks; all where none is named");
}

// Reads all tasks of table 1 before the first training, to report a mistake in the last one early.
std::vector<data::LmTask> load_tasks(const std::string& folder) {
  std::vector<data::LmTask> tasks;
  if (folder.empty()) return tasks;
  for (const auto& info : data::lm_tasks()) tasks.push_back(data::load_lm_task(info.name, folder));
  return tasks;
}

void add_table1(CLI::App& reproduce) {
  const auto arguments = std::make_shared<StudyArguments>();
  auto& command =
      add_study(reproduce, "table1", "Language models that differ in their mixer (table 1 of the EFLA paper)",
                arguments, [](const StudyArguments& a) {
                  const experiments::Plan plan(experiments::table1_plan(), "table1", a.scale, a.given);
                  experiments::LmTokens tokens{a.tokens, {}};
                  for (const char* split : {"train", "validation"}) {
                    tokens.description[split] = describe_tokens(io::TokenFolder(tokens.folder / split));
                  }
                  const auto tasks = load_tasks(a.tasks);
                  tokens.description["scored"] = !tasks.empty();
                  return experiments::table1_study(plan, tokens, train_lm_of_study(tasks));
                });
  arguments->options["settings.scale"] = "--scale";
  arguments->options["settings.tokens.scored"] = "--data";
  for (const std::string split : {"train", "validation"}) {
    for (const char* fact : {".tokens", ".documents", ".sha256", ".tokenizer"}) {
      arguments->options["settings.tokens." + split + fact] = "--tokens";
    }
  }
  command
      .add_option("--scale", arguments->scale,
                  "tiny (a minute), quick (as in scripts/demo), small (hours on two cores), medium or\n"
                  "large (47 or 340 million parameters, on a GPU)")
      ->capture_default_str();
  command.add_option("--tokens", arguments->tokens, "Folder with the token shards train and validation")
      ->capture_default_str();
  add_study_setting<std::string>(
      command, arguments, "--tokenizer", "/config/data/tokenizer",
      "The tokenizer that made the tokens (default: bytes, or tokenizer.model on a GPU's scales)");
  command.add_option("--data", arguments->tasks,
                     "Folder of the ten tasks' files (docs/evaluation.md); without it no task is scored");
}

}  // namespace

void add_reproduce(CLI::App& program) {
  auto* reproduce = program.add_subcommand("reproduce", "Repeat a study of the papers");
  reproduce->require_subcommand(1);
  add_smnist(*reproduce);
  add_synthetic(*reproduce, "mad", experiments::mad_plan, "MAD's six synthetic tasks (table 2 of the EFLA paper)");
  add_synthetic(*reproduce, "mqar", experiments::mqar_plan,
                "Multi-query associative recall: the standard training set, tested at seven sizes");
  add_synthetic(*reproduce, "extrapolation", experiments::extrapolation_plan,
                "Palindrome, MQAR and Stack at one, two and four times the training length (table 1 of the KDA study)");
  add_synthetic(*reproduce, "state-tracking", experiments::state_tracking_plan,
                "Parity, counting and permutations beyond the training length, which need eigenvalues below zero");
  add_table1(*reproduce);
}

}  // namespace efla::cli
