// The machine and libraries that a result was measured with, and the number of threads they use.
#pragma once

#include <nlohmann/json.hpp>

namespace efla::bench {

// The program's environment and: threads used, processor signature, LibTorch's BLAS kernels (blas_core,
// OPENBLAS_CORETYPE), ggml's version (null: not built in), load average at the start, time (UTC).
nlohmann::ordered_json machine(nlohmann::ordered_json environment, int threads);

void print_machine(const nlohmann::ordered_json& machine);

// Threads of the operators, LibTorch and OpenBLAS alike. Throws Error unless in [1, 1024].
void use_threads(int threads);

// Those of OpenBLAS alone, of which LibTorch does not know; nothing happens with another BLAS.
void use_blas_threads(int threads);

}  // namespace efla::bench
