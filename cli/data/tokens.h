// efla data tokenize and efla data verify.
#pragma once

#include <CLI/CLI.hpp>

namespace efla::cli {

// Adds both to the subcommand data.
void add_token_commands(CLI::App& data);

}  // namespace efla::cli
