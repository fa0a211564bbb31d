#include "cli/support/model_tokenizer.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "efla/base/error.h"
#include "efla/data/tokenizers/tokenizer_json.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/nn/models/language_model_file.h"
#include "efla/train/run.h"

namespace efla::cli {
namespace {

// Returns the text at a JSON pointer of a run.json, or "". Throws IoError for a value of another type.
std::string text_at(const nlohmann::json& recorded, const char* path, const std::filesystem::path& run) {
  const nlohmann::json::json_pointer pointer(path);
  if (!recorded.is_object() || !recorded.contains(pointer)) return "";
  const auto& value = recorded.at(pointer);
  if (!value.is_string()) {
    throw IoError(IoError::Kind::content, run.string(), -1, std::string(path) + " is not a text");
  }
  return value.get<std::string>();
}

}  // namespace

std::string find_tokenizer(const std::string& model, const std::string& given) {
  if (!given.empty()) return given;
  const auto folder = nn::language_model_folder(model);
  const auto beside = [&](const char* name) {
    return std::filesystem::exists(folder / name) ? (folder / name).string() : std::string();
  };
  if (auto path = beside(kTokenizerFile); !path.empty()) return path;
  // A run's checkpoint has a tokenizer.json for transformers, which is not the tokenizer that made its tokens.
  const auto run = std::filesystem::path(model) / train::kRunFile;
  if (!std::filesystem::exists(run)) return beside(kTokenizerJsonFile);
  const auto recorded = io::read_json(run);
  if (auto path = text_at(recorded, "/config/data/tokenizer", run); !path.empty()) return path;
  // Any other is a file's name without its folder.
  return text_at(recorded, "/data/train/tokenizer", run) == "bytes" ? "bytes" : "";
}

std::string require_tokenizer(const std::string& command, const std::string& model, const std::string& given) {
  auto name = find_tokenizer(model, given);
  if (name.empty())
    throw Error(command, "--tokenizer", "none, and none in " + model,
                "a SentencePiece model, a tokenizer.json, or bytes");
  return name;
}

std::vector<std::pair<std::string, std::string>> files_for_transformers(const std::string& name) {
  if (!name.ends_with(".json")) {
    const auto json = data::tokenizer_json(name);
    return {{kTokenizerJsonFile, json.tokenizer.dump() + "\n"}, {kTokenizerConfigFile, json.config.dump(1) + "\n"}};
  }
  std::vector<std::pair<std::string, std::string>> files;
  const auto add = [&](const std::filesystem::path& file, const char* as) {
    const auto bytes = io::read_file(file);
    files.emplace_back(as, std::string(bytes.begin(), bytes.end()));
  };
  add(name, kTokenizerJsonFile);
  const auto config = std::filesystem::path(name).replace_filename(kTokenizerConfigFile);
  if (std::filesystem::exists(config)) add(config, kTokenizerConfigFile);
  return files;
}

nlohmann::json tokenizer_of_run(const io::TokenizerInfo& tokenizer) {
  return {{"name", tokenizer.name}, {"fingerprint", tokenizer.fingerprint}, {"vocab_size", tokenizer.vocab_size}};
}

void require_tokenizer_of_run(const std::string& command, const std::string& model, const std::string& path,
                              const io::TokenizerInfo& tokenizer) {
  const auto run = std::filesystem::path(model) / train::kRunFile;
  if (!std::filesystem::exists(run)) return;
  const auto recorded = io::read_json(run);
  if (!recorded.is_object() || !recorded.contains("tokenizer")) return;  // of a version that did not keep it
  const auto& expected = recorded.at("tokenizer");
  if (!expected.is_object() || text_at(recorded, "/tokenizer/fingerprint", run) == tokenizer.fingerprint) return;
  const auto name = text_at(recorded, "/tokenizer/name", run);
  throw Error(
      command, "--tokenizer", path + ", which is not the tokenizer of " + model,
      (name.empty() ? "another" : name) + " of " + expected.value("vocab_size", nlohmann::json(0)).dump() + " tokens");
}

}  // namespace efla::cli
