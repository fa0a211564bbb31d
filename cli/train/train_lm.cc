// efla train lm: a language model, in a folder of its own, by one process or several.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/support/device.h"
#include "cli/support/ignored_checkpoints.h"
#include "cli/support/interrupt.h"
#include "cli/support/moving_average.h"
#include "cli/support/print.h"
#include "cli/support/progress_bar.h"
#include "cli/support/threads.h"
#include "cli/train/lm_run.h"
#include "efla/base/error.h"
#include "efla/base/shell_word.h"
#include "efla/base/version.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"
#include "efla/io/folder_lock.h"
#include "efla/io/json.h"
#include "efla/io/sha256.h"
#include "efla/train/checkpoint.h"
#include "efla/train/distributed/process_group.h"
#include "efla/train/training_memory.h"

namespace efla::cli {
namespace {

using nlohmann::json;

struct TrainLmArguments {
  std::string config, out, resume, device = "auto";
  std::vector<std::string> settings;
  int threads = 0;
};

class LmProgress {
 public:
  explicit LmProgress(std::int64_t steps) : bar_("train"), steps_(steps) {}

  train::RunEvents events() {
    train::RunEvents events;
    events.step = [this](const train::StepResult& result, double rate) { step(result, rate); };
    events.evaluating = [this](std::int64_t) { bar_.draw(1.0, "evaluating", false); };
    events.evaluated = [this](std::int64_t step, const nlohmann::ordered_json& e) {
      bar_.line(fmt::format("step {}: {}", step, text(e)));
    };
    events.sampled = [this](std::int64_t step, const std::string& text) {
      bar_.line(fmt::format("step {}: {}", step, json(text).dump(-1, ' ', false, json::error_handler_t::replace)));
    };
    return events;
  }

  static std::string text(const nlohmann::ordered_json& e) {
    std::string text = fmt::format("validation perplexity {:.3f}, loss {:.4f}", std::exp(e.at("loss").get<double>()),
                                   e.at("loss").get<double>());
    if (e.contains("bits_per_byte")) text += fmt::format(", {:.4f} bits per byte", e.at("bits_per_byte").get<double>());
    return text;
  }

 private:
  static constexpr std::int64_t kPlainLines = 100;

  void step(const train::StepResult& result, double tokens_per_second) {
    loss_.add(result.loss);
    tokens_per_second_.add(tokens_per_second);
    seconds_per_step_.add(static_cast<double>(result.step_examples) / tokens_per_second);
    const bool plain_line =
        result.step == 1 || result.step * kPlainLines / steps_ != (result.step - 1) * kPlainLines / steps_;
    bar_.draw(static_cast<double>(result.step) / static_cast<double>(steps_),
              fmt::format("step {}  loss {:.4f}  {:.0f} tokens/s  {} left", result.step, loss_.value(),
                          tokens_per_second_.value(),
                          duration(seconds_per_step_.value() * static_cast<double>(steps_ - result.step))),
              plain_line);
  }

  ProgressBar bar_;
  std::int64_t steps_;
  MovingAverage loss_, tokens_per_second_, seconds_per_step_;
};

std::string name_of(torch::Device device) { return device.is_cpu() ? "cpu" : "cuda"; }

// Returns the number of threads of this process: by default an equal part of the processors per process of this
// machine.
int threads_of(int asked) {
  if (asked > 0) return asked;
  int processes = 1;
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    if (const char* text = std::getenv(name)) processes = std::max(processes, std::atoi(text));
  }
  return std::max(1, available_processors() / processes);
}

// Returns the file that describes the run: the one of the command line, or the one in the folder of a resumed run.
std::filesystem::path configuration_file(const TrainLmArguments& a) {
  return a.config.empty() ? std::filesystem::path(a.resume) / train::kRunFile : std::filesystem::path(a.config);
}

json asked_configuration(const TrainLmArguments& a) {
  if (a.out.empty() == a.resume.empty()) {
    throw Error(kTrainLm, "--out", a.out.empty() ? "nothing" : "both --out and --resume",
                "--out RUN for a new run, or --resume RUN to continue one");
  }
  if (a.config.empty() && a.resume.empty()) throw Error(kTrainLm, "CONFIG", "nothing", "a configuration's file");
  return a.config.empty() ? resumed_configuration(configuration_file(a), a.settings)
                          : read_configuration(a.config, a.settings);
}

// Returns the fields of an asked configuration, with the names that they have in their file.
io::Fields fields_of(const json& config, const TrainLmArguments& a) {
  const std::string file = configuration_file(a).string() + (a.settings.empty() ? "" : " with --set");
  return {config, io::refuse_in_file(file), a.config.empty() ? "config" : ""};
}

// Throws Error unless a resumed run has the configuration and the data that it began with.
void require_same_run(const std::filesystem::path& folder, const json& config, const json& data) {
  const auto path = folder / train::kRunFile;
  const json recorded = io::read_json(path);
  const io::Fields fields(recorded, io::refuse_in_file(path.string()));
  io::require_same(train::without_places(config), train::without_places(fields.object("config").content()), kTrainLm,
                   path.string());
  io::require_same({{"data", data}}, {{"data", fields.object("data").content()}}, kTrainLm, path.string());
}

void print_summary(const std::filesystem::path& folder) {
  const auto path = folder / train::kMetricsFile;
  const auto metrics = io::read_json_lines(path);
  const auto last = [&](const char* event) {
    return std::find_if(metrics.rbegin(), metrics.rend(), [&](const json& line) { return line.at("event") == event; });
  };
  if (const auto step = last("step"); step != metrics.rend()) {
    fmt::print("steps       {}, {} tokens, {:.0f} s\n", step->at("step").get<std::int64_t>(),
               step->at("tokens").get<std::int64_t>(), step->at("seconds").get<double>());
  }
  if (const auto line = last("evaluation"); line != metrics.rend()) {
    const io::Fields evaluation(*line, io::refuse_in_file(path.string(), "the last evaluation: "));
    const double loss = evaluation.get<double>("loss");
    const auto bits = evaluation.find<double>("bits_per_byte");
    fmt::print("validation  perplexity {:.3f}{}\n", std::exp(loss),
               bits ? fmt::format(", {:.4f} bits per byte", *bits) : "");
  }
  fmt::print("checkpoint  {}\n", io::CheckpointFolder(folder).latest()->path.string());
}

std::filesystem::path folder_of(const TrainLmArguments& a) { return a.resume.empty() ? a.out : a.resume; }

train::RunEnd train_with(const TrainLmArguments& a, LmSetup& setup, train::ProcessGroup& group, torch::Device device) {
  const auto folder = folder_of(a);
  const auto& options = setup.options().training;
  train::require_training_memory(kTrainLm, "sizes vocab_size, hidden_size, num_hidden_layers", setup.least_parameters(),
                                 device, group.size());
  const int threads = threads_of(a.threads);
  ThreadPool& pool = use_threads(threads);
  const std::int64_t micro_batches = options.rows_per_step() / options.micro_batch / group.size();
  const auto copies = static_cast<int>(std::clamp<std::int64_t>(micro_batches, 1, device.is_cpu() ? threads : 1));
  train::LmTask task([&] { return setup.make_replica(); }, setup.run_data(), options, group, device, setup.files());
  train::DataParallel model(
      copies, [&] { return task.add_copy(); }, pool, device, options.precision);
  std::optional<io::FolderLock> lock;  // rank 0 holds it for all ranks
  if (group.rank() == 0 && !a.resume.empty()) {
    lock.emplace(folder, kTrainLm, "--resume");
    report_ignored_checkpoints(kTrainLm, folder);
    update_places(folder, setup);
    if (setup.run_options().sample_every != options.sample_every) {
      print_or_drop(stderr,
                    "efla: train lm: no samples: training.sample_prompt is empty, and the tokenizer has no bos\n");
    }
  }
  if (group.rank() == 0 && a.resume.empty()) {
    lock.emplace(io::prepare_output_folder(folder, kTrainLm));
    write_run_file(folder, setup, group.size(), threads, name_of(device));
  }
  LmProgress progress(options.total_steps());
  auto events = group.rank() == 0 ? progress.events() : train::RunEvents{};
  events.stop = interrupted;
  const train::Run run{folder, setup.full(), setup.run_options()};
  const auto end = train::train_in_folder(run, task, model, train::update_options(options), group, events);
  group.shutdown();
  return end;
}

// What the ranks must agree on before they train together.
json description(const TrainLmArguments& a, const LmSetup& setup, torch::Device device) {
  json description = setup.full();
  description["tokens"] = setup.data_description();
  description["program"] = std::string(version()) + " " + std::string(commit());
  description["--device"] = name_of(device);
  description["--resume"] =
      a.resume.empty() ? json() : json(io::sha256(io::read_file(std::filesystem::path(a.resume) / train::kRunFile)));
  return description;
}

std::unique_ptr<train::ProcessGroup> join(const TrainLmArguments& a, const LmSetup& setup,
                                          const train::RankEnvironment& environment, torch::Device device) {
  try {
    return train::ProcessGroup::join(environment, device, description(a, setup, device), interrupted);
  } catch (const Stopped&) {
    end_interrupted("Stopped while waiting for the other ranks; nothing was written.");
  }
}

void train_lm(const TrainLmArguments& a) {
  const json config = asked_configuration(a);
  const auto environment = train::RankEnvironment::read();
  LmSetup setup(fields_of(config, a), !a.resume.empty());
  if (!a.resume.empty()) require_same_run(a.resume, setup.full(), setup.data_description());
  const torch::Device device = choose_device(kTrainLm, a.device, environment.local_rank);
  watch_for_interrupts();
  const auto group = join(a, setup, environment, device);
  auto end = train::RunEnd::finished;
  try {
    end = train_with(a, setup, *group, device);
  } catch (const std::exception& error) {
    group->shutdown(error.what());
    throw;
  }
  const auto folder = folder_of(a);
  if (end == train::RunEnd::stopped) {
    end_interrupted("Stopped and saved. To resume: efla train lm --resume " + shell_word(folder.string()));
  }
  if (group->rank() == 0) print_summary(folder);
}

}  // namespace

void add_train_lm(CLI::App& train) {
  auto* command = train.add_subcommand("lm", "A language model, from token shards (section 5.2 of the paper)");
  auto arguments = std::make_shared<TrainLmArguments>();
  command->add_option("CONFIG", arguments->config, "TOML file with tables [model], [data] and [training]");
  command->add_option("--out", arguments->out, "Folder of the new run");
  command->add_option("--resume", arguments->resume,
                      "Folder of the run to continue, with the bits of an uninterrupted run");
  command
      ->add_option("--set", arguments->settings,
                   "TABLE.KEY=VALUE in place of the file's; may be given repeatedly. With --resume only data.train, "
                   "data.validation and data.tokenizer, for data that has moved")
      ->allow_extra_args(false)
      ->take_all();
  add_device_option(*command, arguments->device);
  add_threads_option(*command, arguments->threads,
                     "Threads of this process; 0: its part of the machine's processors. Does not change results");
  command->callback([=] { train_lm(*arguments); });
}

}  // namespace efla::cli
