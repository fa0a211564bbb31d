// Weights of linear layers that a folder keeps quantised, in several tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "efla/io/safetensors/safetensors_folder.h"
#include "efla/nn/families/tensor_source.h"

namespace efla::nn {

// How a weight [O, I] is stored, behind the name of its layer. q are the integers, s and z of a group of columns.
enum class WeightFormat {
  // weight [O, I] in F8_E4M3, weight_scale_inv [⌈O/128⌉, ⌈I/128⌉] (Qwen's folders "-FP8"): w = weight · scale of the
  // block.
  fp8_blocks,
  // weight_packed [O, ⌈I/8⌉] of 4 bits, from the lowest on, weight_scale [O, G], weight_shape (compressed-tensors'
  // pack-quantized): w = s · (q − 8).
  packed,
  // qweight [I/8, O], of 4 bits along the columns, qzeros [G, O/8], scales [G, O], g_idx [I] (GPTQ): w = s · (q − z −
  // 1),
  // and g_idx has the group of each column.
  gptq,
  // qweight [I, O/8], of 4 bits in the order of outputs 0, 2, 4, 6, 1, 3, 5, 7, qzeros [G, O/8], scales [G, O] (AWQ):
  // w = s · (q − z).
  awq,
};

// A quantised weight, whose tensors a folder keeps in memory.
struct QuantisedWeight {
  WeightFormat format = WeightFormat::fp8_blocks;
  std::vector<const io::NamedTensor*> parts = {};  // in the order of WeightFormat's comments
  std::vector<std::int64_t> shape = {};            // [O, I]

  // Returns the weight rounded to bfloat16 under a name. path: for messages. Throws IoError(content) for parts whose
  // types or shapes contradict each other.
  SourceTensor read(const std::string& path, const std::string& name) const;
};

// Returns the quantised weights of a folder by name, as "….mlp.down_proj.weight". A weight whose other tensors are
// missing is none.
std::map<std::string, QuantisedWeight, std::less<>> quantised_weights(const io::SafetensorsFolder& folder);

// Returns the name of a type for people.
const char* name_of(WeightFormat format);

}  // namespace efla::nn
