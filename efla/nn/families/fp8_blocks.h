// Matrices in FP8 with a scale per block of 128 by 128 numbers, as Qwen's folders "-FP8" have them: w = scale · q.
#pragma once

#include <string>
#include <string_view>

#include "efla/nn/families/tensor_source.h"

namespace efla::nn {

inline constexpr std::string_view kFp8Scales = "_scale_inv";  // behind the name of a weight: the name of its scales

// Returns a matrix [O, I] in F8_E4M3 with scales [⌈O/128⌉, ⌈I/128⌉] in F32 or BF16 as numbers rounded to bfloat16.
// path: for messages. Throws IoError(content) for other shapes and types.
SourceTensor from_fp8_blocks(const std::string& path, const io::NamedTensor& weight, const io::NamedTensor& scales);

}  // namespace efla::nn
