// Limits that the caller has set (ulimit) and under which LibTorch fails.
#pragma once

#include <string>

namespace efla::cli {

// Returns what a program that loads LibTorch lacks under the limits on stack and address space, or "". With less,
// LibTorch and OpenBLAS end by a signal or wait forever.
std::string lacking_for_libtorch();

}  // namespace efla::cli
