#include "efla/data/tokenizers/json_tokenizer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/data/tokenizers/byte_level_tokenizer.h"
#include "efla/data/tokenizers/piece_tokenizer.h"
#include "efla/data/tokenizers/stages.h"
#include "efla/io/content_error.h"
#include "efla/io/json.h"
#include "efla/io/sha256.h"

namespace efla::data {
namespace {

using nlohmann::json;

// Returns the id of a token that tokenizer_config.json names; −1: none.
std::int32_t special_id(const io::Fields& config, const char* name, const json& vocabulary,
                        const std::vector<AddedToken>& added) {
  const json* text = config.find(name);
  if (text != nullptr && text->is_object()) text = config.object(name).find("content");
  if (text == nullptr) return -1;
  for (const auto& token : added) {
    if (*text == token.text) return token.id;
  }
  if (!text->is_string() || !vocabulary.contains(text->get<std::string>())) config.refuse(name, "a token");
  return vocabulary.at(text->get<std::string>());
}

std::int64_t vocab_size_of(const json& vocabulary, const std::vector<AddedToken>& added, const std::string& path) {
  // Bounds the memory. In real vocabularies nearly every id has a token.
  const auto most = static_cast<std::int64_t>(4 * (vocabulary.size() + added.size()) + 4096);
  std::int64_t size = 0;
  const auto count = [&](const json& id) {
    if (!id.is_number_integer() || id < 0 || id >= most) {
      io::fail_in(path, "the id " + io::brief(id) + " of a token");
    }
    size = std::max(size, id.get<std::int64_t>() + 1);
  };
  for (const auto& [text, id] : vocabulary.items()) count(id);
  for (const auto& token : added) count(token.id);
  return size;
}

void check_supported(const io::Fields& model, const std::string& path) {
  // Older files have no type.
  if (const auto type = model.find<std::string>("type"); type && *type != "BPE") {
    refuse_tokenizer(path, "the model " + io::brief(*type) + " instead of BPE");
  }
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const json* value = model.find(key);
    if (value != nullptr && *value != "" && *value != 0) refuse_tokenizer(path, key);
  }
}

// Returns the two tokens of a merge.
std::array<std::string, 2> tokens_of(const json& merge, const std::string& path) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) return merge;
  const auto text = merge.is_string() ? merge.get<std::string>() : "";
  const auto space = text.find(' ');
  if (space == std::string::npos) io::fail_in(path, "the merge " + io::brief(merge) + ", expected two tokens");
  return {text.substr(0, space), text.substr(space + 1)};
}

}  // namespace

JsonTokenizer::JsonTokenizer(const TokenizerFile& file) : Tokenizer(file.info) {
  bytes_.resize(static_cast<std::size_t>(vocab_size()));
  whole_words_ = file.document.object("model").find<bool>("ignore_merges").value_or(false);
}

void JsonTokenizer::add(std::int32_t id, std::string text, std::string bytes, const std::string& path) {
  std::string& place = bytes_[static_cast<std::size_t>(id)];
  if (!place.empty()) io::fail_in(path, "two tokens of the id " + std::to_string(id));
  place = std::move(bytes);
  ids_.emplace(std::move(text), id);
}

void JsonTokenizer::add_merges_and_added_tokens(const TokenizerFile& file) {
  const auto model = file.document.object("model");
  const json* merges = model.find("merges");
  if (merges == nullptr || !merges->is_array()) model.refuse("merges", "a list");
  const json& vocabulary = model.object("vocab").content();
  const auto id_of = [&](const std::string& text) -> std::int32_t {
    const auto found = vocabulary.find(text);
    if (found == vocabulary.end()) {
      io::fail_in(file.path, "a merge of " + io::brief(text) + ", which is not in the vocabulary");
    }
    return *found;
  };
  merges_.reserve(merges->size());
  std::int32_t rank = 0;
  for (const json& merge : *merges) {
    const auto [left, right] = tokens_of(merge, file.path);
    const auto left_id = id_of(left), right_id = id_of(right);
    merges_.try_emplace(pair_of(left_id, right_id), Merge{rank++, id_of(left + right)});
  }
  for (AddedToken token : file.added) {
    set_bytes(token.id, token.special ? "" : token.text);
    if (token.special) set_special_text(token.id, token.text);
    if (token.normalized) token.text = normalized(token.text);
    (token.normalized ? normalized_tokens_ : tokens_).add(token);
  }
}

std::int32_t JsonTokenizer::find(std::string_view text) const {
  const auto found = ids_.find(text);
  return found == ids_.end() ? -1 : found->second;
}

std::string_view JsonTokenizer::bytes_of(std::int32_t id) const {
  if (id < 0 || id >= vocab_size()) {
    throw Error("decode", "id", std::to_string(id), fmt::format("0 to {}", vocab_size() - 1));
  }
  return bytes_[static_cast<std::size_t>(id)];
}

std::vector<std::int32_t> JsonTokenizer::encode(std::string_view text) const {
  if (const auto valid = utf8_prefix(text); valid != text.size()) {
    throw Error("encode", "text", fmt::format("a byte at {} that is not UTF-8", valid), "UTF-8");
  }
  if (text.size() > static_cast<std::size_t>(INT32_MAX) / 3) {
    throw Error("encode", "text", fmt::format("{} bytes", text.size()), "a text in parts of less than 700 MB");
  }
  std::vector<std::int32_t> out;
  const auto add = [&](std::int32_t id) { out.push_back(id); };
  tokens_.split(
      text,
      [&](std::string_view part) {
        const std::string normal = normalized(part);
        const bool first = part.data() == text.data();
        normalized_tokens_.split(
            normal, [&](std::string_view rest) { encode_part(rest, first && rest.data() == normal.data(), out); }, add);
      },
      add);
  return out;
}

std::unique_ptr<Tokenizer> make_json_tokenizer(io::ByteView bytes, const std::string& path) {
  const json document = io::parse_json(bytes, path);
  const io::Fields fields(document, io::refuse_in_file(path));
  const auto model = fields.object("model");
  check_supported(model, path);
  const auto added = read_added_tokens(fields, path);
  const json& vocabulary = model.object("vocab").content();

  const auto beside = std::filesystem::path(path).replace_filename("tokenizer_config.json");
  const json named = std::filesystem::exists(beside) ? io::read_json(beside) : json::object();
  const io::Fields config(named, io::refuse_in_file(beside.string()));
  const TokenizerFile file{
      fields,
      path,
      added,
      {std::filesystem::path(path).filename().string(), io::sha256(bytes), vocab_size_of(vocabulary, added, path),
       special_id(config, "bos_token", vocabulary, added), special_id(config, "eos_token", vocabulary, added)}};
  const bool byte_level =
      fields.find("decoder") != nullptr && fields.object("decoder").find<std::string>("type") == "ByteLevel";
  return byte_level ? make_byte_level_tokenizer(file) : make_piece_tokenizer(file);
}

}  // namespace efla::data
