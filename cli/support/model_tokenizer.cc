#include "cli/support/model_tokenizer.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "efla/base/error.h"
#include "efla/data/tokenizers/gguf_tokenizer.h"
#include "efla/data/tokenizers/tokenizer_config.h"
#include "efla/data/tokenizers/tokenizer_json.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"
#include "efla/io/gguf/gguf.h"
#include "efla/io/json.h"
#include "efla/nn/models/language_model_file.h"
#include "efla/train/run.h"

namespace efla::cli {
namespace {

// Returns the text in a run.json below these names, or "". Throws IoError for a value of another type.
std::string text_at(io::Fields fields, std::initializer_list<const char*> objects, const char* name) {
  for (const char* object : objects) {
    if (fields.find(object) == nullptr) return "";
    fields = fields.object(object);
  }
  return fields.find<std::string>(name).value_or("");
}

}  // namespace

std::string find_tokenizer(const std::string& model, const std::string& given) {
  if (!given.empty()) return given;
  const auto folder = nn::language_model_folder(model);
  if (io::is_gguf(folder)) return data::has_gguf_tokenizer(folder.string()) ? folder.string() : "";
  const auto beside = [&](const char* name) {
    return std::filesystem::exists(folder / name) ? (folder / name).string() : std::string();
  };
  const auto run = std::filesystem::path(model) / train::kRunFile;
  const bool is_run = std::filesystem::exists(run);
  // A run's checkpoint has a tokenizer.json for transformers, which is not the tokenizer that made its tokens.
  if (auto path = beside(kTokenizerJsonFile); !path.empty() && !is_run) return path;
  if (auto path = beside(kTokenizerFile); !path.empty() || !is_run) return path;
  const auto recorded = io::read_json(run);
  const io::Fields fields(recorded, io::refuse_in_file(run.string()));
  if (auto path = text_at(fields, {"config", "data"}, "tokenizer"); !path.empty()) {
    if (path == "bytes" || std::filesystem::exists(path)) return path;
    // The run has moved. Its checkpoints have a copy of a tokenizer.json.
    const auto copy = beside(kTokenizerJsonFile);
    const bool same = !copy.empty() &&
                      data::load_tokenizer(copy)->info().fingerprint == text_at(fields, {"tokenizer"}, "fingerprint");
    return same ? copy : path;
  }
  // Any other name is a file's name without its folder.
  return text_at(fields, {"data", "train"}, "tokenizer") == "bytes" ? "bytes" : "";
}

std::string require_tokenizer(const std::string& command, const std::string& model, const std::string& given) {
  auto name = find_tokenizer(model, given);
  if (name.empty())
    throw Error(command, "--tokenizer", "none, and none in " + model,
                "a SentencePiece model, a tokenizer.json, a GGUF file, or bytes");
  return name;
}

std::vector<std::pair<std::string, std::string>> files_of_tokenizer(const std::string& path) {
  if (io::is_gguf(path)) return files_for_transformers(path);
  std::vector<std::pair<std::string, std::string>> files;
  const auto add = [&](const std::filesystem::path& file, const char* as) {
    const auto bytes = io::read_file(file);
    files.emplace_back(as, std::string(bytes.begin(), bytes.end()));
  };
  add(path, path.ends_with(".json") ? kTokenizerJsonFile : kTokenizerFile);
  for (const char* name : data::kFilesBesideTokenizer) {
    const auto beside = std::filesystem::path(path).replace_filename(name);
    if (std::filesystem::exists(beside)) add(beside, name);
  }
  return files;
}

std::vector<std::pair<std::string, std::string>> files_for_transformers(const std::string& name) {
  if (name.ends_with(".json")) return files_of_tokenizer(name);
  const auto json = data::tokenizer_json(name);
  return {{kTokenizerJsonFile, json.tokenizer.dump() + "\n"}, {data::kTokenizerConfigFile, json.config.dump(1) + "\n"}};
}

nlohmann::json tokenizer_of_run(const io::TokenizerInfo& tokenizer) {
  return {{"name", tokenizer.name}, {"fingerprint", tokenizer.fingerprint}, {"vocab_size", tokenizer.vocab_size}};
}

void require_tokenizer_of_run(const std::string& command, const std::string& model, const std::string& path,
                              const io::TokenizerInfo& tokenizer) {
  const auto run = std::filesystem::path(model) / train::kRunFile;
  if (!std::filesystem::exists(run)) return;
  const auto recorded = io::read_json(run);
  const io::Fields fields(recorded, io::refuse_in_file(run.string()));
  if (fields.find("tokenizer") == nullptr) return;  // written by a version without this field
  const auto expected = fields.object("tokenizer");
  if (expected.get<std::string>("fingerprint") == tokenizer.fingerprint) return;
  const auto name = expected.find<std::string>("name").value_or("another");
  throw Error(command, "--tokenizer", path + ", which is not the tokenizer of " + model,
              name + " of " + std::to_string(expected.get<std::int64_t>("vocab_size")) + " tokens");
}

}  // namespace efla::cli
