// The subcommands, one file each: add_NAME gives the program a subcommand whose callback runs it. A callback throws
// efla::Error, efla::IoError or std::exception; support/program.cc turns these into a message and an exit code.
#pragma once

#include <CLI/CLI.hpp>

namespace efla::cli {

void add_info(CLI::App& program);
void add_apply(CLI::App& program);
void add_data(CLI::App& program);
void add_report(CLI::App& program);
void add_train(CLI::App& program);
void add_train_lm(CLI::App& train);  // below train
void add_eval(CLI::App& program);
void add_eval_lm(CLI::App& eval);  // of the subcommand eval
void add_generate(CLI::App& program);
void add_serve(CLI::App& program);
void add_reproduce(CLI::App& program);
void add_bench(CLI::App& program);       // names efla-bench, which main.cc runs
void add_benchmarks(CLI::App& program);  // the commands of efla-bench
void add_checkpoints(CLI::App& program);

}  // namespace efla::cli
