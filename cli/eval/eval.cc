// efla eval robustness: a trained classifier under pixel dropout, intensity scale and noise (figure 1 of the paper).
#include <fmt/core.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/support/count_option.h"
#include "cli/support/device.h"
#include "cli/support/ignored_checkpoints.h"
#include "cli/support/interrupt.h"
#include "cli/support/progress.h"
#include "cli/support/threads.h"
#include "efla/eval/robustness.h"
#include "efla/io/checkpoint_folder.h"
#include "efla/io/json.h"
#include "efla/train/checkpoint.h"
#include "efla/train/tasks/image_task.h"
#include "experiments/smnist/digits.h"

namespace efla::cli {
namespace {

struct EvalArguments {
  std::string run, data;
  std::int64_t test_images = 0;
  std::uint64_t seed = 0;
  std::string device = "auto";
  int threads = 0;
  bool json = false;
};

void print_table(const eval::Robustness& robustness, std::int64_t images) {
  fmt::print("clean accuracy {:.4f} on {} images\n", robustness.clean.accuracy, images);
  const auto& panels = eval::robustness_panels();
  for (std::size_t i = 0; i < panels.size(); ++i) {
    fmt::print("\n{:<10}", panels[i].level_name);
    for (const double level : panels[i].levels) fmt::print("{:>8g}", level);
    fmt::print("\n{:<10}", panels[i].name);
    for (const double accuracy : robustness.accuracy[i]) fmt::print("{:>8.4f}", accuracy);
    fmt::print("\n");
  }
}

void eval_robustness(const EvalArguments& arguments) {
  report_ignored_checkpoints("eval robustness", arguments.run);
  const auto checkpoint = io::CheckpointFolder(arguments.run).require_latest().path;
  const auto trained = train::read_image_config(checkpoint);
  const auto& recorded = trained.at("data");
  const bool other_data = !arguments.data.empty();
  const auto source = other_data ? arguments.data : recorded.at("source").get<std::string>();
  std::int64_t count = arguments.test_images;
  if (count == 0 && !other_data) count = recorded.at("test_images").get<std::int64_t>();
  const auto images = experiments::load_digit_images(source, data::Split::test, count);
  const auto classifier = experiments::make_digit_classifier(trained.at("model"), 0);
  train::read_parameters(checkpoint, classifier.parameters);
  nn::move_to(classifier.parameters, choose_device("eval robustness", arguments.device));
  ThreadPool& pool = use_threads(arguments.threads);

  watch_for_interrupts();
  Progress progress("robustness", 0, 0);
  eval::Robustness robustness;
  try {
    robustness = eval::measure_robustness(classifier, images, pool, arguments.seed, interrupted,
                                          [&](int done, int all) { progress.count("evaluation", done, all); });
  } catch (const Stopped&) {
    end_interrupted("Stopped. Nothing was written.");
  }
  progress.clear();
  if (!arguments.json) {
    print_table(robustness, images.count);
    return;
  }
  nlohmann::ordered_json all{{"run", arguments.run},
                             {"data", source},
                             {"test_images", images.count},
                             {"seed", arguments.seed},
                             {"step", train::read_trainer_state(checkpoint).step},
                             {"model", trained.at("model")}};
  all.update(eval::to_json(robustness));
  fmt::print("{}", io::to_json_text(all));
}

}  // namespace

void add_eval(CLI::App& program) {
  auto* eval = program.add_subcommand("eval", "Measure a trained model");
  eval->require_subcommand(1);
  auto* command =
      eval->add_subcommand("robustness", "Accuracy under pixel dropout, intensity scale and Gaussian noise");
  auto arguments = std::make_shared<EvalArguments>();
  command->add_option("RUN", arguments->run, "Folder of a run of efla train smnist")->required()->type_name("FOLDER");
  command->add_option("--data", arguments->data, "builtin, or a folder with MNIST's files; the run's own if not given");
  command->add_option("--test-images", arguments->test_images,
                      "Number of test images, from the first; 0: as in the run");
  command->add_option("--seed", arguments->seed, "Seed of the dropped pixels and the noise")
      ->check(seed_range())
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print one JSON object");
  add_device_option(*command, arguments->device);
  add_threads_option(*command, arguments->threads);
  command->callback([arguments] { eval_robustness(*arguments); });
  add_eval_lm(*eval);
}

}  // namespace efla::cli
