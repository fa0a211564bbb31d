// The command line and the exit code of the programs of this folder.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

namespace efla::bench {

// Parses and runs: 0, or 1 where `run` returns false or fails, or 2 for a user's mistake, with a line on stderr. `run`
// gets the command as it was typed.
int run_program(CLI::App& program, int argc, char** argv, const std::function<bool(const std::string& command)>& run);

}  // namespace efla::bench
