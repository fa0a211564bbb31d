// What a result was computed with.
#pragma once

#include <nlohmann/json.hpp>

namespace efla::cli {

// version, commit, compiler, build_type, cpu, simd {target, supported}, threads, libtorch and blas (null: not built
// in), cuda.
nlohmann::ordered_json environment();

}  // namespace efla::cli
