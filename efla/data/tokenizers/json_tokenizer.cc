#include "efla/data/tokenizers/json_tokenizer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <unordered_set>
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

// Returns the id of bos_token or eos_token; −1: none.
std::int32_t special_id(const TokenizerConfig& config, const char* field, const json& vocabulary,
                        const std::vector<AddedToken>& added, const std::string& path) {
  const auto text = config.text_of(field);
  if (text.empty()) return -1;
  for (const auto& token : added) {
    if (token.text == text) return token.id;
  }
  const auto found = vocabulary.find(text);
  if (found == vocabulary.end()) config.refuse(field, path);
  return *found;
}

// Returns one more than the greatest id of the vocabulary, to which `added` tokens will be added.
std::int64_t vocab_size_of(const json& vocabulary, std::size_t added, const std::string& path) {
  // Bounds the memory. In real vocabularies nearly every id has a token.
  const auto most = static_cast<std::int64_t>(4 * (vocabulary.size() + added) + 4096);
  std::int64_t size = 0;
  for (const auto& [text, id] : vocabulary.items()) {
    if (!id.is_number_integer() || id < 0 || id >= most) {
      io::fail_in(path, "the id " + io::brief(id) + " of a token");
    }
    size = std::max(size, id.get<std::int64_t>() + 1);
  }
  return size;
}

// Appends the tokens of the files beside a tokenizer.json to its own tokens. Texts that it has already are left out
// unless the files override it.
std::vector<AddedToken> with_tokens_beside(std::vector<AddedToken> tokens, const TokenizerConfig& config) {
  std::unordered_set<std::string> known;
  for (const auto& token : tokens) known.insert(token.text);
  for (const auto& token : config.added) {
    if (config.overrides || !known.contains(token.text)) tokens.push_back(token);
  }
  return tokens;
}

// Returns a checksum of what the ids depend on: the file, and tokens that only the files beside it have.
std::string fingerprint_of(io::ByteView bytes, const std::vector<AddedToken>& own, const std::vector<AddedToken>& all) {
  if (own == all) return io::sha256(bytes);
  std::string text(bytes.begin(), bytes.end());
  for (const auto& token : all) {
    text += json{token.id, token.text, token.special, token.normalized}.dump(-1, ' ', false,
                                                                             json::error_handler_t::replace);
  }
  return io::sha256(io::as_bytes(text));
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

// Returns whether an entry of the merges is the first line of a file merges.txt, such as "#version: 0.2".
bool is_version(const json& merge) {
  return merge.is_string() && merge.get_ref<const std::string&>().starts_with("#version");
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
    if (is_version(merge)) continue;
    const auto [left, right] = tokens_of(merge, file.path);
    const auto left_id = id_of(left), right_id = id_of(right);
    // Of a merge given twice the last rank counts, as in Hugging Face's tokenizers.
    merges_.insert_or_assign(pair_of(left_id, right_id), Merge{rank++, id_of(left + right)});
  }
  for (AddedToken token : file.added) {
    set_bytes(token.id, token.special ? "" : token.text);
    if (token.special) set_special_text(token.id, token.text);
    texts_.add(token);
    if (token.normalized) token.text = normalized(token.text, Behind::nothing);
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

std::vector<std::int32_t> JsonTokenizer::encode_part(std::string_view part, bool begins,
                                                     AddedTokens::Which found) const {
  if (const auto valid = utf8_prefix(part); valid != part.size()) {
    throw Error("encode", "text", fmt::format("a byte at {} that is not UTF-8", valid), "UTF-8");
  }
  if (part.size() > static_cast<std::size_t>(INT32_MAX) / 3) {
    throw Error("encode", "text", fmt::format("{} bytes", part.size()), "a text in parts of less than 700 MB");
  }
  std::vector<std::int32_t> out;
  const auto add = [&](std::int32_t id) { out.push_back(id); };
  tokens_.split(
      part,
      [&](std::string_view text) {
        const auto behind = text.data() != part.data() ? Behind::token : begins ? Behind::nothing : Behind::text;
        const std::string normal = normalized(text, behind);
        normalized_tokens_.split(
            normal,
            [&](std::string_view rest) {
              encode_normal(rest, rest.data() == normal.data() ? behind : Behind::token, out);
            },
            add, found);
      },
      add, found);
  return out;
}

std::size_t JsonTokenizer::reach() const {
  constexpr std::size_t kMostShrunk = 8;  // bytes of a text per byte of its normal form, at most
  return kMostShrunk * normalized_tokens_.longest();
}

bool JsonTokenizer::cuts_no_added_token(std::string_view text, std::size_t place, std::size_t begin,
                                        std::size_t end) const {
  // Where the normalizer begins a part with a space, a token may be in the text without the space of its normal form.
  if (texts_.touches(text, place)) return false;
  if (normalized_tokens_.longest() == 0) return true;
  const auto before = normalized(text.substr(begin, place - begin), Behind::text);
  const auto behind = normalized(text.substr(place, end - place), Behind::text);
  return !normalized_tokens_.touches(before + behind, before.size());
}

std::vector<AddedToken> added_tokens_of(const json& document, const TokenizerConfig& config, const std::string& path) {
  const io::Fields fields(document, io::refuse_in_file(path));
  const json& vocabulary = fields.object("model").object("vocab").content();
  return number_added_tokens(with_tokens_beside(read_added_tokens(fields, path), config), vocabulary);
}

std::unique_ptr<Tokenizer> make_json_tokenizer(io::ByteView bytes, const std::string& path) {
  return make_json_tokenizer(io::parse_json(bytes, path), read_tokenizer_config(path), bytes, path);
}

std::unique_ptr<Tokenizer> make_json_tokenizer(const json& document, const TokenizerConfig& config, io::ByteView bytes,
                                               const std::string& path) {
  const io::Fields fields(document, io::refuse_in_file(path));
  const auto model = fields.object("model");
  check_supported(model, path);
  const json& vocabulary = model.object("vocab").content();
  const auto given = read_added_tokens(fields, path), all = with_tokens_beside(given, config);
  auto vocab_size = vocab_size_of(vocabulary, all.size(), path);
  const auto own = number_added_tokens(given, vocabulary), added = number_added_tokens(all, vocabulary);
  for (const auto& token : added) vocab_size = std::max(vocab_size, std::int64_t{token.id} + 1);
  const TokenizerFile file{fields,
                           path,
                           added,
                           {std::filesystem::path(path).filename().string(), fingerprint_of(bytes, own, added),
                            vocab_size, special_id(config, "bos_token", vocabulary, added, path),
                            special_id(config, "eos_token", vocabulary, added, path)}};
  const bool byte_level =
      fields.find("decoder") != nullptr && fields.object("decoder").find<std::string>("type") == "ByteLevel";
  return byte_level ? make_byte_level_tokenizer(file) : make_piece_tokenizer(file);
}

}  // namespace efla::data
