// The numbers in tensors of GGUF.
#pragma once

#include <optional>
#include <string>

#include "efla/base/quant_block.h"
#include "efla/io/gguf/gguf.h"

namespace efla::io {

// Returns the type of a tensor whose blocks kernels multiply as they are; nothing for any other type.
std::optional<QuantType> quant_type(const GgufType& type);

// Returns whether the numbers of a type can be read.
bool can_dequantise(const GgufType& type);
// Returns the names of the types that can be read, for messages.
std::string dequantised_types();

// Writes the numbers in some whole blocks in float32. The type is one that can be read.
void dequantise(const GgufType& type, ByteView blocks, float* to);

}  // namespace efla::io
