// The tensors that efla apply reads, checked and converted.
#pragma once

#include <vector>

#include "efla/io/safetensors/safetensors.h"
#include "efla/rule/problem.h"

namespace efla::cli {

// Tensors of one problem; null: not in the file. q, k, erase_key [B, T, H, K], v, dout [B, T, HV, V], beta [B, T, HV]
// of one type out of F32, BF16 and F64; g [B, T, HV] or [B, T, HV, K], initial_state and dfinal_state [N, HV, K, V] of
// F32, or F64 where q is F64; cu_seqlens [N + 1] of I64. HV is a multiple of H; N is B without cu_seqlens.
struct ApplyInputs {
  DeltaShape shape;
  Decay decay = Decay::none;                  // by the axes of g
  io::TensorType type = io::TensorType::F32;  // of q
  const io::NamedTensor *q = nullptr, *k = nullptr, *v = nullptr, *beta = nullptr;
  const io::NamedTensor* erase_key = nullptr;  // of a rule with two keys
  const io::NamedTensor *initial_state = nullptr, *dout = nullptr, *dfinal_state = nullptr;
  const io::NamedTensor *g = nullptr, *cu_seqlens = nullptr;
};

// Throws Error for a tensor that is missing, unknown, or of a wrong shape or type. The tensors stay the file's.
ApplyInputs read_inputs(const io::SafetensorsFile& file);

// Returns the elements as T: float, bfloat16 or double. Throws Error with the index of the first that is not finite as
// T.
template <class T>
std::vector<T> converted(const io::NamedTensor& tensor);

// Returns the elements of an I64 tensor.
std::vector<std::int64_t> integers(const io::NamedTensor& tensor);

}  // namespace efla::cli
