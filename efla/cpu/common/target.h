// The SIMD instruction sets for which the kernels are built, and the one that runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace efla::cpu {

// Returns the instruction set that the kernels use, for example "AVX2" or "AVX3" (Highway's names; AVX3 is AVX-512), or
// "AMX", which is AVX3 with AMX for matrix products.
std::string target_name();

// Returns whether target_name() is "AMX".
bool uses_amx();

// Returns whether the kernels use the products of bfloat16 of AVX-512 (VDPBF16PS).
bool uses_bfloat16();

// Returns the instruction sets that this processor supports, best first.
std::vector<std::string> supported_targets();

// Restricts the kernels to one of supported_targets(); "" removes the restriction. Throws Error for another name, and
// then there is no restriction. The function is for tests: it changes the whole process and must not be called while a
// kernel runs.
void use_target(const std::string& name);

}  // namespace efla::cpu
