// The memory that training needs at least.
#pragma once

#include <torch/types.h>

namespace efla::train {

// Throws Error(operation, argument) if the CPU has less memory than the training of a model needs with at least
// `parameters` parameters, without activations, by `processes` processes. Checks nothing for a GPU, which has its own
// memory.
void require_training_memory(const char* operation, const char* argument, double parameters, torch::Device device,
                             int processes = 1);

}  // namespace efla::train
