// Models of families as llama.cpp's converter writes them to GGUF: in float32, or with some weights in quantised
// blocks.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/base/random.h"
#include "efla/io/gguf/gguf.h"
#include "efla/io/gguf/gguf_dequantise.h"
#include "tests/nn/random_family.h"
#include "tests/support/gguf.h"

namespace efla::nn {

using Values = std::vector<float>;

// A type of quantised blocks: where a block has its scale and the scale of its minima in float16, and the middle of its
// integers, which the minimum makes 0. −1: it has no such number.
struct BlockType {
  std::string_view name;
  int scale, minimum = -1;
  float middle = 0.0F;
};
inline constexpr std::array<BlockType, 13> kBlockTypes{{{"Q4_0", 0},
                                                        {"Q4_1", 0, 2, -7.5F},
                                                        {"Q5_0", 0},
                                                        {"Q5_1", 0, 2, -15.5F},
                                                        {"Q8_0", 0},
                                                        {"Q2_K", 80, 82, 1.5F},
                                                        {"Q3_K", 108},
                                                        {"Q4_K", 0, 2, 7.5F},
                                                        {"Q5_K", 0, 2, 15.5F},
                                                        {"Q6_K", 208},
                                                        {"IQ4_NL", 0},
                                                        {"IQ4_XS", 0},
                                                        {"MXFP4", -1}}};

// Returns random blocks of some numbers, whose root mean square is about `size`.
inline std::string random_blocks(const BlockType& block, std::int64_t numbers, float size, Random& random) {
  const io::GgufType& type = *io::find_gguf_type(block.name);
  std::string bytes(static_cast<std::size_t>(numbers / type.elements * type.bytes), '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random.below(256));
  const auto scale_by = [&](float scale) {
    const auto write = [&](std::size_t at, float number) {
      const float16 half = to_float16(number);
      std::copy_n(reinterpret_cast<const char*>(&half), sizeof(half), bytes.begin() + static_cast<std::ptrdiff_t>(at));
    };
    for (std::size_t at = 0; at < bytes.size(); at += static_cast<std::size_t>(type.bytes)) {
      if (block.scale < 0) bytes[at] = 123;  // the exponent of MXFP4
      if (block.scale >= 0) write(at + static_cast<std::size_t>(block.scale), scale);
      if (block.minimum >= 0) write(at + static_cast<std::size_t>(block.minimum), scale * block.middle);
    }
  };
  scale_by(1.0F / 256.0F);
  Values values(static_cast<std::size_t>(numbers));
  io::dequantise(type, io::as_bytes(bytes), values.data());
  double squares = 0.0;
  for (const float value : values) squares += double{value} * value;
  scale_by(size / 256.0F / static_cast<float>(std::sqrt(squares / static_cast<double>(numbers))));
  return bytes;
}

// Tensors of which some have the numbers of blocks.
struct BlockTensors {
  RandomTensors tensors;
  const io::GgufType* type = nullptr;
  std::map<std::string, std::string> blocks = {};  // by transformers' name
};

// Returns tensors whose weights of linear layers have random blocks of a type, where these divide their rows and heads.
inline BlockTensors random_block_tensors(const nlohmann::json& config, const BlockType& block, std::uint64_t seed) {
  BlockTensors all{random_family_tensors(config, "model.", seed), io::find_gguf_type(block.name)};
  Random random(seed);
  for (auto& [name, tensor] : all.tensors.all) {
    const auto columns = tensor.shape.back();
    const bool of_heads = name.ends_with("out_proj.weight") &&
                          config["linear_value_head_dim"].get<std::int64_t>() % all.type->elements != 0;
    if (tensor.shape.size() != 2 || columns % all.type->elements != 0 || of_heads) continue;
    const auto blocks =
        random_blocks(block, std::ssize(tensor.values), 1.0F / std::sqrt(static_cast<float>(columns)), random);
    io::dequantise(*all.type, io::as_bytes(blocks), tensor.values.data());
    all.blocks[name] = blocks;
  }
  return all;
}

// Puts value head h = g · ratio + j of `keys` key heads at j · keys + g, as llama.cpp's converter does. The heads fill
// groups of heads · size numbers behind the first `skipped` ones.
template <class Numbers>
Numbers tiled(const Numbers& from, std::int64_t skipped, std::int64_t size, std::int64_t keys, std::int64_t heads) {
  Numbers to = from;
  for (std::int64_t at = skipped; at + heads * size <= std::ssize(from); at += heads * size) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t place = h % (heads / keys) * keys + h / (heads / keys);
      std::copy_n(from.begin() + at + h * size, size, to.begin() + at + place * size);
    }
  }
  return to;
}

// The names in a layer of the file, transformers' ones, and whether 1 is added.
struct Name {
  std::string gguf, folder;
  bool norm = false;
};

inline Values same(const Values& x) { return x; }
inline Values plus_1(Values x) {
  for (auto& value : x) value += 1.0F;
  return x;
}

// Writes a configuration and tensors: in float32, or in the blocks that there are.
class GgufOf {
 public:
  GgufOf(const nlohmann::json& config, const RandomTensors& tensors, const BlockTensors* blocks = nullptr)
      : c_(config), tensors_(tensors), blocks_(blocks) {
    write_config();
    add("token_embd.weight", "model.embed_tokens.weight", same);
    add("output_norm.weight", "model.norm.weight", plus_1);
    if (!c_["tie_word_embeddings"].get<bool>()) add("output.weight", "lm_head.weight", same);
    for (std::size_t i = 0; i < c_["layer_types"].size(); ++i) {
      const std::string to = "blk." + std::to_string(i) + ".", from = "model.layers." + std::to_string(i) + ".";
      const bool attends = c_["layer_types"][i] == "full_attention";
      write_projections(to, from, attends);
      if (!attends) write_mixer(to, from + "linear_attn.");
    }
  }
  test::GgufBytes file() const { return file_; }

 private:
  void write_config() {
    file_.text("general.architecture", "qwen35");
    const auto integer = [&](const std::string& name, std::int64_t value) { file_.integer("qwen35." + name, value); };
    const std::int64_t dim = c_["head_dim"];
    integer("block_count", c_["num_hidden_layers"]);
    integer("embedding_length", c_["hidden_size"]);
    integer("feed_forward_length", c_["intermediate_size"]);
    integer("attention.head_count", c_["num_attention_heads"]);
    integer("attention.head_count_kv", c_["num_key_value_heads"]);
    integer("attention.key_length", dim);
    integer("attention.value_length", dim);
    const auto& rope = c_["rope_parameters"];
    integer("rope.dimension_count",
            static_cast<std::int64_t>(static_cast<double>(dim) * rope.value("partial_rotary_factor", 0.25)));
    file_.real("qwen35.rope.freq_base", rope["rope_theta"].get<float>());
    file_.real("qwen35.attention.layer_norm_rms_epsilon", c_["rms_norm_eps"].get<float>());
    integer("ssm.conv_kernel", c_["linear_conv_kernel_dim"]);
    integer("ssm.state_size", c_["linear_key_head_dim"]);
    integer("ssm.group_count", c_["linear_num_key_heads"]);
    integer("ssm.time_step_rank", c_["linear_num_value_heads"]);
    integer("ssm.inner_size",
            c_["linear_num_value_heads"].get<std::int64_t>() * c_["linear_value_head_dim"].get<std::int64_t>());
    std::vector<std::int64_t> recurrent;
    for (const auto& type : c_["layer_types"]) recurrent.push_back(type == "linear_attention" ? 1 : 0);
    file_.integers("qwen35.attention.recurrent_layers", recurrent);
  }

  // How the value heads of a tensor are moved: heads of `size` numbers behind the first `skipped` ones.
  struct Heads {
    std::int64_t skipped = 0, size = 0;
  };

  void add_heads(const std::string& name, const std::string& from, const Heads& heads) {
    const std::int64_t H = c_["linear_num_key_heads"], HV = c_["linear_num_value_heads"];
    if (blocks_ != nullptr && blocks_->blocks.contains(from)) {
      const auto in_bytes = [&](std::int64_t numbers) {
        return numbers / blocks_->type->elements * blocks_->type->bytes;
      };
      return add_blocks(name, from,
                        tiled(blocks_->blocks.at(from), in_bytes(heads.skipped), in_bytes(heads.size), H, HV));
    }
    add(name, from, [&](const Values& x) { return tiled(x, heads.skipped, heads.size, H, HV); });
  }

  void add_blocks(const std::string& name, const std::string& from, const std::string& bytes) {
    const auto& shape = tensors_.all.at(from).shape;
    file_.tensor(name, blocks_->type->id, {shape.begin(), shape.end()}, bytes);
  }

  template <class F>
  void add(const std::string& name, const std::string& from, const F& change) {
    if (blocks_ != nullptr && blocks_->blocks.contains(from)) {
      return add_blocks(name, from, blocks_->blocks.at(from));
    }
    const auto& [shape, values] = tensors_.all.at(from);
    const Values changed = change(values);
    std::vector<std::uint64_t> extents(shape.begin(), shape.end());
    if (extents.size() == 3) extents = {extents[0], extents[2]};
    const auto bytes = std::span(reinterpret_cast<const char*>(changed.data()), changed.size() * sizeof(float));
    file_.tensor(name, 0, extents, {bytes.data(), bytes.size()});
  }

  // Writes norms, MLP and projections of attention of a layer.
  void write_projections(const std::string& to, const std::string& from, bool attends) {
    std::vector<Name> names{{"attn_norm", "input_layernorm", true},
                            {"post_attention_norm", "post_attention_layernorm", true},
                            {"ffn_gate", "mlp.gate_proj"},
                            {"ffn_up", "mlp.up_proj"},
                            {"ffn_down", "mlp.down_proj"}};
    if (attends) {
      names.insert(names.end(), {{"attn_q", "self_attn.q_proj"},
                                 {"attn_k", "self_attn.k_proj"},
                                 {"attn_v", "self_attn.v_proj"},
                                 {"attn_output", "self_attn.o_proj"},
                                 {"attn_q_norm", "self_attn.q_norm", true},
                                 {"attn_k_norm", "self_attn.k_norm", true}});
    }
    for (const auto& [gguf, folder, norm] : names) {
      norm ? add(to + gguf + ".weight", from + folder + ".weight", plus_1)
           : add(to + gguf + ".weight", from + folder + ".weight", same);
    }
  }

  void write_mixer(const std::string& to, const std::string& a) {
    const std::int64_t H = c_["linear_num_key_heads"], HV = c_["linear_num_value_heads"];
    const std::int64_t K = c_["linear_key_head_dim"], V = c_["linear_value_head_dim"], D = c_["hidden_size"];
    const std::int64_t keys = 2 * H * K, taps = c_["linear_conv_kernel_dim"];
    add_heads(to + "attn_qkv.weight", a + "in_proj_qkv.weight", {keys * D, V * D});
    add_heads(to + "attn_gate.weight", a + "in_proj_z.weight", {0, V * D});
    add_heads(to + "ssm_beta.weight", a + "in_proj_b.weight", {0, D});
    add_heads(to + "ssm_alpha.weight", a + "in_proj_a.weight", {0, D});
    add_heads(to + "ssm_conv1d.weight", a + "conv1d.weight", {keys * taps, V * taps});
    add_heads(to + "ssm_dt.bias", a + "dt_bias", {0, 1});
    add(to + "ssm_norm.weight", a + "norm.weight", same);
    add_heads(to + "ssm_out.weight", a + "out_proj.weight", {0, V});
    add(to + "ssm_a", a + "A_log", [&](Values x) {
      for (auto& value : x) value = -std::exp(value);
      return tiled(x, 0, 1, H, HV);
    });
  }

  const nlohmann::json& c_;
  const RandomTensors& tensors_;
  const BlockTensors* blocks_;
  test::GgufBytes file_;
};

}  // namespace efla::nn
