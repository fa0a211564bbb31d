// The option --threads of the commands that compute.
#pragma once

#include <CLI/CLI.hpp>

#include "efla/base/threads.h"

namespace efla::cli {

// Sets the number of threads, 0 for one per processor, of the operators too, and returns the pool that all of them use.
ThreadPool& use_threads(int threads);

void add_threads_option(CLI::App& command, int& threads);

}  // namespace efla::cli
