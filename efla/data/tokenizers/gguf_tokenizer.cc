#include "efla/data/tokenizers/gguf_tokenizer.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "efla/base/utf8.h"
#include "efla/data/tokenizers/json_tokenizer.h"
#include "efla/data/tokenizers/tokenizer_document.h"
#include "efla/io/content_error.h"
#include "efla/io/gguf/gguf.h"
#include "efla/io/json.h"

namespace efla::data {
namespace {

using nlohmann::json;

constexpr const char *kModelKey = "tokenizer.ggml.model", *kPreKey = "tokenizer.ggml.pre";
constexpr const char *kTokensKey = "tokenizer.ggml.tokens", *kTypesKey = "tokenizer.ggml.token_type";
constexpr const char *kMergesKey = "tokenizer.ggml.merges", *kTemplateKey = "tokenizer.chat_template";

// Values of tokenizer.ggml.token_type.
enum TokenType : std::int64_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5 };

// A way to split a text into words, by its name in files. The expression is the one of the models' tokenizer.json.
struct GgufSplit {
  std::string_view name, expression;
  bool composes;  // whether the text is brought into the form NFC before, which files do not say
};

constexpr GgufSplit kGgufSplits[]{
    {"qwen2",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     true},
    {"qwen35",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     true},
    {"dbrx",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     false}};

[[noreturn]] void refuse_key(const io::GgufFile& file, std::string_view key, const std::string& what) {
  io::fail_in(file.path(), std::string(key) + ": " + what);
}

std::string quoted(const std::string_view* text) { return text == nullptr ? "none" : io::brief(std::string(*text)); }

const std::vector<std::string_view>& texts_of(const io::GgufFile& file, const char* key) {
  const auto* texts = file.texts(key);
  if (texts == nullptr) io::fail_in(file.path(), std::string("has no ") + key);
  return *texts;
}

// Returns a text of the file. Throws unless it is UTF-8.
std::string utf8_of(const io::GgufFile& file, std::string_view key, std::string_view text) {
  if (utf8_prefix(text) != text.size()) refuse_key(file, key, "a text that is not UTF-8");
  return std::string(text);
}

// Returns the types of the tokens.
std::vector<std::int64_t> types_of(const io::GgufFile& file, std::size_t tokens) {
  const auto* types = file.integers(kTypesKey);
  if (types == nullptr) return std::vector<std::int64_t>(tokens, kNormal);
  if (types->size() != tokens) {
    refuse_key(file, kTypesKey, fmt::format("got {} types, expected one for each of {} tokens", types->size(), tokens));
  }
  for (const auto type : *types) {
    if (type < kNormal || type > kUnused) refuse_key(file, kTypesKey, fmt::format("got {}, expected 1 to 5", type));
  }
  return *types;
}

const GgufSplit& split_of(const io::GgufFile& file) {
  const auto *model = file.text(kModelKey), *pre = file.text(kPreKey);
  if (model == nullptr || *model != "gpt2") refuse_key(file, kModelKey, "got " + quoted(model) + ", expected gpt2");
  const auto* split = std::ranges::find(kGgufSplits, pre == nullptr ? "" : *pre, &GgufSplit::name);
  if (split == std::end(kGgufSplits)) {
    refuse_key(file, kPreKey, "got " + quoted(pre) + ", expected qwen2, qwen35 or dbrx");
  }
  return *split;
}

// Returns the text of the token whose id a key has; "": there is no such key.
std::string token_named(const io::GgufFile& file, const std::string& key) {
  const auto* id = file.integer(key);
  if (id == nullptr) return "";
  const auto& tokens = texts_of(file, kTokensKey);
  const auto types = types_of(file, tokens.size());
  if (*id < 0 || *id >= std::ssize(tokens) || types[static_cast<std::size_t>(*id)] == kUnused) {
    refuse_key(file, key, fmt::format("got {}, which is no token", *id));
  }
  return utf8_of(file, kTokensKey, tokens[static_cast<std::size_t>(*id)]);
}

// Returns the field chat_template: a text, or a list of texts with names where the file has several.
json templates_of(const io::GgufFile& file) {
  const auto* usual = file.text(kTemplateKey);
  if (usual == nullptr) return nullptr;
  const json first = utf8_of(file, kTemplateKey, *usual);
  const auto* names = file.texts("tokenizer.chat_templates");
  if (names == nullptr) return first;
  json all = json::array({{{"name", "default"}, {"template", first}}});
  for (const auto name : *names) {
    const auto key = std::string(kTemplateKey).append(".").append(utf8_of(file, kTemplateKey, name));
    const auto* text = file.text(key);
    if (text == nullptr) io::fail_in(file.path(), "has no " + key);
    all.push_back({{"name", std::string(name)}, {"template", utf8_of(file, key, *text)}});
  }
  return all;
}

json byte_level_json() {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
}

// Returns the normalizer and the pre_tokenizer of a split.
std::pair<json, json> stages_of_split(const GgufSplit& split) {
  const json words = {
      {"type", "Split"}, {"pattern", {{"Regex", split.expression}}}, {"behavior", "Isolated"}, {"invert", false}};
  return {split.composes ? json{{"type", "NFC"}} : json(),
          {{"type", "Sequence"}, {"pretokenizers", {words, byte_level_json()}}}};
}

// Returns the split of a tokenizer.json. Only its expression and its normalizer tell which one.
const GgufSplit& split_of(const json& document, const std::string& path) {
  const auto has = [&](const GgufSplit& split) {
    const auto [normalizer, pre_tokenizer] = stages_of_split(split);
    const json own = document.value("pre_tokenizer", json());
    const json::json_pointer words("/pretokenizers/0");
    return document.value("normalizer", json()) == normalizer && own.contains(words) &&
           own[words] == pre_tokenizer[words] && own["pretokenizers"].size() == 2;
  };
  const auto* split = std::ranges::find_if(kGgufSplits, has);
  if (split == std::end(kGgufSplits)) {
    io::fail_in(path, "a tokenizer that splits texts in another way than qwen2, qwen35 and dbrx of GGUF");
  }
  return *split;
}

}  // namespace

bool has_gguf_tokenizer(const std::string& path) {
  const io::GgufFile file(path);
  const auto* model = file.text(kModelKey);
  return model != nullptr && *model != "none";
}

json gguf_tokenizer_document(const std::string& path) {
  const io::GgufFile file(path);
  const GgufSplit& split = split_of(file);
  const auto& tokens = texts_of(file, kTokensKey);
  const auto types = types_of(file, tokens.size());
  json vocabulary = json::object(), merges = json::array(), added = json::array();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (types[i] == kUnused) continue;
    const auto text = utf8_of(file, kTokensKey, tokens[i]);
    if (!vocabulary.emplace(text, i).second) refuse_key(file, kTokensKey, "the token " + io::brief(text) + " twice");
    if (types[i] == kNormal) continue;
    added.push_back(added_token_json({static_cast<std::int32_t>(i), text, types[i] != kUserDefined, false}));
  }
  for (const auto merge : texts_of(file, kMergesKey)) merges.push_back(utf8_of(file, kMergesKey, merge));
  auto [normalizer, pre_tokenizer] = stages_of_split(split);
  return tokenizer_document(std::move(added), std::move(normalizer), std::move(pre_tokenizer), byte_level_json(),
                            bpe_model(std::move(vocabulary), std::move(merges), nullptr, false));
}

json gguf_tokenizer_config(const std::string& path) {
  const io::GgufFile file(path);
  json config{{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
  const std::pair<const char*, const char*> names[]{
      {"bos_token", "bos"}, {"eos_token", "eos"}, {"pad_token", "padding"}, {"unk_token", "unknown"}};
  for (const auto& [field, name] : names) {
    auto text = token_named(file, fmt::format("tokenizer.ggml.{}_token_id", name));
    if (!text.empty()) config[field] = std::move(text);
  }
  if (auto templates = templates_of(file); !templates.is_null()) config["chat_template"] = std::move(templates);
  return config;
}

std::unique_ptr<Tokenizer> make_gguf_tokenizer(const std::string& path) {
  const json document = gguf_tokenizer_document(path);
  return make_json_tokenizer(document, read_tokenizer_config(path), io::as_bytes(document.dump()), path);
}

io::GgufEntries gguf_tokenizer_entries(const std::string& path, std::int64_t rows) {
  const json document = io::read_json(path);
  const auto tokenizer = load_tokenizer(path);  // refuses what is not supported
  const GgufSplit& split = split_of(document, path);
  if (tokenizer->vocab_size() > rows) {
    io::fail_in(path, fmt::format("{} ids, but the embeddings have {} rows", tokenizer->vocab_size(), rows));
  }
  std::vector<std::string> tokens, merges;
  std::vector<std::int32_t> types(static_cast<std::size_t>(rows), kUnused);
  for (std::int64_t id = 0; id < rows; ++id) tokens.push_back(fmt::format("[PAD{}]", id));
  const auto set = [&](std::int64_t id, const std::string& text, TokenType type) {
    tokens[static_cast<std::size_t>(id)] = text;
    types[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(type);
  };
  const json& model = document.at("model");
  for (const auto& [text, id] : model.at("vocab").items()) set(id, text, kNormal);
  const TokenizerConfig config = read_tokenizer_config(path);
  for (const auto& token : added_tokens_of(document, config, path)) {
    set(token.id, token.text, token.special ? kControl : kUserDefined);
  }
  for (const auto& merge : model.at("merges")) {
    merges.push_back(merge.is_string() ? merge.get<std::string>()
                                       : merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>());
  }
  io::GgufEntries entries{{kModelKey, std::string("gpt2")}, {kPreKey, std::string(split.name)}};
  if (tokenizer->bos() >= 0) {
    entries.emplace_back("tokenizer.ggml.bos_token_id", static_cast<std::uint32_t>(tokenizer->bos()));
  }
  if (const auto pad = std::ranges::find(tokens, config.text_of("pad_token")); pad != tokens.end()) {
    entries.emplace_back("tokenizer.ggml.padding_token_id", static_cast<std::uint32_t>(pad - tokens.begin()));
  }
  entries.emplace_back("tokenizer.ggml.add_bos_token", false);
  entries.emplace_back(kTokensKey, std::move(tokens));
  entries.emplace_back(kTypesKey, std::move(types));
  entries.emplace_back(kMergesKey, std::move(merges));
  return entries;
}

}  // namespace efla::data
