// The field quantization_config of config.json.
#pragma once

#include <cstdint>

#include "efla/io/fields.h"

namespace efla::nn {

// The rows and columns of a block of a weight in FP8 that has a scale.
inline constexpr std::int64_t kFp8Block = 128;

// Takes note of quantised weights whose tensors say the rest (quantised_weights.h), in the object quantization_config
// of `fields` if there is one. Refuses all others, and fields that are not known. Inputs of linear layers are not
// quantised, whatever activation_scheme says.
void read_quantization(const io::Fields& fields);

}  // namespace efla::nn
