// The types of a model's files that the model does not compute with.
#pragma once

#include <string>

#include "efla/nn/inference/packed_weight.h"

namespace efla::cli {

// Says in one line on standard error which weights of a model of a family get another type in memory.
void report_converted_types(const char* command, const std::string& model, nn::WeightType weights);

}  // namespace efla::cli
