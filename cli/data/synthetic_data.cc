#include "cli/data/synthetic_data.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/support/count_option.h"
#include "efla/data/synthetic/task.h"

namespace efla::cli {
namespace {

namespace synthetic = data::synthetic;

constexpr std::size_t kWidth = 100;  // of a line, in characters

struct ShowOptions {
  synthetic::Parameters parameters;
  std::string split = "train";
  std::uint64_t seed = 1;
  std::int64_t index = 0, count = 0;
};

// Prints pairs of rows, inputs above targets; a dot stands for no target.
void print_example(const synthetic::Task& task, const synthetic::Example& example) {
  std::vector<std::string> inputs, targets;
  std::size_t cell = 1;
  for (std::size_t t = 0; t < example.inputs.size(); ++t) {
    inputs.push_back(task.text(example.inputs[t]));
    targets.push_back(example.targets[t] == kIgnoreIndex ? "." : task.text(example.targets[t]));
    cell = std::max({cell, inputs.back().size(), targets.back().size()});
  }
  const std::string indent(8, ' ');
  const std::size_t columns = std::max<std::size_t>((kWidth - indent.size()) / (cell + 1), 1);
  for (std::size_t begin = 0; begin < inputs.size(); begin += columns) {
    const std::size_t end = std::min(begin + columns, inputs.size());
    for (const auto& [label, row] : {std::pair{"inputs  ", &inputs}, std::pair{"targets ", &targets}}) {
      std::string line = label;
      for (std::size_t t = begin; t < end; ++t) line += fmt::format("{:>{}} ", (*row)[t], cell);
      line.pop_back();
      fmt::print("{}\n", line);
    }
    if (end < inputs.size()) fmt::print("\n");
  }
}

void print_throughput(const synthetic::Task& task, const ShowOptions& options, data::Split split) {
  const auto start = std::chrono::steady_clock::now();
  std::int64_t tokens = 0;
  for (std::int64_t i = 0; i < options.count; ++i) {
    tokens += static_cast<std::int64_t>(synthetic::example(task, options.seed, split, i).inputs.size());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("{} examples in {:.3f} s on one thread: {:.0f} examples/s, {:.2f} million tokens/s\n", options.count,
             seconds, static_cast<double>(options.count) / seconds, static_cast<double>(tokens) / seconds / 1e6);
}

void show(std::string_view name, const ShowOptions& options) {
  const auto task = synthetic::make_task(name, options.parameters);
  const auto split = options.split == "train" ? data::Split::train : data::Split::test;
  const auto example = synthetic::example(task, options.seed, split, options.index);
  std::string sizes;
  for (const auto& [parameter, value] : task.parameters) sizes += fmt::format(", {} {:g}", parameter, value);
  const auto asked =
      std::count_if(example.targets.begin(), example.targets.end(), [](auto target) { return target != kIgnoreIndex; });
  fmt::print("{}{}; {} example {}, seed {}: {} tokens, {} targets\n", task.name, sizes, options.split, options.index,
             options.seed, example.inputs.size(), asked);
  print_example(task, example);
  if (options.count > 0) print_throughput(task, options, split);
}

}  // namespace

void add_show(CLI::App& data) {
  auto* command = data.add_subcommand("show", "Print an example of a synthetic task");
  command->require_subcommand(1);
  for (const auto& kind : synthetic::task_kinds()) {
    auto* task = command->add_subcommand(std::string(kind.name), std::string(kind.summary));
    const auto options = std::make_shared<ShowOptions>();
    for (const auto& parameter : kind.parameters) {
      auto& value = options->parameters[std::string(parameter.name)] = parameter.standard;
      task->add_option("--" + std::string(parameter.name), value, std::string(parameter.help))
          ->type_name(parameter.standard == std::floor(parameter.standard) ? "INT" : "FLOAT")
          ->capture_default_str();
    }
    task->add_option("--split", options->split, "Split: train or test")
        ->check(CLI::IsMember({"train", "test"}))
        ->capture_default_str();
    task->add_option("--seed", options->seed, "Seed of the examples")->check(seed_range())->capture_default_str();
    task->add_option("--index", options->index, "Number of the example")
        ->check(CLI::Range(0L, 1L << 53))
        ->capture_default_str();
    task->add_option("--count", options->count, "Draw this many examples and print the time")
        ->check(CLI::Range(0L, 1L << 53));
    task->callback([options, name = kind.name] { show(name, *options); });
  }
}

}  // namespace efla::cli
