// efla_bench_generate: memory and time a token against the length of the context (docs/generation.md).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/generation.h"
#include "bench/machine.h"
#include "bench/program.h"
#include "efla/base/error.h"
#include "efla/base/threads.h"
#include "efla/io/json.h"
#include "efla/nn/layers/mixer_preset.h"
#include "efla/nn/models/language_model_json.h"

namespace efla::bench {
namespace {

constexpr std::int64_t kShortest = 1024;

struct Arguments {
  std::string preset = "efla-1m", mixer = "efla", out;
  std::int64_t longest = 1 << 20, draws = 200;
  int threads = available_processors();
};

bool run(const Arguments& arguments, const std::string& command) {
  nn::mixer_preset(arguments.mixer);
  auto config = nn::language_model_preset(arguments.preset);
  config.mixer = arguments.mixer;
  const nn::LanguageModel model(config, nn::Initialiser(1));
  std::vector<std::int64_t> contexts;
  for (std::int64_t context = kShortest; context <= arguments.longest; context *= 4) contexts.push_back(context);
  if (contexts.back() != arguments.longest) contexts.push_back(arguments.longest);

  use_threads(arguments.threads);
  auto environment = machine(arguments.threads);
  environment["command"] = command;
  print_machine(environment);
  const auto out = arguments.out.empty() ? nullptr : std::make_unique<io::JsonLinesWriter>(arguments.out);
  fmt::print("\n{}, {}, {} parameters\n", arguments.preset, arguments.mixer, model.parameter_count());
  fmt::print("{:>9}{:>18}{:>30}{:>14}{:>14}\n", "context", "prefill tokens/s", "ms a token (least, 90 %)",
             "state bytes", "resident MB");
  measure_generation(model, contexts, arguments.draws, [&](const AtContext& at) {
    fmt::print("{:>9}{:>18.0f}{:>10.3f} ({:.3f}, {:.3f}){:>19}{:>14.1f}\n", at.context, at.prefill_tokens_per_s,
               at.median, at.min, at.p90, at.state_bytes, static_cast<double>(at.resident_bytes) / 1e6);
    std::fflush(stdout);
    if (!out) return;
    out->write({{"study", "generation"},
                {"preset", arguments.preset},
                {"mixer", arguments.mixer},
                {"parameters", model.parameter_count()},
                {"context", at.context},
                {"prefill_tokens_per_s", at.prefill_tokens_per_s},
                {"ms_per_token", {{"median", at.median}, {"min", at.min}, {"p90", at.p90}}},
                {"draws", arguments.draws},
                {"state_bytes", at.state_bytes},
                {"resident_bytes", at.resident_bytes},
                {"environment", environment}});
  });
  return true;
}

}  // namespace
}  // namespace efla::bench

int main(int argc, char** argv) {
  CLI::App program("Measures memory and time a token of generation against the length of the context");
  efla::bench::Arguments arguments;
  program.add_option("--preset", arguments.preset, "Size of the model, of random weights")->capture_default_str();
  program.add_option("--mixer", arguments.mixer, "Its mixer")->capture_default_str();
  program.add_option("--longest", arguments.longest, "Longest context, in tokens; the others are 1024, 4096, ...")
      ->check(CLI::Range(1024, 1 << 24))
      ->capture_default_str();
  program.add_option("--draws", arguments.draws, "Tokens drawn at each context")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  program.add_option("--threads", arguments.threads, "Threads of the operators, LibTorch and OpenBLAS")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  program.add_option("--out", arguments.out, "Append the results to this file as JSON lines");
  return efla::bench::run_program(program, argc, argv,
                                  [&](const std::string& command) { return efla::bench::run(arguments, command); });
}
