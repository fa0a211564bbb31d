// Commands with the folder of a model of a family, as transformers saves it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/base/error.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/io/safetensors/safetensors.h"
#include "tests/nn/random_family.h"
#include "tests/support/byte_level.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kDbrx =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kIndex = "model.safetensors.index.json";

// Divides model.safetensors into two shards and their index.
void shard(const fs::path& folder) {
  json index{{"metadata", {{"total_size", 1}}}, {"weight_map", json::object()}};
  {
    const io::SafetensorsFile file(folder / kWeights);
    const auto& all = file.tensors();
    const auto half = all.begin() + std::ssize(all) / 2;
    const std::vector parts{std::vector(all.begin(), half), std::vector(half, all.end())};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string name = "model-0000" + std::to_string(i + 1) + "-of-00002.safetensors";
      io::write_safetensors(folder / name, parts[i], {{"format", "pt"}});
      for (const auto& tensor : parts[i]) index["weight_map"][tensor.name] = name;
    }
  }
  fs::remove(folder / kWeights);
  io::write_file_atomically(folder / kIndex, index.dump(1));
}

class FamilyFolder : public testing::Test {
 protected:
  FamilyFolder() {
    nn::write_family_folder(model(), config_, nn::random_family_tensors(config_, "model.language_model.", 8), true,
                            /*narrow=*/true);
  }
  fs::path model() const { return folder_.path() / "model"; }
  fs::path out() const { return folder_.path() / "out"; }
  std::vector<std::string> exporting() const { return {"export", model().string(), "--out", out().string()}; }
  // Returns the sorted names of the files that were exported.
  std::vector<std::string> exported() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(out())) names.push_back(entry.path().filename().string());
    std::ranges::sort(names);
    return names;
  }

  const TempFolder folder_;
  json config_ = nn::random_family_config(false, 7);

 private:
  const bool made_ = fs::create_directory(folder_.path() / "model");
};

TEST_F(FamilyFolder, IsExportedAsItWas) {
  write_text(model() / "chat_template.jinja", "{{ messages }}");
  write_text(model() / ".hidden", "x");
  fs::create_directory(model() / "assets");
  const auto result = run_program(exporting());
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("qwen3_5"), std::string::npos) << result.out;
  EXPECT_EQ(exported(), (std::vector<std::string>{"chat_template.jinja", "config.json", kWeights}));
  EXPECT_EQ(read_text(out() / "config.json"), read_text(model() / "config.json"));
  // The folder was written with checksums, and so is the same.
  EXPECT_EQ(read_text(out() / kWeights), read_text(model() / kWeights));
  EXPECT_EQ(run_program(exporting()).exit_code, 2) << "the folder is not empty";
}

TEST_F(FamilyFolder, NeedsNoImport) {
  const auto result = run_program({"import", model().string(), "--out", out().string()});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("every command takes the folder of a hybrid as it is"), std::string::npos) << result.err;
  EXPECT_FALSE(fs::exists(out()));
}

TEST_F(FamilyFolder, IsExportedInItsShards) {
  shard(model());
  ASSERT_EQ(run_program(exporting()).exit_code, 0);
  const auto names = exported();
  ASSERT_EQ(names.size(), 4U);
  for (const auto& name : names) EXPECT_EQ(read_text(out() / name), read_text(model() / name)) << name;
  fs::remove(out() / names[1]);
  fs::remove_all(model());
  fs::rename(out(), model());
  const auto refused = run_program(exporting());
  EXPECT_EQ(refused.exit_code, 2) << refused.err;
  EXPECT_FALSE(fs::exists(out()));
}

TEST_F(FamilyFolder, ChecksumsAreAdded) {
  // A file without checksums, as other programs write it.
  const io::SafetensorsFile file(model() / kWeights);
  const auto& first = file.tensors().front();
  const auto without = [&] {
    std::string header = "{";
    std::size_t at = 0;
    for (const auto& tensor : file.tensors()) {
      header += (at == 0 ? "\"" : ",\"") + tensor.name + R"(":{"dtype":")" + std::string(io::type_name(tensor.type)) +
                R"(","shape":)" + json(tensor.shape).dump() + ",\"data_offsets\":[" + std::to_string(at) + ",";
      at += tensor.bytes.size();
      header += std::to_string(at) + "]}";
    }
    header += "}";
    std::string bytes(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i));
    bytes += header;
    for (const auto& tensor : file.tensors()) bytes.append(tensor.bytes.begin(), tensor.bytes.end());
    return bytes;
  }();
  io::write_file_atomically(model() / kWeights, without);
  ASSERT_EQ(run_program(exporting()).exit_code, 0);
  const auto bytes = read_text(out() / kWeights);
  EXPECT_NE(bytes, without);
  const io::SafetensorsFile written(out() / kWeights);
  for (const auto& tensor : file.tensors()) {
    const auto* same = written.find(tensor.name);
    ASSERT_NE(same, nullptr);
    EXPECT_TRUE(std::ranges::equal(same->bytes, tensor.bytes)) << tensor.name;
  }
  auto damaged = bytes;
  damaged[damaged.size() - first.bytes.size()] ^= 1;
  io::write_file_atomically(out() / kWeights, damaged);
  EXPECT_THROW(io::SafetensorsFile(out() / kWeights), IoError);
}

TEST_F(FamilyFolder, DraftsByItsOwnHeadLeaveTheReplyAsItIs) {
  config_["vocab_size"] = 260;
  config_["layer_types"] = {"linear_attention", "full_attention"};
  config_["num_hidden_layers"] = 2;
  const auto generate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all{"generate", model().string(), "--tokenizer", "bytes", "--prompt", "ab"};
    all.insert(all.end(), {"--max-tokens", "40", "--draft-tokens", "0"});
    all.insert(all.end(), more.begin(), more.end());
    return run_program(all);
  };
  const auto refuses = [&](const std::vector<std::string>& more, const char* says) {
    const auto result = generate(more);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find(says), std::string::npos) << result.err;
  };
  auto tensors = nn::random_family_tensors(config_, "model.language_model.", 8);
  nn::write_family_folder(model(), config_, tensors, true, true);
  refuses({"--draft-head", "1"}, "--draft-head: got a model without tensors mtp.");
  nn::add_draft_head(tensors, config_);
  nn::write_family_folder(model(), config_, tensors, true, true);
  refuses({"--draft-head", "8"}, "--draft-head");
  const auto drafted = generate({"--draft-head", "3", "--json"}), none = generate({"--json"});
  ASSERT_EQ(drafted.exit_code, 0) << drafted.err;
  ASSERT_EQ(none.exit_code, 0) << none.err;
  EXPECT_EQ(json::parse(drafted.out)["text"], json::parse(none.out)["text"]);
  EXPECT_GT(json::parse(drafted.out)["drafted_tokens"], 0);
  EXPECT_EQ(json::parse(none.out)["drafted_tokens"], 0);
  const auto session = (folder_.path() / "session").string();
  EXPECT_EQ(generate({"--draft-head", "3", "--save-session", session}).exit_code, 0);
  EXPECT_EQ(generate({"--draft-head", "1", "--load-session", session}).exit_code, 0);
  refuses({"--load-session", session}, "session");
}

// The file has the folder's tokenizer and continues its prompts as the folder does.
TEST_F(FamilyFolder, IsExportedAsAGgufFile) {
  config_["vocab_size"] = 280;
  nn::write_family_folder(model(), config_, nn::random_family_tensors(config_, "model.language_model.", 8), true, true);
  const json split{{"type", "Split"}, {"pattern", {{"Regex", kDbrx}}}, {"behavior", "Isolated"}, {"invert", false}};
  const json stages{{"type", "Sequence"}, {"pretokenizers", {split, byte_level_step(false)}}};
  write_text(model() / "tokenizer.json", byte_level_json(stages).dump());
  write_text(model() / "tokenizer_config.json", R"({"eos_token": "<|eos|>", "chat_template": "{{ messages }}"})");
  const auto file = (folder_.path() / "m.gguf").string();
  const auto exported = run_program({"export", model().string(), "--gguf", file, "--gguf-type", "F32"});
  ASSERT_EQ(exported.exit_code, 0) << exported.err;
  EXPECT_NE(exported.out.find("weights in F32"), std::string::npos) << exported.out;
  const auto continued = [&](const std::string& path) {
    return run_program({"generate", path, "--prompt", "the in", "--max-tokens", "20", "--temperature", "0"}).out;
  };
  EXPECT_EQ(continued(file), continued(model().string()));
  EXPECT_FALSE(continued(file).empty());
  const auto refuses = [&](const std::vector<std::string>& arguments, const std::string& says) {
    const auto result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find(says), std::string::npos) << result.err;
  };
  refuses({"export", model().string()}, "--out: got neither it nor --gguf, expected one");
  refuses({"export", file, "--gguf", file + "2"}, "RUN: got the GGUF file");
  refuses({"export", file, "--out", out().string()}, "RUN: got the GGUF file");
  const std::string weights = (model() / "model.safetensors").string();
  refuses({"export", model().string(), "--gguf", weights},
          "--gguf: got " + weights + ", expected a file name that ends");
  refuses({"export", model().string(), "--gguf", file, "--gguf-type", "Q4_K"}, "--gguf-type");
  refuses({"export", model().string(), "--out", out().string(), "--gguf-type", "F16"}, "--gguf-type");
  write_text(model() / "tokenizer.json", byte_level_json(byte_level_step(true)).dump());
  refuses({"export", model().string(), "--gguf", file}, "splits texts in another way");
}

}  // namespace
}  // namespace efla::test
