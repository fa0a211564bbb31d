// efla train smnist: one classifier of pixel sequences, in a folder of its own.
#include <fmt/core.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/support/count_option.h"
#include "cli/support/device.h"
#include "cli/support/ignored_checkpoints.h"
#include "cli/support/interrupt.h"
#include "cli/support/name_option.h"
#include "cli/support/progress.h"
#include "cli/support/threads.h"
#include "efla/base/error.h"
#include "efla/base/shell_word.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"
#include "efla/io/folder_lock.h"
#include "efla/io/json.h"
#include "efla/nn/models/pixel_classifier.h"
#include "efla/rule/mixer_preset.h"
#include "efla/train/checkpoint.h"
#include "efla/train/tasks/image_task.h"
#include "efla/train/training_memory.h"
#include "experiments/smnist/digits.h"

namespace efla::cli {
namespace {

using nlohmann::json;

constexpr const char* kTrainSmnist = "train smnist";
// In a run's folder: what is trained, as in a checkpoint. Until the first checkpoint it says that the
// folder is a run.
constexpr const char* kTrainingFile = "training.json";

struct TrainArguments {
  std::string out, resume, data = "builtin";
  std::int64_t train_images = 0, test_images = 0, checkpoint_every = 0;
  std::string device = "auto";
  int threads = 0;
  bool data_given = false, train_images_given = false, test_images_given = false;
  // The defaults.
  json run = {{"model", experiments::default_digit_model()}, {"training", train::to_json(train::ImageTraining{})}};
  // Puts the options that were given into run.
  std::vector<std::function<void(json& run)>> given;
  OptionNames options = {
      {"data.source", "--data"}, {"data.train_images", "--train-images"}, {"data.test_images", "--test-images"}};
};

// Adds an option whose value, if given, goes to a place in a run's description. The default stands at that place.
template <class T>
CLI::Option* add_setting(CLI::App& command, TrainArguments& arguments, const std::string& name, const char* place,
                         const std::string& help) {
  const json::json_pointer pointer(place);
  auto value = std::make_shared<T>(arguments.run.at(pointer).get<T>());
  auto* option = command.add_option(name, *value, help)->capture_default_str();
  arguments.given.push_back([=](json& run) {
    if (option->count() > 0) run[pointer] = *value;
  });
  arguments.options[argument_at(place)] = name;
  return option;
}

void add_off_switch(CLI::App& command, TrainArguments& arguments, const std::string& name, const char* place,
                    const std::string& help) {
  auto* option = command.add_flag(name, help);
  arguments.given.push_back([option, pointer = json::json_pointer(place)](json& run) {
    if (option->count() > 0) run[pointer] = false;
  });
}

std::string mixer_names() {
  std::string names;
  for (const auto& preset : mixer_presets()) names.append(names.empty() ? "" : ", ").append(preset.name);
  return names;
}

void add_settings(CLI::App& command, TrainArguments& a) {
  add_setting<std::string>(command, a, "--mixer", "/model/mixer", "Mixer: " + mixer_names());
  add_setting<std::int64_t>(command, a, "--layers", "/model/layers", "Layers");
  add_setting<std::int64_t>(command, a, "--hidden", "/model/hidden", "Width of the model");
  add_setting<std::int64_t>(command, a, "--heads", "/model/heads", "Heads of a mixer");
  add_setting<double>(command, a, "--mlp-ratio", "/model/mlp_ratio",
                      "Width of each layer's MLP over the model's; 0: none");
  add_setting<std::int64_t>(command, a, "--conv", "/model/conv",
                            "Taps of the short convolution on q, k and v; 0: none");
  add_off_switch(command, a, "--no-positions", "/model/positions", "Leave out the learned positions");
  add_off_switch(command, a, "--no-output-norm", "/model/output_norm", "Leave out the norm of the mixer's output");
  add_setting<std::string>(command, a, "--pooling", "/model/pooling", "What the head reads: mean or last");
  add_setting<std::int64_t>(command, a, "--epochs", "/training/epochs", "Passes over the training images");
  add_setting<double>(command, a, "--lr", "/training/lr", "Highest learning rate");
  add_setting<std::uint64_t>(command, a, "--seed", "/training/seed", "Seed of parameters and order")
      ->check(seed_range());
  add_setting<std::int64_t>(command, a, "--batch-size", "/training/batch_size", "Images per step");
  add_setting<double>(command, a, "--weight-decay", "/training/weight_decay", "AdamW's weight decay");
  add_setting<std::string>(command, a, "--schedule", "/training/schedule", "After the warm-up: cosine or constant");
  add_setting<double>(command, a, "--warmup", "/training/warmup", "Part of all steps over which the rate rises");
  add_setting<double>(command, a, "--clip", "/training/clip", "Largest gradient norm; 0: no clipping");
}

// Returns the file that says what a run trains: its latest checkpoint's, or kTrainingFile if there is no checkpoint.
std::filesystem::path record_of(const std::filesystem::path& folder) {
  const io::CheckpointFolder checkpoints(folder);
  const auto begun = folder / kTrainingFile;
  if (!checkpoints.latest() && exists(begun)) return begun;
  return train::trainer_file(checkpoints.require_latest().path);
}

json recorded_run(const std::filesystem::path& path) {
  if (path.filename() != kTrainingFile) return train::read_image_config(path.parent_path());
  json run = io::read_json(path);
  train::require_image_config({run, io::refuse_in_file(path.string())});
  return run;
}

struct Plan {
  train::ImageRun run;
  experiments::DigitData data;
};

// Returns what the command line asks for. Reads the images and makes the model, so that bad input is found before
// anything is written.
Plan make_plan(TrainArguments a, torch::Device device) {
  Plan plan;
  plan.run.folder = a.resume.empty() ? a.out : a.resume;
  std::filesystem::path record;
  json recorded;
  if (!a.resume.empty()) {
    report_ignored_checkpoints(kTrainSmnist, plan.run.folder);
    record = record_of(plan.run.folder);
    recorded = recorded_run(record);
    a.run = recorded;
    for (const auto& set : a.given) set(a.run);
    io::require_same(a.run, recorded, kTrainSmnist, record.string());
    const json& data = recorded.at("data");
    if (!a.data_given) a.data = data.at("source").get<std::string>();
    if (!a.train_images_given) a.train_images = data.at("train_images").get<std::int64_t>();
    if (!a.test_images_given) a.test_images = data.at("test_images").get<std::int64_t>();
  } else {
    for (const auto& set : a.given) set(a.run);
  }
  plan.run.model = a.run.at("model");
  const auto config = nn::pixel_classifier_config_from_json(plan.run.model);
  nn::validate(config);
  train::require_training_memory(kTrainSmnist, "sizes hidden, layers", config.least_parameters(), device);
  plan.run.training =
      train::image_training_from_json(io::Fields(a.run, io::refuse_argument(kTrainSmnist)).object("training"));
  plan.run.checkpoint_every = a.checkpoint_every;
  train::validate(plan.run.training);
  experiments::make_digit_classifier(plan.run.model,
                                     plan.run.training.seed);  // throws where no model could be made of it
  plan.data = experiments::load_digits(a.data, a.train_images, a.test_images);
  plan.run.data = plan.data.description;
  if (recorded.is_null()) return plan;
  for (const char* count : {"train_images", "test_images"}) {  // before the digest, which follows from them
    io::require_same({{"data", {{count, plan.run.data.at(count)}}}},
                     {{"data", {{count, recorded.at("data").at(count)}}}}, kTrainSmnist, record.string());
  }
  return plan;
}

// Locks the folder of --out: a new one, or one in which the same run was killed before its first checkpoint.
io::FolderLock begin(const Plan& plan) {
  auto lock = io::prepare_output_folder(plan.run.folder, kTrainSmnist, kTrainingFile);
  const auto begun = plan.run.folder / kTrainingFile;
  const json run = train::description(plan.run);
  if (!exists(begun)) {
    io::write_file_atomically(begun, run.dump(2) + "\n");
  } else if (io::CheckpointFolder(plan.run.folder).latest()) {
    throw Error(kTrainSmnist, "--out", plan.run.folder.string() + ", which has a checkpoint",
                "a new or empty folder, or --resume in place of --out");
  } else {
    io::require_same(run, recorded_run(begun), kTrainSmnist, begun.string());
  }
  return lock;
}

void train_smnist(const TrainArguments& arguments) {
  if (arguments.out.empty() == arguments.resume.empty()) {
    throw Error(kTrainSmnist, "--out", arguments.out.empty() ? "nothing" : "both --out and --resume",
                "--out RUN for a new run, or --resume RUN to continue one");
  }
  const torch::Device device = choose_device(kTrainSmnist, arguments.device);
  const Plan plan = make_plan(arguments, device);
  ThreadPool& pool = use_threads(arguments.threads);
  const auto lock = arguments.resume.empty() ? begin(plan) : io::FolderLock(plan.run.folder, kTrainSmnist, "--resume");

  const std::int64_t batch = plan.run.training.batch_size;
  const std::int64_t steps = (plan.data.train.count + batch - 1) / batch;
  Progress progress(plan.run.model.at("mixer").get<std::string>(), steps, steps * plan.run.training.epochs);
  auto events = progress.events();
  events.stop = interrupted;
  watch_for_interrupts();
  const auto make = [&] { return experiments::make_digit_classifier(plan.run.model, plan.run.training.seed); };
  const auto trained = train::train_images(plan.run, make, plan.data.train, plan.data.test, pool, events, device);
  const std::string folder = shell_word(plan.run.folder.string());
  if (trained.end == train::RunEnd::stopped) {
    end_interrupted("Stopped and saved. To resume: efla train smnist --resume " + folder);
  }
  const auto metrics = io::read_json_lines(plan.run.folder / train::kMetricsFile);
  fmt::print("test accuracy {:.4f} on {} images\ncheckpoint    {}\n", metrics.back().at("accuracy").get<double>(),
             plan.data.test.count, io::CheckpointFolder(plan.run.folder).require_latest().path.string());
}

}  // namespace

void add_train(CLI::App& program) {
  auto* train = program.add_subcommand("train", "Train a model");
  train->require_subcommand(1);
  add_train_lm(*train);
  auto* command =
      train->add_subcommand("smnist", "A classifier of digits read pixel by pixel (section 5.1 of the paper)");
  auto arguments = std::make_shared<TrainArguments>();
  add_settings(*command, *arguments);
  auto* data = command->add_option("--data", arguments->data, "builtin, or a folder with MNIST's files");
  data->capture_default_str();
  auto* train_images =
      command->add_option("--train-images", arguments->train_images, "Number of images, from the first; 0: all");
  auto* test_images =
      command->add_option("--test-images", arguments->test_images, "Number of images, from the first; 0: all");
  command->add_option("--out", arguments->out, "Folder of the new run");
  command->add_option("--resume", arguments->resume,
                      "Folder of the run to continue, with the bits of an uninterrupted run");
  command
      ->add_option("--checkpoint-every", arguments->checkpoint_every, "Steps between checkpoints besides each epoch's")
      ->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()));
  add_device_option(*command, arguments->device);
  add_threads_option(*command, arguments->threads);
  command->callback([=] {
    arguments->data_given = data->count() > 0;
    arguments->train_images_given = train_images->count() > 0;
    arguments->test_images_given = test_images->count() > 0;
    name_options(kTrainSmnist, arguments->options, [&] { train_smnist(*arguments); });
  });
}

}  // namespace efla::cli
