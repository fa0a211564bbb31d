// Limits that the caller has set (ulimit) and that LibTorch does not bear.
#pragma once

#include <string>

namespace efla::cli {

// Returns what a program that loads LibTorch lacks under the limits on stack and address space, empty where it lacks
// nothing. LibTorch and OpenBLAS end by a signal or wait for ever where they cannot have what they need.
std::string lacking_for_libtorch();

}  // namespace efla::cli
