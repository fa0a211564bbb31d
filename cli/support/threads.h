// The option --threads of the commands that compute.
#pragma once

#include <CLI/CLI.hpp>

#include "efla/base/device.h"
#include "efla/base/threads.h"

namespace efla::cli {

// Sets the number of threads of the operators (0: one per processor) and returns their pool. On a CPU it also sets how
// malloc keeps the tensors of a step, so it must be called before other threads are made.
ThreadPool& use_threads(int threads, const Device& device = {});

// Adds --threads, 0 to 1024.
inline void add_threads_option(
    CLI::App& command, int& threads,
    const char* description = "Threads; 0: one for each processor. Does not change results") {
  command.add_option("--threads", threads, description)->check(CLI::Range(0, 1024));
}

}  // namespace efla::cli
