#include "efla/nn/families/quantisation_config.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/nn/models/config_fields.h"

namespace efla::nn {
namespace {

using io::Fields;
using nlohmann::json;

// Fields that say how weights were quantised, which their tensors show, which of them, or how others compute.
constexpr const char* kOtherFields[]{"backend",
                                     "batch_size",
                                     "block_name_to_quantize",
                                     "cache_block_outputs",
                                     "damp_auto_increment",
                                     "damp_percent",
                                     "dataset",
                                     "desc_act",
                                     "disable_exllama",
                                     "do_fuse",
                                     "dynamic",
                                     "exllama_config",
                                     "fuse_max_seq_len",
                                     "global_compression_ratio",
                                     "group_size",
                                     "ignore",
                                     "ignored_layers",
                                     "lm_head",
                                     "max_input_length",
                                     "meta",
                                     "model_file_base_name",
                                     "model_name_or_path",
                                     "model_seqlen",
                                     "module_name_preceding_first_block",
                                     "modules_in_block_to_quantize",
                                     "modules_to_fuse",
                                     "modules_to_not_convert",
                                     "pack_dtype",
                                     "pad_token_id",
                                     "quantization_status",
                                     "quantizer",
                                     "static_groups",
                                     "sym",
                                     "tokenizer",
                                     "true_sequential",
                                     "use_cuda_fp16",
                                     "use_exllama",
                                     "version",
                                     "zero_point"};

// Reads the groups of layers of compressed-tensors: weights of 4 bits without zeros.
void read_groups(const Fields& fields) {
  const Fields groups = fields.object("config_groups");
  for (const auto& [name, value] : groups.content().items()) {
    const Fields group = groups.object(name);
    const Fields weights = group.object("weights");
    weights.get<std::int64_t>("num_bits");
    allow_values(weights, "num_bits", {4});
    allow_values(weights, "type", {"int"});
    allow_values(weights, "symmetric", {true});
    allow_values(group, "input_activations", {nullptr});
    allow_values(group, "output_activations", {nullptr});
  }
}

}  // namespace

void read_quantization(const Fields& fields) {
  constexpr const char* kName = "quantization_config";
  const auto* found = fields.find(kName);
  if (found == nullptr || found->is_null()) return;
  const Fields own = fields.object(kName);
  const auto method = own.get<std::string>("quant_method");
  allow_values(own, "quant_method", {"fp8", "compressed-tensors", "gptq", "awq"});
  for (const char* name : kOtherFields) own.find(name);
  if (method == "fp8") {
    own.get<std::vector<std::int64_t>>("weight_block_size");
    allow_values(own, "weight_block_size", {json::array({kFp8Block, kFp8Block})});
    allow_values(own, "fmt", {"e4m3"});
    allow_values(own, "activation_scheme", {"dynamic"});
  } else if (method == "compressed-tensors") {
    own.get<std::string>("format");
    allow_values(own, "format", {"pack-quantized"});
    read_groups(own);
    for (const char* name : {"kv_cache_scheme", "sparsity_config", "transform_config"}) {
      allow_values(own, name, {nullptr, json::object()});
    }
  } else {
    own.get<std::int64_t>("bits");
    allow_values(own, "bits", {4});
    allow_values(own, "checkpoint_format", {"gptq"});  // GPTQ's second format has other zeros
    if (method == "awq") allow_values(own, "version", {"gemm", "GEMM"});
  }
  own.refuse_others();
}

}  // namespace efla::nn
