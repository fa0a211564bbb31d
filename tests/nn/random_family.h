// Folders of small models of families with random weights, as transformers writes them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/base/random.h"
#include "efla/io/file.h"
#include "efla/io/safetensors/safetensors.h"

namespace efla::nn {

// Tensors by name, in float32.
struct RandomTensors {
  struct Tensor {
    std::vector<std::int64_t> shape;
    std::vector<float> values;
  };
  std::map<std::string, Tensor> all = {};
  Random random{0};

  // Adds a tensor of uniform numbers around `centre`, at most `size` away.
  void add(const std::string& name, std::vector<std::int64_t> shape, double size, double centre = 0.0) {
    std::int64_t count = 1;
    for (const auto extent : shape) count *= extent;
    Tensor tensor{std::move(shape), {}};
    for (std::int64_t i = 0; i < count; ++i)
      tensor.values.push_back(static_cast<float>(centre + size * (2.0 * random.uniform() - 1.0)));
    all[name] = std::move(tensor);
  }
  void matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    add(name, {rows, columns}, 1.7 / std::sqrt(static_cast<double>(columns)));
  }

  void write(const std::filesystem::path& file, bool narrow) const {
    std::vector<io::NamedTensor> entries;
    std::vector<std::vector<std::uint8_t>> bytes;
    bytes.reserve(all.size());
    for (const auto& [name, tensor] : all) {
      auto& own = bytes.emplace_back();
      for (const float value : tensor.values) {
        const auto rounded = to_bfloat16(value);
        const auto* from =
            narrow ? reinterpret_cast<const std::uint8_t*>(&rounded) : reinterpret_cast<const std::uint8_t*>(&value);
        own.insert(own.end(), from, from + (narrow ? sizeof(rounded) : sizeof(value)));
      }
      entries.push_back({name, narrow ? io::TensorType::BF16 : io::TensorType::F32, tensor.shape, own});
    }
    io::write_safetensors(file, entries, {{"format", "pt"}});
  }
};

inline void add_mlp(RandomTensors& tensors, const std::string& mlp, std::int64_t inner, std::int64_t width) {
  tensors.matrix(mlp + "gate_proj.weight", inner, width);
  tensors.matrix(mlp + "up_proj.weight", inner, width);
  tensors.matrix(mlp + "down_proj.weight", width, inner);
}

// Returns whether a layer has experts.
inline bool has_experts(const nlohmann::json& c, std::int64_t layer) {
  if (c.value("num_experts", 0) == 0 || (layer + 1) % c.value("decoder_sparse_step", 1) != 0) return false;
  const auto dense = c.value("mlp_only_layers", std::vector<std::int64_t>{});
  return std::ranges::find(dense, layer) == dense.end();
}

// Adds experts: the ones of qwen3_next each with tensors of its own, as it is published, and others in two tensors.
inline void add_experts(RandomTensors& tensors, const std::string& mlp, const nlohmann::json& c) {
  const std::int64_t D = c["hidden_size"], E = c["num_experts"], I = c["moe_intermediate_size"];
  tensors.matrix(mlp + "gate.weight", E, D);
  tensors.matrix(mlp + "shared_expert_gate.weight", 1, D);
  add_mlp(tensors, mlp + "shared_expert.", c["shared_expert_intermediate_size"], D);
  if (c["model_type"] == "qwen3_next") {
    for (std::int64_t e = 0; e < E; ++e) add_mlp(tensors, mlp + "experts." + std::to_string(e) + ".", I, D);
    return;
  }
  const auto size = [](std::int64_t columns) { return 1.7 / std::sqrt(static_cast<double>(columns)); };
  tensors.add(mlp + "experts.gate_up_proj", {E, 2 * I, D}, size(D));
  tensors.add(mlp + "experts.down_proj", {E, D, I}, size(I));
}

// Adds the MLP or the experts of layer `number`, and the projections of its attention.
inline void add_layer_parts(RandomTensors& tensors, const std::string& layer, const nlohmann::json& c,
                            std::int64_t number, bool attends) {
  const std::int64_t D = c["hidden_size"], heads = c["num_attention_heads"];
  const std::int64_t kv = c["num_key_value_heads"];
  const bool olmo = c["model_type"] == "olmo_hybrid";
  const std::int64_t dim = olmo ? D / heads : c["head_dim"].get<std::int64_t>();
  if (has_experts(c, number)) {
    add_experts(tensors, layer + "mlp.", c);
  } else {
    add_mlp(tensors, layer + "mlp.", c["intermediate_size"], D);
  }
  if (!attends) return;
  const std::string a = layer + "self_attn.";
  tensors.matrix(a + "q_proj.weight", heads * dim * (olmo ? 1 : 2), D);
  tensors.matrix(a + "k_proj.weight", kv * dim, D);
  tensors.matrix(a + "v_proj.weight", kv * dim, D);
  tensors.matrix(a + "o_proj.weight", D, heads * dim);
  tensors.add(a + "q_norm.weight", {olmo ? heads * dim : dim}, 0.3, olmo ? 1.0 : 0.0);
  tensors.add(a + "k_norm.weight", {olmo ? kv * dim : dim}, 0.3, olmo ? 1.0 : 0.0);
}

inline void add_delta(RandomTensors& tensors, const std::string& a, const nlohmann::json& c) {
  const std::int64_t D = c["hidden_size"], H = c["linear_num_key_heads"], HV = c["linear_num_value_heads"];
  const std::int64_t K = c["linear_key_head_dim"], V = c["linear_value_head_dim"], W = c["linear_conv_kernel_dim"];
  const bool olmo = c["model_type"] == "olmo_hybrid", packed = c["model_type"] == "qwen3_next";
  if (olmo) {
    for (const char* name : {"q", "k", "v"}) {
      const std::int64_t rows = *name == 'v' ? HV * V : H * K;
      tensors.matrix(a + name + "_proj.weight", rows, D);
      tensors.add(a + name + "_conv1d.weight", {rows, 1, W}, 0.6);
    }
  } else {
    if (!packed) tensors.matrix(a + "in_proj_qkv.weight", 2 * H * K + HV * V, D);
    tensors.add(a + "conv1d.weight", {2 * H * K + HV * V, 1, W}, 0.6);
  }
  if (packed) {
    tensors.matrix(a + "in_proj_qkvz.weight", 2 * H * K + 2 * HV * V, D);
    tensors.matrix(a + "in_proj_ba.weight", 2 * HV, D);
  } else {
    tensors.matrix(a + (olmo ? "b_proj.weight" : "in_proj_b.weight"), HV, D);
    tensors.matrix(a + (olmo ? "a_proj.weight" : "in_proj_a.weight"), HV, D);
    tensors.matrix(a + (olmo ? "g_proj.weight" : "in_proj_z.weight"), HV * V, D);
  }
  tensors.matrix(a + (olmo ? "o_proj.weight" : "out_proj.weight"), D, HV * V);
  tensors.add(a + (olmo ? "o_norm.weight" : "norm.weight"), {V}, 0.3, 1.0);
  tensors.add(a + "A_log", {HV}, 1.0);
  tensors.add(a + "dt_bias", {HV}, 1.0);
}

// Returns the text model's part of a random configuration of qwen3_5_text or olmo_hybrid.
inline nlohmann::json random_family_config(bool olmo, std::uint64_t seed) {
  Random random(seed);
  const auto from = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random.below(static_cast<std::uint32_t>(high - low + 1)));
  };
  const std::int64_t kv = from(1, 3), heads = kv * from(1, 3), dim = 4 * from(1, 6), H = from(1, 3);
  nlohmann::json c{{"model_type", olmo ? "olmo_hybrid" : "qwen3_5_text"},
                   {"vocab_size", from(30, 70)},
                   {"hidden_size", olmo ? heads * dim : from(8, 40)},
                   {"intermediate_size", from(8, 50)},
                   {"num_attention_heads", heads},
                   {"num_key_value_heads", kv},
                   {"linear_num_key_heads", H},
                   {"linear_num_value_heads", H * from(1, 3)},
                   {"linear_key_head_dim", from(4, 20)},
                   // At least 8, because one of the models with 3 elements missed the tolerance of family_test.cc by a
                   // third. A head's output that is nearly 0, whose norm enlarges rounding, may be the cause.
                   {"linear_value_head_dim", from(8, 24)},
                   {"linear_conv_kernel_dim", from(2, 4)},
                   {"rms_norm_eps", 1e-6},
                   {"tie_word_embeddings", from(0, 1) == 1}};
  if (olmo) {
    c["linear_allow_neg_eigval"] = from(0, 1) == 1;
    if (from(0, 1) == 1) c["rope_parameters"] = {{"rope_theta", 500.0}, {"rope_type", "default"}};
  } else {
    c["head_dim"] = dim;
    c["rope_parameters"] = {{"rope_theta", 1000.0}, {"rope_type", "default"}};
    if (from(0, 1) == 1) c["rope_parameters"]["partial_rotary_factor"] = from(0, 1) == 1 ? 0.5 : 1.0;
    if (dim % 8 != 0) c["rope_parameters"]["partial_rotary_factor"] = 1.0;
  }
  std::vector<std::string> types;
  for (std::int64_t i = from(1, 5); i > 0; --i)
    types.emplace_back(from(0, 1) == 1 ? "full_attention" : "linear_attention");
  c["layer_types"] = types;
  c["num_hidden_layers"] = types.size();
  return c;
}

// Returns the configuration of a model with experts in some layers or none: of qwen3_next or qwen3_5_moe_text.
inline nlohmann::json random_expert_config(bool next, std::uint64_t seed) {
  auto c = random_family_config(false, seed);
  Random random(seed + 1000);
  const auto from = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random.below(static_cast<std::uint32_t>(high - low + 1)));
  };
  const std::int64_t count = from(1, 9);
  c.update({{"model_type", next ? "qwen3_next" : "qwen3_5_moe_text"},
            {"num_experts", next && seed % 5 == 0 ? 0 : count},
            {"num_experts_per_tok", from(1, count)},
            // Larger heads than without experts, because smaller ones amplify rounding more.
            {"linear_key_head_dim", from(8, 20)},
            {"linear_value_head_dim", from(16, 24)},
            {"moe_intermediate_size", from(4, 24)},
            {"shared_expert_intermediate_size", from(4, 24)}});
  if (!next) {
    c.erase("intermediate_size");
    return c;
  }
  c["norm_topk_prob"] = from(0, 1) == 1;
  c["decoder_sparse_step"] = from(1, 2);
  c["mlp_only_layers"] = std::vector<std::int64_t>{from(0, c["num_hidden_layers"].get<std::int64_t>() - 1)};
  return c;
}

// Returns the tensors of a configuration under a prefix of the family.
inline RandomTensors random_family_tensors(const nlohmann::json& c, const std::string& prefix, std::uint64_t seed) {
  RandomTensors tensors{.random = Random(seed)};
  const std::int64_t D = c["hidden_size"], vocab = c["vocab_size"];
  const bool olmo = c["model_type"] == "olmo_hybrid";
  tensors.add(prefix + "embed_tokens.weight", {vocab, D}, 1.0);
  if (!c["tie_word_embeddings"].get<bool>()) tensors.matrix("lm_head.weight", vocab, D);
  tensors.add(prefix + "norm.weight", {D}, 0.3, olmo ? 1.0 : 0.0);
  for (std::size_t i = 0; i < c["layer_types"].size(); ++i) {
    const std::string layer = prefix + "layers." + std::to_string(i) + ".";
    const bool attends = c["layer_types"][i] == "full_attention";
    tensors.add(layer + (olmo && attends ? "post_feedforward_layernorm.weight" : "input_layernorm.weight"), {D}, 0.3,
                olmo ? 1.0 : 0.0);
    tensors.add(layer + "post_attention_layernorm.weight", {D}, 0.3, olmo ? 1.0 : 0.0);
    add_layer_parts(tensors, layer, c, static_cast<std::int64_t>(i), attends);
    if (!attends) add_delta(tensors, layer + "linear_attn.", c);
  }
  return tensors;
}

// Adds a random head for drafts to the tensors of a family of Qwen. Its layer has experts where a model's may.
inline void add_draft_head(RandomTensors& tensors, const nlohmann::json& c) {
  const std::int64_t D = c["hidden_size"];
  for (const char* name : {"pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.input_layernorm",
                           "layers.0.post_attention_layernorm"}) {
    tensors.add("mtp." + std::string(name) + ".weight", {D}, 0.3);
  }
  tensors.matrix("mtp.fc.weight", D, 2 * D);
  nlohmann::json own = c;
  own.erase("decoder_sparse_step");
  own.erase("mlp_only_layers");
  add_layer_parts(tensors, "mtp.layers.0.", own, 0, true);
}

// Writes a folder of a model. `nested` puts the configuration into a text_config.
inline void write_family_folder(const std::filesystem::path& folder, const nlohmann::json& config,
                                const RandomTensors& tensors, bool nested, bool narrow) {
  nlohmann::json all = config;
  const bool experts = config["model_type"] == "qwen3_5_moe_text";
  if (nested)
    all = {{"model_type", experts ? "qwen3_5_moe" : "qwen3_5"},
           {"text_config", config},
           {"vision_config", {{"depth", 2}}}};
  io::write_file_atomically(folder / "config.json", all.dump(1));
  tensors.write(folder / "model.safetensors", narrow);
}

}  // namespace efla::nn
