// Models of families in GGUF files: they compute what the same weights in a folder do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "efla/nn/families/family_model.h"
#include "efla/nn/families/gguf_export.h"
#include "efla/nn/families/gguf_tensors.h"
#include "efla/nn/families/gpu_family_model.h"
#include "tests/nn/family_reference.h"
#include "tests/nn/gguf_of.h"
#include "tests/nn/random_family.h"
#include "tests/support/expect_error.h"
#include "tests/support/gguf.h"
#include "tests/support/temp_folder.h"

namespace efla::nn {
namespace {

using nlohmann::json;

Values logits_of(const std::filesystem::path& path, WeightType weights = WeightType::float32) {
  FamilyModel model(path, weights);
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

// Returns the configuration of a model whose rows are whole blocks of every type.
json block_config(std::uint64_t seed) {
  auto config = random_family_config(false, seed);
  config.update({{"hidden_size", 256},
                 {"intermediate_size", 256},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"head_dim", 64},
                 {"linear_num_key_heads", 2},
                 {"linear_num_value_heads", seed % 2 == 0 ? 4 : 2},
                 {"linear_key_head_dim", 32},
                 {"linear_value_head_dim", seed % 2 == 0 ? 64 : 256},
                 {"num_hidden_layers", 2}});
  config["layer_types"] = {"linear_attention", "full_attention"};
  return config;
}

// On some processors blocks and the inputs of their products are rounded to bfloat16, as both are with the type
// bfloat16 for the same numbers in float32; types that kernels do not multiply become bfloat16. Single models enlarge
// one rounding more than the other, so that the errors of several are compared by their geometric mean.
TEST(GgufFamily, QuantisedWeightsCostNoMoreThanBfloat16) {
  constexpr int kFiles = 16;
  std::uint64_t seed = 0;
  for (const auto& block : kBlockTypes) {
    SCOPED_TRACE(block.name);
    double ratios = 0.0;
    for (int i = 0; i < kFiles; ++i, ++seed) {
      const test::TempFolder folder;
      const auto config = block_config(seed);
      const auto all = random_block_tensors(config, block, seed);
      io::write_file_atomically(folder / "wide.gguf", GgufOf(config, all.tensors).file().bytes());
      io::write_file_atomically(folder / "blocks.gguf", GgufOf(config, all.tensors, &all).file().bytes());
      const Values exact = logits_of(folder / "wide.gguf"),
                   rounded = logits_of(folder / "wide.gguf", WeightType::bfloat16),
                   got = logits_of(folder / "blocks.gguf");
      const Numbers expected(exact.begin(), exact.end());
      const double own = worst_difference(got, expected), narrow = worst_difference(rounded, expected);
      EXPECT_LE(own, 8.0 * narrow) << seed;
      ratios += std::log((own + 1e-9) / narrow);
    }
    EXPECT_LE(std::exp(ratios / kFiles), 1.25);
  }
}

// Files that are exported have the logits of their folder, up to the rates of decay and the type of the weights.
TEST(GgufFamily, ExportedFilesHaveTheLogitsOfTheFolder) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    const test::TempFolder folder;
    const auto config = random_family_config(false, seed);
    const auto tensors = random_family_tensors(config, "model.", seed);
    write_family_folder(folder.path(), config, tensors, false, /*narrow=*/seed % 2 == 0);
    const auto done = export_gguf(folder.path(), folder / "m.gguf", "", {});
    EXPECT_EQ(done.type, seed % 2 == 0 ? "BF16" : "F32");
    const Values expected = logits_of(folder.path()), got = logits_of(folder / "m.gguf");
    EXPECT_LE(worst_difference(got, {expected.begin(), expected.end()}), 1e-5);
    const auto read = load_family_config(folder / "m.gguf"), written = load_family_config(folder.path());
    EXPECT_EQ(read.attends, written.attends);
    EXPECT_EQ(read.rotary, written.rotary);
  }
}

// The same file as the one that a program in the tests writes as llama.cpp's converter does.
TEST(GgufFamily, ExportsTheTensorsOfLlamasConverter) {
  const test::TempFolder folder;
  auto config = random_family_config(false, 3);
  config.update({{"linear_num_key_heads", 2}, {"linear_num_value_heads", 6}, {"tie_word_embeddings", false}});
  const auto tensors = random_family_tensors(config, "model.", 3);
  write_family_folder(folder.path(), config, tensors, false, false);
  export_gguf(folder.path(), folder / "m.gguf", "F32", {});
  io::write_file_atomically(folder / "expected.gguf", GgufOf(config, tensors).file().bytes());
  const io::GgufFile got(folder / "m.gguf"), expected(folder / "expected.gguf");
  ASSERT_EQ(got.tensors().size(), expected.tensors().size());
  for (const auto& tensor : expected.tensors()) {
    const auto* own = got.find(tensor.name);
    ASSERT_NE(own, nullptr) << tensor.name;
    EXPECT_EQ(own->shape, tensor.shape) << tensor.name;
    if (tensor.name.ends_with("ssm_a")) continue;  // the exponential is computed in float64
    EXPECT_TRUE(std::ranges::equal(own->bytes, tensor.bytes)) << tensor.name;
  }
}

// The head for drafts is the block behind the layers.
TEST(GgufFamily, HasTheHeadForDrafts) {
  const test::TempFolder folder;
  const auto config = random_family_config(false, 4);
  auto tensors = random_family_tensors(config, "model.", 4);
  add_draft_head(tensors, config);
  write_family_folder(folder.path(), config, tensors, false, false);
  EXPECT_EQ(export_gguf(folder.path(), folder / "m.gguf", "F32", {}).skipped_tensors, 0);
  const auto read = load_family_config(folder / "m.gguf");
  EXPECT_EQ(read.attends, load_family_config(folder.path()).attends);
  FamilyTensors of_file(folder / "m.gguf", read), of_folder(folder.path(), load_family_config(folder.path()));
  const auto got = of_file.draft_head(), expected = of_folder.draft_head();
  const auto same = [](const StoredMatrix& a, const StoredMatrix& b) {
    return a.wide.extent == b.wide.extent && std::equal(a.wide.data, a.wide.data + a.wide.size(), b.wide.data);
  };
  EXPECT_TRUE(same(got.fc, expected.fc));
  EXPECT_TRUE(same(got.layer.mlp.down, expected.layer.mlp.down));
  EXPECT_TRUE(same(got.layer.attention.out, expected.layer.attention.out));
  EXPECT_EQ(got.embedding_norm, expected.embedding_norm);
  EXPECT_EQ(got.hidden_norm, expected.hidden_norm);
  EXPECT_EQ(got.norm, expected.norm);
  EXPECT_EQ(got.layer.before_mlp, expected.layer.before_mlp);
  EXPECT_EQ(logits_of(folder / "m.gguf").size(), logits_of(folder.path()).size());  // without the head
}

TEST(GgufFamily, ExportsTypes) {
  const test::TempFolder folder;
  const auto config = block_config(1);
  const auto tensors = random_family_tensors(config, "model.", 1);
  write_family_folder(folder.path(), config, tensors, false, false);
  const Values expected = logits_of(folder.path());
  for (const auto& [type, most] : std::map<std::string, double>{{"F16", 0.02}, {"BF16", 0.1}, {"Q8_0", 0.3}}) {
    export_gguf(folder.path(), folder / "m.gguf", type, {});
    const io::GgufFile file(folder / "m.gguf");
    EXPECT_EQ(file.find("blk.0.ffn_up.weight")->type->name, type);
    EXPECT_EQ(file.find("blk.0.ssm_alpha.weight")->type->name, "F32");
    const Values got = logits_of(folder / "m.gguf");
    const double worst = worst_difference(got, {expected.begin(), expected.end()});
    EXPECT_LE(worst, most) << type;
    EXPECT_GT(worst, 0.0) << type;
  }
  export_gguf(folder.path(), folder / "m.gguf", "Q4_0", {});
  const io::GgufFile four(folder / "m.gguf");
  const auto& up = *four.find("blk.0.ffn_up.weight");
  EXPECT_EQ(up.type->name, "Q4_0");
  EXPECT_EQ(four.find("blk.0.attn_qkv.weight")->type->name, "Q8_0");
  Values numbers(256 * 256), weights = tensors.all.at("model.layers.0.mlp.up_proj.weight").values;
  io::dequantise(*up.type, up.bytes, numbers.data());
  const PackedWeight loaded({torch::from_blob(weights.data(), {256, 256})}, WeightType::int4);
  EXPECT_TRUE(torch::from_blob(numbers.data(), {256, 256}).equal(loaded.widened())) << "--weights int4 rounds alike";
  test::expect_error([&] { export_gguf(folder.path(), folder / "m.gguf", "Q4_K", {}); }, "gguf_type", "F32, F16");
  test::expect_error([&] { export_gguf(folder / "m.gguf", folder / "n.gguf", "F32", {}); }, "gguf", "a folder");
  write_family_folder(folder.path(), random_family_config(true, 1), tensors, false, false);
  test::expect_error([&] { export_gguf(folder.path(), folder / "n.gguf", "F32", {}); }, "gguf", "qwen3_5");
}

TEST(GgufFamily, SaysWhichTypesBecomeWhat) {
  const test::TempFolder folder;
  const auto conversions = [&](std::string_view type, WeightType weights) {
    const auto* block = std::ranges::find(kBlockTypes, type, &BlockType::name);
    auto config = block_config(1);
    config["tie_word_embeddings"] = true;
    const auto all = random_block_tensors(config, *block, 1);
    io::write_file_atomically(folder / "m.gguf", GgufOf(config, all.tensors, &all).file().bytes());
    return GgufTensors(folder / "m.gguf").conversions(weights);
  };
  EXPECT_EQ(conversions("Q4_K", WeightType::float32), "");
  EXPECT_EQ(conversions("Q3_K", WeightType::float32), "Q3_K (14 tensors) becomes bfloat16");
  EXPECT_EQ(conversions("Q3_K", WeightType::int8), "Q3_K (14 tensors) becomes int8");
  auto config = block_config(2);  // whose ssm_out has heads that are no whole blocks of Q4_K
  config["tie_word_embeddings"] = false;
  const auto all = random_block_tensors(config, kBlockTypes[7], 2);
  io::write_file_atomically(folder / "m.gguf", GgufOf(config, all.tensors, &all).file().bytes());
  EXPECT_EQ(GgufTensors(folder / "m.gguf").conversions(WeightType::bfloat16), "F32 (1 tensor) becomes bfloat16");
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
