// The commands of efla-bench: what bench/README.md describes, and bench/results holds.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef EFLA_HAS_CUDA
#include "bench/cuda/suite.h"
#endif
#include "bench/machine.h"
#include "bench/model/generation.h"
#include "bench/model/gpu_model.h"
#include "bench/model/model_speed.h"
#include "bench/op/attention.h"
#include "bench/op/suite.h"
#include "bench/report.h"
#include "bench/serving.h"
#include "cli/commands.h"
#include "cli/support/device.h"
#include "cli/support/environment.h"
#include "cli/support/threads.h"
#include "cli/support/weights.h"
#include "efla/base/check.h"
#include "efla/base/error.h"
#include "efla/base/version.h"
#include "efla/io/json.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/ops/gpu.h"
#include "efla/rule/mixer_preset.h"
#include "experiments/stability/stability.h"

namespace efla::cli {
namespace {

struct OpArguments {
  int threads = 0;
  std::optional<int> reps;  // default: 7, on a GPU 30
  std::string filter, out, device = "cpu";
  bool scaling = false, json = false;
  std::int64_t tokens = 2048, heads = 0;  // heads 0: the default
};

// Writes results, each with its environment, to a file and to standard output, where wanted.
class Results {
 public:
  Results(const std::string& path, bool print, nlohmann::ordered_json environment)
      : file_(path.empty() ? nullptr : std::make_unique<io::JsonLinesWriter>(path)),
        print_(print),
        environment_(std::move(environment)) {}

  void write(nlohmann::ordered_json line) const {
    line["environment"] = environment_;
    if (file_) file_->write(line);
    if (print_) fmt::print("{}\n", io::to_json_line(line));
    std::fflush(stdout);
  }

 private:
  std::unique_ptr<io::JsonLinesWriter> file_;
  bool print_;
  nlohmann::ordered_json environment_;
};

nlohmann::ordered_json surroundings(int threads, const c10::Device& device = c10::kCPU) {
  bench::use_threads(threads);
  auto machine = bench::machine(environment(), threads);
  if (device.is_cuda()) machine["gpu"] = find_gpus().found[static_cast<std::size_t>(device.index())].name;
  machine["command"] = command_line();
  return machine;
}

std::vector<bench::Case> cases_of(const OpArguments& arguments) {
  if (arguments.scaling) return bench::scaling_cases(arguments.heads > 0 ? arguments.heads : 2);
  return bench::cases(arguments.tokens, arguments.heads > 0 ? arguments.heads : 16);
}

// Throws Error with examples of names unless a contender's name contains the filter.
void require_known(const std::string& filter, const std::vector<bench::Case>& cases) {
  std::vector<std::string> names, parts;
  for (const auto& c : cases) {
    for (auto& name : bench::contender_names(c)) names.push_back(std::move(name));
  }
  for (const auto& name : names) {
    if (name.find(filter) != std::string::npos) return;
    for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = name.find('/', begin);
      const auto part = name.substr(begin, end == std::string::npos ? end : end - begin);
      if (std::find(parts.begin(), parts.end(), part) == parts.end()) parts.push_back(part);
    }
  }
  throw Error("bench op", "--filter", "'" + filter + "'",
              fmt::format("a part of a name such as {}; names are made of {}", names.front(), fmt::join(parts, "; ")));
}

void bench_op(const OpArguments& arguments) {
  const auto start = std::chrono::steady_clock::now();
  const int threads = arguments.threads == 0 ? available_processors() : arguments.threads;
  const auto cases = cases_of(arguments);
  require_known(arguments.filter, cases);
  const auto machine = surroundings(threads);
  const Results results(arguments.out, arguments.json, machine);
  if (!arguments.json) bench::print_machine(machine);

  std::vector<bench::Measured> all;
  std::string wrong;
  for (const auto& c : cases) {
    auto measured = bench::measure(c, arguments.filter, arguments.reps.value_or(7));
    if (measured.results.empty()) continue;
    if (!arguments.json && !arguments.scaling) bench::print_case(measured);
    for (const auto& line : bench::to_json(measured)) results.write(line);
    for (const auto& r : measured.results) {
      if (!r.fault.empty()) wrong += (wrong.empty() ? "" : "; ") + c.name() + "/" + r.contender + ": " + r.fault;
    }
    all.push_back(std::move(measured));
  }
  if (!arguments.json && arguments.scaling) bench::print_scaling(all);
  if (!arguments.json) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    fmt::print("\n{} case{} in {:.0f} s\n", all.size(), all.size() == 1 ? "" : "s", seconds.count());
  }
  if (!wrong.empty()) throw std::runtime_error("bench op: wrong, and so without a time: " + wrong);
}

// Writes one JSON line per result to standard output and to the file of --out.
void bench_op_on_gpu(const OpArguments& arguments) {
#ifdef EFLA_HAS_CUDA
  const Gpus gpus = find_gpus();
  if (gpus.found.empty()) throw Error("bench op", "--device", "cuda", "a machine with a GPU: " + gpus.absence);
  const std::unique_ptr<io::JsonLinesWriter> file =
      arguments.out.empty() ? nullptr : std::make_unique<io::JsonLinesWriter>(arguments.out);
  bench::cuda::time_gpu({arguments.filter, arguments.reps.value_or(30), arguments.scaling, std::string(commit()),
                         gpus.found.front().name},
                        [&](const std::string& line) {
                          fmt::print("{}\n", line);
                          std::fflush(stdout);
                          if (file) file->write(nlohmann::ordered_json::parse(line));
                        });
#else
  static_cast<void>(arguments);
  throw Error("bench op", "--device", "cuda", "a program built where nvcc was found");
#endif
}

void add_op(CLI::App& program) {
  auto* command = program.add_subcommand("op", "Time the operator beside its peers and the machine's limits");
  auto arguments = std::make_shared<OpArguments>();
  command->add_flag("--json", arguments->json, "Print JSON lines, one per contender, instead of tables");
  command->add_option("--out", arguments->out, "Append the JSON lines to this file");
  command->add_option("--filter", arguments->filter,
                      "Only contenders whose name contains this text, such as float32/d128/forward/chunk");
  command
      ->add_option(
          "--device", arguments->device,
          "cpu, or cuda: the kernels on a GPU, replayed in a CUDA graph and launched one by one, as JSON lines")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command
      ->add_option("--reps", arguments->reps,
                   "Rounds, each of which measures every contender (7); with --device cuda replays (30)")
      ->check(CLI::Range(1, 10000));
  add_threads_option(*command, arguments->threads,
                     "Threads of the operator, LibTorch, its BLAS and ggml; 0: one per processor");
  auto* scaling = command->add_flag("--scaling", arguments->scaling,
                                    "Measure T from 1024 to 131072 (with --device cuda 262144) instead, without peers");
  command->add_option("--tokens", arguments->tokens, "T of forward and backward")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str()
      ->excludes(scaling);
  command->add_option("--heads", arguments->heads, "H (16; with --scaling 2)")->check(CLI::Range(1, 1 << 16));
  command->callback([arguments, command] {
    if (arguments->device == "cpu") return bench_op(*arguments);
    for (const char* option : {"--threads", "--tokens", "--heads"}) {
      if (command->count(option) > 0) throw Error("bench op", option, "with --device cuda", "only with --device cpu");
    }
    bench_op_on_gpu(*arguments);
  });
}

struct AttentionArguments {
  int threads = 0, reps = 7;
  std::string filter, out;
};

void bench_attention(const AttentionArguments& arguments) {
  auto cases = bench::attention_cases();
  std::string names;
  for (const auto& c : cases) names += (names.empty() ? "" : ", ") + c.name();
  std::erase_if(cases, [&](const auto& c) { return c.name().find(arguments.filter) == std::string::npos; });
  if (cases.empty())
    throw Error("bench attention", "--filter", "'" + arguments.filter + "'", "a part of one of " + names);
  const auto machine = surroundings(arguments.threads == 0 ? available_processors() : arguments.threads);
  const Results results(arguments.out, false, machine);
  bench::print_machine(machine);
  bench::print_attention_header();
  for (const auto& c : cases) {
    const auto measured = bench::measure_attention(c, arguments.reps);
    bench::print_attention(measured);
    results.write(bench::to_json(measured));
  }
}

void add_attention(CLI::App& program) {
  auto* command = program.add_subcommand(
      "attention", "Time softmax attention of prompts and of decoded tokens beside the machine's limits");
  auto arguments = std::make_shared<AttentionArguments>();
  command->add_option("--filter", arguments->filter,
                      "Only cases whose name contains this text, such as bfloat16/d256/decode");
  command->add_option("--reps", arguments->reps, "Rounds, each of which measures the case and the limits")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  add_threads_option(*command, arguments->threads);
  command->add_option("--out", arguments->out, "Append the results to this file as JSON lines");
  command->callback([arguments] { bench_attention(*arguments); });
}

struct StabilityArguments {
  std::int64_t tokens = 100'000;
  std::string out;
};

void bench_stability(const StabilityArguments& arguments) {
  const auto machine = surroundings(1);
  const Results results(arguments.out, false, machine);
  bench::print_machine(machine);
  experiments::measure_stability(arguments.tokens, [&](const auto& line) { results.write(line); });
}

void add_stability(CLI::App& program) {
  auto* command = program.add_subcommand(
      "stability", "Measure how the state grows over many tokens for each step size, key length and precision");
  auto arguments = std::make_shared<StabilityArguments>();
  command->add_option("--tokens", arguments->tokens, "Tokens per head")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--out", arguments->out, "Append the results to this file as JSON lines");
  command->callback([arguments] { bench_stability(*arguments); });
}

// Adds MODEL, which takes the place of the options for models with random weights.
void add_model_folder(CLI::App& command, bench::BenchModel& model, CLI::Option* preset, CLI::Option* mixer = nullptr) {
  auto* folder = command.add_option("MODEL", model.folder, "Folder of a model, instead of random weights");
  folder->type_name("FOLDER")->excludes(preset);
  if (mixer != nullptr) folder->excludes(mixer);
}

// Returns the device for a preset or for the model of a folder.
c10::Device device_for(const std::string& command, const std::string& device, const bench::BenchModel& model) {
  return model.folder.empty() ? choose_device(command, device) : choose_model_device(command, device, model.folder);
}

struct GenerateArguments {
  bench::GenerationOptions options{.model = {.preset = "efla-1m", .mixer = "efla"}, .longest = 1 << 20, .draws = 200};
  std::string device = "cpu", out;
};

// Throws Error for weights that the device does not take.
void require_weights(const std::string& command, const std::string& weights, const c10::Device& device) {
  if (!nn::is_integer(nn::parse_weight_type(weights)) || device.is_cpu()) return;
  throw Error(command, "--weights", weights + " on a GPU", "float32, bfloat16, or --device cpu");
}

void bench_generate(GenerateArguments& arguments) {
  auto& options = arguments.options;
  options.model.check();  // report mistakes before printing anything
  const auto device = device_for("bench generate", arguments.device, options.model);
  require_weights("bench generate", options.weights, device);
  Require("bench generate")(options.texts == 1 || device.is_cuda(), "--texts",
                            std::to_string(options.texts) + " on a CPU", "--device cuda, or efla bench serve");
  if (options.threads == 0) options.threads = available_processors();
  const auto machine = surroundings(options.threads, device);
  const Results results(arguments.out, false, machine);
  bench::print_machine(machine);
  bench::measure_generation(options, device, [&](const auto& line) { results.write(line); });
}

void add_generation(CLI::App& program) {
  auto* command = program.add_subcommand(
      "generate", "Measure memory and time per token of a language model against the length of the context");
  auto arguments = std::make_shared<GenerateArguments>();
  auto& options = arguments->options;
  auto* preset = command->add_option("--preset", options.model.preset, "Preset of the model, which has random weights");
  auto* mixer = command->add_option("--mixer", options.model.mixer, "Mixer of the model");
  add_model_folder(*command, options.model, preset->capture_default_str(), mixer->capture_default_str());
  command->add_option("--longest", options.longest, "Longest context in tokens, after 1024, 4096, ...")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--draws", options.draws, "Tokens drawn per text at each context")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--texts", options.texts, "Texts that are continued together, on a GPU")
      ->check(CLI::Range(1, 1 << 12))
      ->capture_default_str();
  add_weights_option(*command, options.weights);
  add_kv_cache_option(*command, options.kv_cache_type);
  add_device_option(*command, arguments->device);
  add_threads_option(*command, options.threads);
  command->add_option("--out", arguments->out, "Append the results to this file as JSON lines");
  command->callback([arguments] { bench_generate(*arguments); });
}

struct ServeArguments {
  bench::ServingOptions options;
  std::vector<std::string> weights;
  std::string device = "cpu", out;
};

void bench_serve(ServeArguments& arguments) {
  auto& options = arguments.options;
  options.model.check();  // report mistakes before printing anything
  const auto device = device_for("bench serve", arguments.device, options.model);
  options.on_gpu = device.is_cuda();
  if (!arguments.weights.empty()) {
    options.weights = arguments.weights;
  } else if (options.on_gpu) {
    options.weights = {"float32", "bfloat16"};
  }
  for (const auto& weights : options.weights) require_weights("bench serve", weights, device);
  if (options.threads == 0) options.threads = available_processors();
  const auto machine = surroundings(options.threads, device);
  const Results results(arguments.out, false, machine);
  bench::print_machine(machine);
  bench::measure_serving(options, [&](const auto& line) { results.write(line); });
}

void add_serving(CLI::App& program) {
  auto* command = program.add_subcommand("serve", "Measure replies to several texts at once, and stored sessions");
  auto arguments = std::make_shared<ServeArguments>();
  auto& options = arguments->options;
  auto* preset = command->add_option("--preset", options.model.preset, "Preset of the model, which has random weights");
  add_model_folder(*command, options.model, preset->capture_default_str());
  command->add_option("--sessions", options.sessions, "Texts at once, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 12))
      ->capture_default_str();
  command
      ->add_option("--weights", arguments->weights,
                   "How weights are stored, separated by commas\n"
                   "(default: float32,bfloat16,int8; on a GPU float32,bfloat16)")
      ->delimiter(',');
  command->add_option("--tokens", options.tokens, "Tokens of each reply")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command->add_option("--reps", options.rounds, "Rounds, each of which measures every combination")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  add_device_option(*command, arguments->device);
  add_threads_option(*command, options.threads);
  command->add_option("--out", arguments->out, "Append the results to this file as JSON lines");
  command->callback([arguments] { bench_serve(*arguments); });
}

struct ModelArguments {
  bench::ModelSpeedOptions options;
  std::optional<std::string> model;
  std::optional<std::int64_t> length, batch;
  std::string mixer = "efla", device = "cpu";
  int threads = 0;
  std::string out;
};

// Throws Error unless a language model has this preset. On a CPU the message names the classifier too.
void require_preset(const std::string& model, bool on_cpu) {
  try {
    nn::language_model_preset(model);
  } catch (const Error& error) {
    throw Error("bench model", "--model", error.got(),
                (on_cpu ? std::string(bench::kPixelClassifier) + ", or " : "") + error.expected());
  }
}

void bench_model_on_gpu(const ModelArguments& arguments) {
  bench::GpuModelOptions options;
  options.model = arguments.model.value_or(options.model);
  options.mixer = arguments.mixer;
  options.length = arguments.length.value_or(options.length);
  options.batch = arguments.batch.value_or(options.batch);
  options.rounds = arguments.options.rounds;
  require_preset(options.model, /*on_cpu=*/false);  // report mistakes at once
  mixer_preset(options.mixer);
  const int threads = arguments.threads == 0 ? available_processors() : arguments.threads;
  use_threads(threads);
  const auto machine = surroundings(threads, choose_device("bench model", arguments.device));
  const Results results(arguments.out, false, machine);
  bench::measure_model_on_gpu(options, [&](const auto& line) { results.write(line); });
}

void bench_model(ModelArguments& arguments) {
  if (arguments.device == "cuda") return bench_model_on_gpu(arguments);
  const Require require("bench model");
  require(!arguments.batch, "--batch", arguments.batch.value_or(0), "none on the CPU");
  require(arguments.mixer == "efla", "--mixer", arguments.mixer, "efla on the CPU");
  auto& options = arguments.options;
  options.model = arguments.model.value_or(options.model);
  if (options.model == bench::kPixelClassifier) {
    if (arguments.length)
      throw Error("bench model", "--length", std::to_string(*arguments.length), "none: images have 784 tokens");
  } else {
    require_preset(options.model, /*on_cpu=*/true);  // report a mistake at once
    options.length = arguments.length.value_or(options.length);
  }
  options.threads = arguments.threads == 0 ? available_processors() : arguments.threads;
  use_threads(options.threads);
  const auto machine = surroundings(options.threads);
  const Results results(arguments.out, false, machine);
  bench::print_machine(machine);
  bench::measure_model(options, [&](const auto& line) { results.write(line); });
}

void add_model(CLI::App& program) {
  auto* command = program.add_subcommand(
      "model", "Measure training and generating with a whole model beside eager LibTorch, and where the time goes");
  auto arguments = std::make_shared<ModelArguments>();
  command->add_option("--model", arguments->model,
                      std::string("Preset of a language model (efla-20m; efla-340m on a GPU), or ") +
                          bench::kPixelClassifier + " on the CPU");
  command->add_option("--mixer", arguments->mixer, "Mixer of a language model on a GPU")->capture_default_str();
  command->add_option("--device", arguments->device, "cpu: beside eager LibTorch; cuda: with memory and idle time")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command
      ->add_option("--length", arguments->length, "Tokens of a language model's training sequence (512; 2048 on a GPU)")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--batch", arguments->batch, "Sequences of a training step on a GPU (16)")
      ->check(CLI::Range(1, 1 << 16));
  command->add_option("--reps", arguments->options.rounds, "Rounds, each of which measures both")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  add_threads_option(*command, arguments->threads);
  command->add_option("--out", arguments->out, "Append the results to this file as JSON lines");
  command->callback([arguments] { bench_model(*arguments); });
}

}  // namespace

void add_benchmarks(CLI::App& program) {
  add_op(program);
  add_attention(program);
  add_stability(program);
  add_generation(program);
  add_serving(program);
  add_model(program);
}

}  // namespace efla::cli
