// The machine and the libraries of a result, and the number of threads that they use.
#pragma once

#include <nlohmann/json.hpp>

namespace efla::bench {

// Adds to the program's environment: processors, threads, processor signature, OPENBLAS_CORETYPE, the version of ggml
// (null: not built in), load average at the start, time (UTC).
nlohmann::ordered_json machine(nlohmann::ordered_json environment, int threads);

void print_machine(const nlohmann::ordered_json& machine);

// Sets the threads of the operators, LibTorch and OpenBLAS. Throws Error unless in [1, 1024].
void use_threads(int threads);

// Sets the threads of OpenBLAS, which LibTorch does not control. Does nothing with another BLAS.
void use_blas_threads(int threads);

}  // namespace efla::bench
