// Models of families in GGUF files: they compute what the same weights in a folder do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "efla/nn/families/family_model.h"
#include "efla/nn/families/gpu_family_model.h"
#include "tests/nn/family_reference.h"
#include "tests/nn/random_family.h"
#include "tests/support/expect_error.h"
#include "tests/support/gguf.h"
#include "tests/support/temp_folder.h"

namespace efla::nn {
namespace {

using nlohmann::json;
using Values = std::vector<float>;

// Puts value head h = g · ratio + j of `keys` key heads at j · keys + g, as llama.cpp's converter does. The heads fill
// groups of heads · size numbers behind the first `skipped` ones.
Values tiled(const Values& from, std::int64_t skipped, std::int64_t size, std::int64_t keys, std::int64_t heads) {
  Values to = from;
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

Values same(const Values& x) { return x; }
Values plus_1(Values x) {
  for (auto& value : x) value += 1.0F;
  return x;
}

// Writes a configuration and tensors in float32 as llama.cpp's converter does.
class GgufOf {
 public:
  GgufOf(const json& config, const RandomTensors& tensors) : c_(config), tensors_(tensors) {
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

  template <class F>
  void add(const std::string& name, const std::string& from, const F& change) {
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
    const auto heads = [&](std::int64_t skipped, std::int64_t size) {
      return [=](const Values& x) { return tiled(x, skipped, size, H, HV); };
    };
    add(to + "attn_qkv.weight", a + "in_proj_qkv.weight", heads(keys * D, V * D));
    add(to + "attn_gate.weight", a + "in_proj_z.weight", heads(0, V * D));
    add(to + "ssm_beta.weight", a + "in_proj_b.weight", heads(0, D));
    add(to + "ssm_alpha.weight", a + "in_proj_a.weight", heads(0, D));
    add(to + "ssm_conv1d.weight", a + "conv1d.weight", heads(keys * taps, V * taps));
    add(to + "ssm_dt.bias", a + "dt_bias", heads(0, 1));
    add(to + "ssm_norm.weight", a + "norm.weight", same);
    add(to + "ssm_out.weight", a + "out_proj.weight", heads(0, V));
    add(to + "ssm_a", a + "A_log", [&](Values x) {
      for (auto& value : x) value = -std::exp(value);
      return tiled(x, 0, 1, H, HV);
    });
  }

  const json& c_;
  const RandomTensors& tensors_;
  test::GgufBytes file_;
};

Values logits_of(const std::filesystem::path& path) {
  FamilyModel model(path, WeightType::float32);
  const std::vector<std::int32_t> ids{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
  const TextRun run{.tokens = std::ssize(ids)};
  ThreadPool pool(1);
  model.make_slots(1);
  model.clear(0);
  RowBuffer buffer;
  const auto hidden = buffer.rows(run.tokens, model.config().hidden_size);
  model.advance(ids, std::span(&run, 1), hidden, pool);
  Values logits(static_cast<std::size_t>(run.tokens * model.config().vocab_size));
  model.logits(hidden, View<float, 2>::contiguous(logits.data(), {run.tokens, model.config().vocab_size}), pool);
  return logits;
}

// Only the rates of decay differ: the file has their negatives, and a folder their logarithms.
TEST(GgufFamily, HasTheLogitsOfTheFolder) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    const test::TempFolder folder;
    const auto config = random_family_config(false, seed);
    const auto tensors = random_family_tensors(config, "model.", seed);
    write_family_folder(folder.path(), config, tensors, false, false);
    io::write_file_atomically(folder / "m.gguf", GgufOf(config, tensors).file().bytes());
    const Values expected = logits_of(folder.path()), got = logits_of(folder / "m.gguf");
    EXPECT_LE(worst_difference(got, {expected.begin(), expected.end()}), 1e-5);
  }
}

TEST(GgufFamily, RefusesOtherFiles) {
  const test::TempFolder folder;
  const auto refuse = [&](const test::GgufBytes& file, const std::string& says) {
    io::write_file_atomically(folder / "m.gguf", file.bytes());
    test::expect_bad_content([&] { FamilyModel(folder / "m.gguf", WeightType::float32); }, -1, says);
  };
  auto config = random_family_config(false, 1);
  const auto tensors = random_family_tensors(config, "model.", 1);
  refuse(test::GgufBytes().text("general.architecture", "llama"),
         "general.architecture: got \"llama\", expected qwen35");
  refuse(test::GgufBytes().text("general.architecture", "qwen35"), "has no tensor token_embd.weight");
  refuse(GgufOf(config, tensors).file().text("qwen35.rope.scaling.type", "yarn"), "rope.scaling.type: expected none");
  refuse(GgufOf(config, tensors).file().tensor("blk.0.other.weight", 0, {1}, "1234"),
         "has a tensor blk.0.other.weight");
}

// Rows of ssm_out with fewer bytes than there are value heads.
TEST(GgufFamily, RefusesATensorThatIsTooSmall) {
  auto config = random_family_config(false, 1);
  config.update({{"linear_num_key_heads", 2}, {"linear_num_value_heads", 6}, {"num_hidden_layers", 1}});
  config["layer_types"] = {"linear_attention"};
  auto tensors = random_family_tensors(config, "model.", 1);
  tensors.all["model.layers.0.linear_attn.out_proj.weight"] = {{1, 1}, {0.0F}};
  const test::TempFolder folder;
  io::write_file_atomically(folder / "m.gguf", GgufOf(config, tensors).file().bytes());
  test::expect_bad_content([&] { FamilyModel(folder / "m.gguf", WeightType::float32); }, -1, "has another shape");
}

TEST(GgufFamily, GpusRefuseIt) {
  test::expect_error([] { GpuFamilyModel("m.gguf", WeightType::float32, 10, torch::kCPU); }, "device", "GGUF");
}

}  // namespace
}  // namespace efla::nn
