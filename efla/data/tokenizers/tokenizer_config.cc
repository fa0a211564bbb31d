#include "efla/data/tokenizers/tokenizer_config.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "efla/data/tokenizers/gguf_tokenizer.h"
#include "efla/io/content_error.h"
#include "efla/io/fields.h"
#include "efla/io/gguf/gguf.h"
#include "efla/io/json.h"

namespace efla::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kDecoder = "added_tokens_decoder";

json read_if_there(const fs::path& path) { return fs::exists(path) ? io::read_json(path) : json::object(); }

// Returns the text of a token that is given as text or as an object with its flags; "": neither.
std::string text_in(const json& token) {
  const json* text = &token;
  if (token.is_object() && token.contains("content")) text = &token["content"];
  return text->is_string() ? text->get<std::string>() : "";
}

// Adds the names of special tokens, such as pad_token and additional_special_tokens, in a file. They replace names of
// the same fields.
void read_names(const io::Fields& fields, const std::string& file, std::vector<TokenizerConfig::Name>& names) {
  for (const auto& [field, value] : fields.content().items()) {
    if (!field.ends_with("_token") && !field.ends_with("_special_tokens")) continue;
    std::erase_if(names, [&, &same = field](const auto& name) { return name.field == same; });
    for (const json& token : value.is_array() ? value : json::array({value})) {
      const auto text = text_in(token);
      if (!text.empty()) {
        names.push_back({field, text, file});
      } else if ((field == "bos_token" || field == "eos_token") && !value.is_null()) {
        fields.refuse(field, "a token");
      }
    }
  }
}

std::vector<AddedToken> in_order(const std::map<std::int64_t, AddedToken>& by_id) {
  std::vector<AddedToken> tokens;
  for (const auto& [id, token] : by_id) tokens.push_back(token);
  return tokens;
}

// Reads {"259": {"content": "<|extra|>", "special": true, …}, …}.
std::vector<AddedToken> read_decoder(const io::Fields& decoder, const std::string& path) {
  std::map<std::int64_t, AddedToken> tokens;
  for (const auto& [name, token] : decoder.content().items()) {
    std::int64_t id = -1;
    const auto* const end = name.data() + name.size();
    if (std::from_chars(name.data(), end, id).ptr != end || id < 0) decoder.refuse(name, "ids as names");
    tokens.insert_or_assign(id, read_added_token(decoder.object(name), path));
  }
  return in_order(tokens);
}

// Reads {"<|extra|>": 259, …}. A token is special if a name says so, and is found in the normalized text if not.
std::vector<AddedToken> read_ids(const io::Fields& ids, const std::vector<TokenizerConfig::Name>& names) {
  std::map<std::int64_t, AddedToken> tokens;
  for (const auto& [text, id] : ids.content().items()) {
    if (text.empty()) ids.refuse(text, "texts that are not empty");
    const auto is_this = [&, &wanted = text](const auto& name) { return name.text == wanted; };
    const bool special = std::any_of(names.begin(), names.end(), is_this);
    tokens.insert_or_assign(ids.get<std::int64_t>(text, 0, INT32_MAX), AddedToken{-1, text, special, !special});
  }
  return in_order(tokens);
}

}  // namespace

std::string_view TokenizerConfig::text_of(std::string_view field) const {
  const auto found = std::find_if(names.begin(), names.end(), [&](const Name& name) { return name.field == field; });
  return found == names.end() ? "" : std::string_view(found->text);
}

void TokenizerConfig::refuse(std::string_view field, const std::string& where) const {
  const auto found = std::find_if(names.begin(), names.end(), [&](const Name& name) { return name.field == field; });
  io::fail_in(found->file, fmt::format("{}: got {}, expected a token of {}, or an added token of {} ({}) or {}", field,
                                       io::brief(found->text), fs::path(where).filename().string(),
                                       kTokenizerConfigFile, kDecoder, kAddedTokensFile));
}

TokenizerConfig read_tokenizer_config(const std::string& path) {
  if (io::is_gguf(path)) {
    TokenizerConfig config;
    const json content = gguf_tokenizer_config(path);
    read_names(io::Fields(content, io::refuse_in_file(path)), path, config.names);
    return config;
  }
  const auto beside = [&](const char* name) { return fs::path(path).replace_filename(name); };
  const auto config_path = beside(kTokenizerConfigFile), names_path = beside(kSpecialTokensFile),
             ids_path = beside(kAddedTokensFile);
  const json content = read_if_there(config_path);
  const io::Fields fields(content, io::refuse_in_file(config_path.string()));
  TokenizerConfig config;
  config.legacy = fields.find<bool>("legacy").value_or(false);
  read_names(fields, config_path.string(), config.names);
  if (fields.find(kDecoder) != nullptr) {
    config.added = read_decoder(fields.object(kDecoder), config_path.string());
    config.overrides = true;
    return config;
  }
  const json names = read_if_there(names_path), ids = read_if_there(ids_path);
  read_names(io::Fields(names, io::refuse_in_file(names_path.string())), names_path.string(), config.names);
  config.added = read_ids(io::Fields(ids, io::refuse_in_file(ids_path.string())), config.names);
  return config;
}

}  // namespace efla::data
