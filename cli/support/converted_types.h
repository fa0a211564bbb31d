// The types of a GGUF file that a model does not compute with.
#pragma once

#include <string>

#include "efla/nn/inference/packed_weight.h"

namespace efla::cli {

// Says in one line on standard error which weights of a GGUF file get another type in memory. Says nothing of folders.
void report_converted_types(const char* command, const std::string& model, nn::WeightType weights);

}  // namespace efla::cli
