// The order in which an epoch visits the examples.
#pragma once

#include <cstdint>
#include <vector>

namespace efla::train {

// Returns a permutation of 0 … count − 1 that depends on seed, epoch and count alone (Fisher and Yates's shuffle), so
// that training can resume at any step of any epoch.
std::vector<std::uint32_t> epoch_order(std::uint64_t seed, std::int64_t epoch, std::uint32_t count);

}  // namespace efla::train
