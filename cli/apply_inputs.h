// The tensors that efla apply reads, checked and converted.
#pragma once

#include <vector>

#include "efla/io/safetensors.h"
#include "efla/rule/problem.h"

namespace efla::cli {

// Tensors of one problem; null: not in the file. q, k [B, T, H, K], v, dout [B, T, H, V], beta [B, T, H] of one type
// out of F32, BF16 and F64; initial_state, dfinal_state [B, H, K, V] of F32, or F64 where q is F64.
struct ApplyInputs {
  DeltaShape shape;
  io::TensorType type = io::TensorType::F32;  // of q
  const io::NamedTensor *q = nullptr, *k = nullptr, *v = nullptr, *beta = nullptr;
  const io::NamedTensor *initial_state = nullptr, *dout = nullptr, *dfinal_state = nullptr;
};

// Throws Error for a tensor that is missing, unknown, or of a wrong shape or type. The tensors stay the file's.
ApplyInputs read_inputs(const io::SafetensorsFile& file);

// The elements as T: float, bfloat16 or double. Throws Error with the index of the first that is not finite as T.
template <class T>
std::vector<T> converted(const io::NamedTensor& tensor);

}  // namespace efla::cli
