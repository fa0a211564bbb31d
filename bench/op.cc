// efla_bench_op: times the operator against an eager LibTorch form and the machine's ceilings (bench/README.md).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "bench/program.h"
#include "bench/report.h"
#include "bench/suite.h"
#include "efla/base/error.h"
#include "efla/base/threads.h"
#include "efla/io/json.h"

namespace efla::bench {
namespace {

struct Options {
  int threads = available_processors();
  int reps = 7;
  std::string filter, out;
  bool scaling = false;
  std::int64_t tokens = 2048, heads = 0;
};

void add_options(CLI::App& program, Options& options) {
  program.add_option("--threads", options.threads, "Threads of the operator, LibTorch and its BLAS")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  program.add_option("--reps", options.reps, "Rounds in which every contender has a turn")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  program.add_option("--filter", options.filter,
                     "Only contenders whose name holds this text; a name is for example float32/d128/forward/chunk");
  program.add_option("--out", options.out, "Append the results to this file as JSON lines");
  auto* scaling = program.add_flag("--scaling", options.scaling, "Instead, T from 1024 to 131072 with 2 heads");
  program.add_option("--tokens", options.tokens, "T of forward and backward")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str()
      ->excludes(scaling);
  program.add_option("--heads", options.heads, "H (16; with --scaling 2)")->check(CLI::Range(1, 1 << 16));
}

// Whether every contender was right.
bool run(const Options& options, const std::string& command) {
  use_threads(options.threads);
  auto environment = machine(options.threads);
  environment["command"] = command;
  const auto out = options.out.empty() ? nullptr : std::make_unique<io::JsonLinesWriter>(options.out);
  print_machine(environment);
  const std::int64_t heads = options.heads > 0 ? options.heads : options.scaling ? 2 : 16;
  std::vector<Measured> all;
  for (const Case& c : options.scaling ? scaling_cases(heads) : cases(options.tokens, heads)) {
    Measured measured = measure(c, options.filter, options.reps);
    if (measured.results.empty()) continue;
    if (!options.scaling) print_case(measured);
    for (auto& line : to_json(measured)) {
      line["environment"] = environment;
      if (out) out->write(line);
    }
    all.push_back(std::move(measured));
  }
  if (all.empty()) {
    throw Error("efla_bench_op", "--filter", "'" + options.filter + "'",
                "a part of a name such as float32/d128/forward/chunk");
  }
  if (options.scaling) print_scaling(all);
  bool right = true;
  for (const Measured& m : all) {
    for (const Result& r : m.results) right = right && r.fault.empty();
  }
  return right;
}

}  // namespace
}  // namespace efla::bench

int main(int argc, char** argv) {
  CLI::App program("Times the operator against an eager LibTorch form and the machine's ceilings");
  efla::bench::Options options;
  add_options(program, options);
  return efla::bench::run_program(program, argc, argv,
                                  [&](const std::string& command) { return efla::bench::run(options, command); });
}
