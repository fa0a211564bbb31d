#include "efla/data/tokenizers/byte_level_tokenizer.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/data/tokenizers/byte_pairs.h"
#include "efla/data/tokenizers/pre_tokenizer.h"
#include "efla/io/content_error.h"
#include "efla/io/fields.h"
#include "efla/io/json.h"
#include "efla/io/sha256.h"

namespace efla::data {
namespace {

using nlohmann::json;

struct AddedToken {
  std::int32_t id;
  std::string text;
  bool special, normalized;  // normalized: its normalized text is to be found in the normalized text
};

// Finds added tokens in a text: the leftmost first; where several begin at one place, the longest.
class AddedTokens {
 public:
  void add(const AddedToken& token) {
    auto& same = by_first_[static_cast<std::uint8_t>(token.text.front())];
    const auto place = std::find_if(same.begin(), same.end(),
                                    [&](const AddedToken& other) { return other.text.size() < token.text.size(); });
    same.insert(place, token);
  }

  // Calls token(id) for each token and text(part) for each non-empty text between tokens, in the order of the text.
  template <class Text, class Token>
  void split(std::string_view all, const Text& text, const Token& token) const {
    std::size_t done = 0;
    for (std::size_t at = 0; at < all.size();) {
      const AddedToken* const found = at_start_of(all.substr(at));
      if (found == nullptr) {
        ++at;
        continue;
      }
      if (at > done) text(all.substr(done, at - done));
      token(found->id);
      at += found->text.size();
      done = at;
    }
    if (done < all.size()) text(all.substr(done));
  }

 private:
  const AddedToken* at_start_of(std::string_view text) const {
    for (const auto& token : by_first_[static_cast<std::uint8_t>(text.front())]) {
      if (text.starts_with(token.text)) return &token;
    }
    return nullptr;
  }

  std::array<std::vector<AddedToken>, 256> by_first_;  // by the first byte, the longest first
};

std::vector<AddedToken> read_added_tokens(const io::Fields& document, const std::string& path) {
  std::vector<AddedToken> tokens;
  if (document.find("added_tokens") == nullptr) return tokens;
  for (const auto& token : document.objects("added_tokens")) {
    const auto text = token.get<std::string>("content");
    const auto has = [&](const char* flag) { return token.find<bool>(flag).value_or(false); };
    for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
      if (has(flag)) refuse_tokenizer(path, fmt::format("{} of the added token {}", flag, io::brief(text)));
    }
    if (text.empty()) token.refuse("content", "a text that is not empty");
    const bool normalized = token.find<bool>("normalized").value_or(!has("special"));
    const auto id = static_cast<std::int32_t>(token.get<std::int64_t>("id", 0, INT32_MAX));
    tokens.push_back({id, text, has("special"), normalized});
  }
  return tokens;
}

// Returns the key in merges_ of two neighbouring tokens.
std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

class ByteLevelTokenizer final : public Tokenizer {
 public:
  ByteLevelTokenizer(const io::Fields& document, const std::vector<AddedToken>& added, io::TokenizerInfo info,
                     const std::string& path)
      : Tokenizer(std::move(info)),
        pre_tokenizer_(document.content().value("normalizer", json()),
                       document.content().value("pre_tokenizer", json()), path) {
    const auto model = document.object("model");
    add_vocabulary(model.object("vocab").content(), path);
    for (AddedToken token : added) {
      bytes_[static_cast<std::size_t>(token.id)] = token.special ? "" : token.text;
      if (token.normalized) token.text = pre_tokenizer_.normalized(token.text);
      (token.normalized ? normalized_tokens_ : tokens_).add(token);
      const bool only_spaces = token.text.find_first_not_of(' ') == std::string::npos;
      spans_spaces_ = spans_spaces_ || (!only_spaces && token.text.find(' ', 1) != std::string::npos);
    }
    add_merges(model, path);
    whole_words_ = model.find<bool>("ignore_merges").value_or(false);
  }

  std::vector<std::int32_t> encode(std::string_view text) const override;

  std::string_view bytes_of(std::int32_t id) const override {
    if (id < 0 || id >= vocab_size()) {
      throw Error("decode", "id", std::to_string(id), fmt::format("0 to {}", vocab_size() - 1));
    }
    return bytes_[static_cast<std::size_t>(id)];
  }

  bool begins_with_added_space(std::int32_t) const override { return false; }

  TextCut last_cut(std::string_view text) const override {
    if (spans_spaces_ || !pre_tokenizer_.splits_at_spaces()) return {};
    for (auto i = text.rfind(' '); i != std::string_view::npos && i > 0; i = text.rfind(' ', i - 1)) {
      if (i + 1 == text.size()) continue;
      const char before = text[i - 1], after = text[i + 1];
      const bool letter = (after >= 'a' && after <= 'z') || (after >= 'A' && after <= 'Z');
      if (letter && before > ' ' && before < 0x7f) return {i, i};
    }
    return {};
  }

 private:
  struct Merge {
    std::int32_t rank, id;
  };

  void add_vocabulary(const json& vocabulary, const std::string& path) {
    std::unordered_map<std::string, std::uint8_t> byte_of;
    const auto characters = characters_of_bytes();
    for (std::size_t byte = 0; byte < characters.size(); ++byte) {
      byte_of.emplace(characters[byte], static_cast<std::uint8_t>(byte));
    }
    bytes_.resize(static_cast<std::size_t>(vocab_size()));
    for (const auto& [text, value] : vocabulary.items()) {
      const std::int32_t id = value;
      std::string& bytes = bytes_[static_cast<std::size_t>(id)];
      if (!bytes.empty()) io::fail_in(path, "two tokens of the id " + std::to_string(id));
      for (std::size_t at = 0; at < text.size();) {
        const auto size = static_cast<std::size_t>(std::max(utf8_character(std::string_view(text).substr(at)), 1));
        const auto found = byte_of.find(text.substr(at, size));
        if (found == byte_of.end()) {  // no text has such a token, but a model may have learnt it
          bytes = text;
          break;
        }
        bytes += static_cast<char>(found->second);
        at += size;
      }
      ids_.emplace(bytes, id);
    }
    for (int byte = 0; byte < 256; ++byte) {
      const auto found = ids_.find(std::string(1, static_cast<char>(byte)));
      if (found == ids_.end()) refuse_tokenizer(path, fmt::format("no token of the byte {}", byte));
      byte_ids_[static_cast<std::size_t>(byte)] = found->second;
    }
    by_text_ = &vocabulary;
  }

  void add_merges(const io::Fields& model, const std::string& path) {
    const json* merges = model.find("merges");
    if (merges == nullptr || !merges->is_array()) model.refuse("merges", "a list");
    merges_.reserve(merges->size());
    std::int32_t rank = 0;
    for (const json& merge : *merges) {
      std::array<std::string, 2> parts;
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        parts = merge;
      } else {
        const auto text = merge.is_string() ? merge.get<std::string>() : "";
        const auto space = text.find(' ');
        if (space == std::string::npos) {
          io::fail_in(path, "the merge " + io::brief(merge) + ", expected two tokens");
        }
        parts = {text.substr(0, space), text.substr(space + 1)};
      }
      const auto left = id_of(parts[0], path), right = id_of(parts[1], path), both = id_of(parts[0] + parts[1], path);
      merges_.try_emplace(pair_of(left, right), Merge{rank++, both});
    }
    by_text_ = nullptr;
  }

  std::int32_t id_of(const std::string& text, const std::string& path) const {
    const auto found = by_text_->find(text);
    if (found == by_text_->end())
      io::fail_in(path, "a merge of " + io::brief(text) + ", which is not in the vocabulary");
    return *found;
  }

  void encode_word(std::string_view word, BytePairs& pairs, std::vector<std::int32_t>& out) const;

  PreTokenizer pre_tokenizer_;
  AddedTokens tokens_, normalized_tokens_;  // found before and after the text is normalized
  std::vector<std::string> bytes_;          // [vocab_size] bytes of each token
  std::unordered_map<std::string, std::int32_t> ids_;
  std::array<std::int32_t, 256> byte_ids_{};
  std::unordered_map<std::uint64_t, Merge> merges_;
  const json* by_text_ = nullptr;  // the vocabulary, while it is read
  bool whole_words_ = false;       // a word that is in the vocabulary becomes that token without merges
  bool spans_spaces_ = false;      // an added token, not of spaces only, has a space behind its start
};

void ByteLevelTokenizer::encode_word(std::string_view word, BytePairs& pairs, std::vector<std::int32_t>& out) const {
  if (whole_words_) {
    if (const auto found = ids_.find(std::string(word)); found != ids_.end()) return out.push_back(found->second);
  }
  pairs.clear();
  for (const char c : word) pairs.push(byte_ids_[static_cast<std::uint8_t>(c)], 1);
  const auto joined = [&](const BytePairs::Symbol& left, const BytePairs::Symbol& right) -> BytePairs::Joined {
    const auto found = merges_.find(pair_of(left.id, right.id));
    if (found == merges_.end()) return {-1, 0};
    return {found->second.id, static_cast<double>(found->second.rank)};
  };
  pairs.join(joined, [&](const BytePairs::Symbol& symbol) { out.push_back(symbol.id); });
}

std::vector<std::int32_t> ByteLevelTokenizer::encode(std::string_view text) const {
  if (const auto valid = utf8_prefix(text); valid != text.size()) {
    throw Error("encode", "text", fmt::format("a byte at {} that is not UTF-8", valid), "UTF-8");
  }
  if (text.size() > static_cast<std::size_t>(INT32_MAX) / 3) {
    throw Error("encode", "text", fmt::format("{} bytes", text.size()), "a text in parts of less than 700 MB");
  }
  std::vector<std::int32_t> out;
  BytePairs pairs;
  const auto encode = [&](std::string_view word, auto& ids) { encode_word(word, pairs, ids); };
  const auto add = [&](std::int32_t id) { out.push_back(id); };
  tokens_.split(
      text,
      [&](std::string_view part) {
        const std::string normalized = pre_tokenizer_.normalized(part);
        WordIds words;
        normalized_tokens_.split(
            normalized,
            [&](std::string_view rest) {
              pre_tokenizer_.split(rest, [&](std::string_view word) { words.append(word, out, encode); });
            },
            add);
      },
      add);
  return out;
}

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

void check_supported(const io::Fields& document, const std::string& path) {
  const auto model = document.object("model");
  // Older files have no type.
  if (const auto type = model.find<std::string>("type"); type && *type != "BPE") {
    refuse_tokenizer(path, "the model " + io::brief(*type) + " instead of BPE");
  }
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const json* value = model.find(key);
    if (value != nullptr && *value != "" && *value != 0) refuse_tokenizer(path, key);
  }
  if (model.find<bool>("byte_fallback").value_or(false)) {
    io::fail_in(path,
                "a tokenizer with byte_fallback, which is not supported: use its SentencePiece model, tokenizer.model");
  }
  if (document.find("decoder") == nullptr || document.object("decoder").find<std::string>("type") != "ByteLevel") {
    refuse_tokenizer(path, "another decoder than ByteLevel");
  }
}

}  // namespace

std::vector<std::string> characters_of_bytes() {
  std::vector<std::string> characters;
  unsigned next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const unsigned code = printable ? byte : next++;
    characters.push_back(
        code < 0x80 ? std::string(1, static_cast<char>(code))
                    : std::string{static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))});
  }
  return characters;
}

std::unique_ptr<Tokenizer> make_byte_level_tokenizer(io::ByteView bytes, const std::string& path) {
  const json document = io::parse_json(bytes, path);
  const io::Fields fields(document, io::refuse_in_file(path));
  check_supported(fields, path);
  const auto added = read_added_tokens(fields, path);
  const json& vocabulary = fields.object("model").object("vocab").content();

  const auto beside = std::filesystem::path(path).replace_filename("tokenizer_config.json");
  const json named = std::filesystem::exists(beside) ? io::read_json(beside) : json::object();
  const io::Fields config(named, io::refuse_in_file(beside.string()));
  io::TokenizerInfo info{std::filesystem::path(path).filename().string(), io::sha256(bytes),
                         vocab_size_of(vocabulary, added, path), special_id(config, "bos_token", vocabulary, added),
                         special_id(config, "eos_token", vocabulary, added)};
  return std::make_unique<ByteLevelTokenizer>(fields, added, std::move(info), path);
}

}  // namespace efla::data
