// What a result was computed with.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace efla::cli {

// Returns version, commit, compiler, build_type, cpu, simd {target, supported}, threads, libtorch and blas (null: not
// built in), blas_core (the kernels that OpenBLAS has chosen; null: another BLAS), cuda (whether LibTorch can use a
// GPU), gpus [{name, memory_bytes, compute_capability}] that the operators can use.
nlohmann::ordered_json environment();

// Returns the command line of this process, as a shell reads it.
std::string command_line();

}  // namespace efla::cli
