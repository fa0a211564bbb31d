// What the readers of models of families take and refuse: configurations and tensors.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "efla/nn/families/family_model.h"
#include "efla/nn/families/gpu_family_model.h"
#include "tests/nn/random_family.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::nn {
namespace {

// A folder with a small model of qwen3_5, whose configuration and tensors a test may change.
struct ChangedFolder {
  test::TempFolder folder;
  nlohmann::json config = random_family_config(false, 1);
  RandomTensors tensors;
  bool nested = false;

  explicit ChangedFolder(bool olmo = false) : config(random_family_config(olmo, 1)) {
    config["layer_types"] = {"linear_attention", "full_attention"};
    config["num_hidden_layers"] = 2;
    config["tie_word_embeddings"] = false;
    tensors = random_family_tensors(config, "model.", 1);
  }
  void refuse(const std::string& says) {
    write_family_folder(folder.path(), config, tensors, nested, false);
    test::expect_bad_content([&] { FamilyModel(folder.path(), WeightType::float32); }, -1, says);
  }
  FamilyModel load() {
    write_family_folder(folder.path(), config, tensors, nested, false);
    return FamilyModel(folder.path(), WeightType::float32);
  }
};

TEST(FamilyConfig, RefusesWhatWouldChangeTheComputation) {
  const std::vector<std::pair<nlohmann::json, std::string>> changes{
      {{{"model_type", "qwen3_next"}}, "num_experts"},
      {{{"model_type", "qwen3_next"}, {"num_experts", 4}, {"num_experts_per_tok", 5}}, "num_experts_per_tok: got 5"},
      {{{"model_type", "qwen3_next"}, {"num_experts", 0}, {"mlp_only_layers", {2}}}, "mlp_only_layers"},
      {{{"model_type", "qwen3_5_moe_text"}, {"num_experts", 4}, {"num_experts_per_tok", 2}}, "moe_intermediate_size"},
      {{{"model_type", "kimi_linear"}}, "multi-head latent attention (kv_lora_rank)"},
      {{{"model_type", "llama"}}, "model_type: got \"llama\""},
      {{{"sliding_window", 512}}, "sliding_window"},
      {{{"num_experts", 8}}, "num_experts"},
      {{{"attention_bias", true}}, "attention_bias: got true"},
      {{{"attn_output_gate", false}}, "attn_output_gate: got false"},
      {{{"hidden_act", "gelu"}}, "hidden_act: got \"gelu\""},
      {{{"quantization_config", {{"quant_method", "nf4"}}}}, "quant_method: got \"nf4\""},
      {{{"quantization_config", {{"quant_method", "fp8"}}}}, "weight_block_size"},
      {{{"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {64, 64}}}}}, "weight_block_size"},
      {{{"quantization_config", {{"quant_method", "gptq"}, {"bits", 8}}}}, "bits: got 8"},
      {{{"quantization_config", {{"quant_method", "gptq"}, {"bits", 4}, {"checkpoint_format", "gptq_v2"}}}},
       "checkpoint_format"},
      {{{"quantization_config", {{"quant_method", "awq"}, {"bits", 4}, {"rotation", "hadamard"}}}}, "rotation"},
      {{{"quantization_config", {{"quant_method", "compressed-tensors"}, {"format", "nvfp4-pack-quantized"}}}},
       "format"},
      {{{"quantization_config",
         {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"config_groups", {{"group_0", {{"weights", {{"num_bits", 4}, {"symmetric", false}}}}}}}}}},
       "symmetric: got false"},
      {{{"mamba_ssm_dtype", "bfloat16"}}, "mamba_ssm_dtype"},
      {{{"layer_types", {"linear_attention", "sliding_attention"}}}, "linear_attention and full_attention alone"},
      {{{"layer_types", {"linear_attention"}}}, "one for each of the 2 layers"},
      {{{"num_hidden_layers", 0}}, "num_hidden_layers: got 0"},
      {{{"vocab_size", nullptr}}, "vocab_size"},
      {{{"head_dim", nullptr}}, "head_dim"},
      {{{"hidden_size", -5}}, "hidden_size: got -5"},
      {{{"hidden_size", 1e300}}, "hidden_size"},
      {{{"num_key_value_heads", 1 << 12}}, "num_key_value_heads"},
      {{{"linear_num_key_heads", 7}, {"linear_num_value_heads", 8}}, "a multiple of linear_num_key_heads, 7"},
      {{{"linear_conv_kernel_dim", 9}}, "linear_conv_kernel_dim: got 9"},
      {{{"rms_norm_eps", 0}}, "rms_norm_eps"},
      {{{"rope_parameters", nullptr}}, "rope_theta"},
      {{{"rope_parameters", {{"rope_theta", 1e4}, {"rope_type", "yarn"}}}}, "rope_parameters.rope_type: got \"yarn\""},
      {{{"rope_parameters", {{"rope_theta", 1e4}, {"factor", 4.0}}}}, "rope_parameters.factor"},
      {{{"rope_parameters", {{"rope_theta", 1e4}, {"partial_rotary_factor", 1.5}}}}, "from 0 to 1"},
      {{{"head_dim", 6}, {"rope_parameters", {{"rope_theta", 1e4}, {"partial_rotary_factor", 0.5}}}}, "even number"},
      {{{"rope_parameters", "linear"}}, "rope_parameters"},
  };
  for (const auto& [change, says] : changes) {
    SCOPED_TRACE(change.dump());
    ChangedFolder folder;
    folder.config.update(change);
    folder.refuse(says);
  }
  ChangedFolder folder;
  folder.nested = true;
  folder.config["model_type"] = "qwen2";
  folder.refuse("text_config.model_type: got \"qwen2\"");
}

TEST(FamilyConfig, GpusRefuseExpertsAndLargeHeads) {
  for (const bool experts : {true, false}) {
    auto config = experts ? random_expert_config(false, 1) : random_family_config(false, 1);
    if (!experts) config.update({{"head_dim", 260}, {"layer_types", {"full_attention"}}, {"num_hidden_layers", 1}});
    const test::TempFolder folder;
    write_family_folder(folder.path(), config, random_family_tensors(config, "model.", 1), false, false);
    test::expect_error([&] { GpuFamilyModel(folder.path(), WeightType::float32, 10, torch::kCPU); }, "device",
                       experts ? "num_experts" : "head_dim is 260");
  }
}

TEST(FamilyConfig, TakesWhatDoesNot) {
  ChangedFolder folder;
  folder.config.update({{"rope_parameters",
                         {{"rope_theta", 1e4},
                          {"mrope_section", {1, 1, 1}},
                          {"mrope_interleaved", true},
                          {"partial_rotary_factor", 1.0},
                          {"rope_type", "default"}}},
                        {"mtp_num_hidden_layers", 1},
                        {"full_attention_interval", 4},
                        {"max_position_embeddings", 4096},
                        {"attention_dropout", 0.0},
                        {"eos_token_id", {3, 4}},
                        {"bos_token_id", nullptr}});
  EXPECT_EQ(folder.load().config().eos, (std::vector<std::int64_t>{3, 4}));
  io::write_file_atomically(folder.folder.path() / "generation_config.json", "{\"eos_token_id\": [5, 6]}");
  EXPECT_EQ(folder.load().config().eos, (std::vector<std::int64_t>{5, 6}));
  folder.config.erase("layer_types");
  folder.config["full_attention_interval"] = 2;
  EXPECT_EQ(folder.load().config().attends, (std::vector<bool>{false, true}));
}

// Whatever a field holds, the configuration is read or refused, and sizes that are read lie in their ranges.
TEST(FamilyConfig, ReadsOrRefusesFieldsOfAnyValue) {
  const std::vector<nlohmann::json> values{nullptr,
                                           true,
                                           false,
                                           0,
                                           1,
                                           -1,
                                           2,
                                           3,
                                           4096,
                                           65536,
                                           65537,
                                           1e18,
                                           1e300,
                                           0.5,
                                           -0.0,
                                           std::int64_t{1} << 62,
                                           "",
                                           "default",
                                           "full_attention",
                                           nlohmann::json::array(),
                                           {1, 2},
                                           {"full_attention", "full_attention"},
                                           nlohmann::json::object(),
                                           {{"rope_theta", 1e4}}};
  Random random(8);
  std::int64_t read = 0;
  for (int i = 0; i < 4000; ++i) {
    auto config = random_family_config(i % 2 == 1, static_cast<std::uint64_t>(i % 16));
    for (auto changes = 1 + random.below(3); changes > 0; --changes) {
      auto at = config.begin();
      std::advance(at, random.below(static_cast<std::uint32_t>(config.size())));
      const auto& value = values[random.below(static_cast<std::uint32_t>(values.size()))];
      at.key() == "model_type" || random.below(4) > 0 ? void(*at = value) : void(config.erase(at));
    }
    SCOPED_TRACE(config.dump());
    try {
      const auto got = family_config_from_json({config, io::refuse_in_file("config.json")});
      ++read;
      for (const auto size : {got.vocab_size, got.hidden_size, got.intermediate_size, got.heads, got.key_value_heads,
                              got.head_dim, got.mixer.heads, got.mixer.value_heads, got.mixer.key_dim}) {
        EXPECT_GE(size, 1);
      }
      EXPECT_EQ(got.heads % got.key_value_heads, 0);
      EXPECT_LE(got.rotary, got.head_dim);
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("config.json: "), std::string::npos);
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_LT(read, 4000);
}

TEST(FamilyWeights, RefusesTensorsThatAreNotTheModels) {
  const auto changed = [](const std::string& says, const std::function<void(RandomTensors&)>& change,
                          bool olmo = false) {
    ChangedFolder folder(olmo);
    change(folder.tensors);
    folder.refuse(says);
  };
  const auto rename = [](const std::string& from, const std::string& to) {
    return [=](RandomTensors& tensors) {
      auto node = tensors.all.extract(from);
      node.key() = to;
      tensors.all.insert(std::move(node));
    };
  };
  const std::string mixer = "model.layers.0.linear_attn.", attention = "model.layers.1.self_attn.";
  changed("has no tensor " + attention + "q_norm.weight", [&](auto& t) { t.all.erase(attention + "q_norm.weight"); });
  changed("has a tensor model.extra", [](auto& t) { t.add("model.extra", {1}, 1.0); });
  changed("nearest: " + mixer + "A_log", [&](auto& t) { t.add(mixer + "A_logs", {1}, 1.0); });
  changed("neither model.language_model.norm.weight", rename("model.norm.weight", "ln_f.weight"));
  changed("has no tensor model.embed_tokens.weight", rename("model.embed_tokens.weight", "wte.weight"));
  changed("expected F32, BF16 or F16", [&](auto& t) {
    t.all.at(mixer + "dt_bias").shape = {1, 0};
    t.all.at(mixer + "dt_bias").values.clear();
  });
  changed(
      "rows, expected",
      [](auto& t) {
        auto& taps = t.all.at("model.layers.0.linear_attn.k_conv1d.weight");
        taps.values.resize(taps.values.size() - static_cast<std::size_t>(taps.shape[2]));
        --taps.shape[0];
      },
      true);
  ChangedFolder folder;
  folder.tensors.add("mtp.fc.weight", {2, 2}, 1.0);
  folder.tensors.add("model.visual.patch", {3}, 1.0);
  EXPECT_EQ(folder.load().skipped_tensors(), 2);
}

// Returns the logits after some ids.
std::vector<float> logits_of(FamilyModel model) {
  const std::vector<std::int32_t> ids{3, 1, 4, 1, 5};
  const std::int64_t rows = std::ssize(ids), vocab_size = model.config().vocab_size;
  const TextRun run{.tokens = rows};
  ThreadPool pool(1);
  std::vector<float> hidden(static_cast<std::size_t>(rows * model.config().hidden_size));
  std::vector<float> logits(static_cast<std::size_t>(rows * vocab_size));
  const auto inner = View<float, 2>::contiguous(hidden.data(), {rows, model.config().hidden_size});
  model.make_slots(1);
  model.clear(0);
  model.advance(ids, std::span(&run, 1), inner, pool);
  model.logits(inner, View<float, 2>::contiguous(logits.data(), {rows, vocab_size}), pool);
  return logits;
}

// Converts a folder's tensors as programs for MLX do.
void convert_for_mlx(RandomTensors& tensors) {
  std::map<std::string, RandomTensors::Tensor> converted;
  for (auto& [name, tensor] : tensors.all) {
    if (name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight")) {
      for (auto& w : tensor.values) w += 1.0F;
    }
    if (name.ends_with("conv1d.weight")) std::swap(tensor.shape[1], tensor.shape[2]);
    converted["language_model." + name] = tensor;
  }
  tensors.all = converted;
}

TEST(FamilyWeights, TakesFoldersForMlx) {
  ChangedFolder folder;
  const auto expected = logits_of(folder.load());
  convert_for_mlx(folder.tensors);
  EXPECT_EQ(logits_of(folder.load()), expected);

  ChangedFolder mixed;
  mixed.config["layer_types"] = {"linear_attention", "linear_attention"};
  mixed.tensors = random_family_tensors(mixed.config, "model.", 1);
  auto& shape = mixed.tensors.all.at("model.layers.0.linear_attn.conv1d.weight").shape;
  std::swap(shape[1], shape[2]);
  mixed.refuse("model.layers.1.linear_attn.conv1d.weight is F32");
}

TEST(FamilyWeights, AHeadInTheFolderCountsAlsoIfTheModelIsTied) {
  ChangedFolder folder;
  const auto apart = logits_of(folder.load());
  folder.config["tie_word_embeddings"] = true;
  EXPECT_EQ(logits_of(folder.load()), apart);

  auto& tensors = folder.tensors.all;
  const auto head = tensors.at("lm_head.weight");
  tensors.erase("lm_head.weight");
  EXPECT_NE(logits_of(folder.load()), apart);
  tensors.at("model.embed_tokens.weight") = head;
  const auto tied = logits_of(folder.load());
  tensors.erase("model.embed_tokens.weight");
  tensors["lm_head.weight"] = head;
  EXPECT_EQ(logits_of(folder.load()), tied);
  folder.config["tie_word_embeddings"] = false;
  folder.refuse("has no tensor model.embed_tokens.weight");
}

// Returns how many kB of the mapped weights of a folder are in this process's memory.
std::int64_t resident_kilobytes(const std::filesystem::path& folder) {
  std::ifstream maps("/proc/self/smaps");
  bool within = false;
  std::int64_t total = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < line.find(' ')) within = line.ends_with((folder / "model.safetensors").string());
    if (within && line.starts_with("Rss:")) total += std::stoll(line.substr(4));
  }
  return total;
}

TEST(FamilyWeights, LeaveTheMemoryWhenTheyAreCopiedToAnotherType) {
  ChangedFolder folder;
  folder.config.update({{"hidden_size", 256}, {"intermediate_size", 2048}});
  folder.tensors = random_family_tensors(folder.config, "model.", 1);
  folder.load();  // writes the folder
  const auto resident = [&](WeightType weights) {
    const FamilyModel model(folder.folder.path(), weights);
    return resident_kilobytes(folder.folder.path());
  };
  const auto whole = resident(WeightType::float32);
  EXPECT_GT(whole, 12'000);
  EXPECT_LT(resident(WeightType::int8), whole / 4);
  EXPECT_LT(resident(WeightType::bfloat16), whole / 4);  // float32 in the folder
}

}  // namespace
}  // namespace efla::nn
