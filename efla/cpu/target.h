// Which SIMD instruction sets the kernels have been built for and which one runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace efla::cpu {

// The instruction set that the kernels use now, for example "AVX2" or "AVX3" (Highway's names; AVX3 is AVX-512), or
// "AMX": AVX3, and for matrix products the processor's matrix unit.
std::string target_name();

// Whether target_name() is "AMX".
bool uses_matrix_unit();

// Those that this processor can run, best first.
std::vector<std::string> supported_targets();

// Restricts the kernels to one of supported_targets() ("" lifts that); throws Error for another name. For tests: it is
// process-wide and must not be called while a kernel runs.
void use_target(const std::string& name);

}  // namespace efla::cpu
