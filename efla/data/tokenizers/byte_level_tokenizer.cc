#include "efla/data/tokenizers/byte_level_tokenizer.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>

#include <fmt/format.h>

#include "efla/base/utf8.h"
#include "efla/data/tokenizers/pre_tokenizer.h"
#include "efla/data/tokenizers/stages.h"

namespace efla::data {
namespace {

using nlohmann::json;

class ByteLevelTokenizer final : public JsonTokenizer {
 public:
  explicit ByteLevelTokenizer(const TokenizerFile& file)
      : JsonTokenizer(file),
        pre_tokenizer_(file.document.content().value("normalizer", json()),
                       file.document.content().value("pre_tokenizer", json()), file.path) {
    if (file.document.object("model").find<bool>("byte_fallback").value_or(false)) {
      refuse_tokenizer(file.path, "byte_fallback and the decoder ByteLevel");
    }
    add_vocabulary(file.document.object("model").object("vocab").content(), file.path);
    add_merges_and_added_tokens(file);
    for (const AddedToken& token : file.added) {
      const std::string text = token.normalized ? normalized(token.text) : token.text;
      const bool only_spaces = text.find_first_not_of(' ') == std::string::npos;
      spans_spaces_ = spans_spaces_ || (!only_spaces && text.find(' ', 1) != std::string::npos);
    }
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
  void add_vocabulary(const json& vocabulary, const std::string& path) {
    std::unordered_map<std::string, std::uint8_t> byte_of;
    const auto characters = characters_of_bytes();
    for (std::size_t byte = 0; byte < characters.size(); ++byte) {
      byte_of.emplace(characters[byte], static_cast<std::uint8_t>(byte));
    }
    for (const auto& [text, id] : vocabulary.items()) {
      std::string bytes;
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
      add(id, bytes, bytes, path);
    }
    for (int byte = 0; byte < 256; ++byte) {
      const auto id = find(std::string(1, static_cast<char>(byte)));
      if (id < 0) refuse_tokenizer(path, fmt::format("no token of the byte {}", byte));
      byte_ids_[static_cast<std::size_t>(byte)] = id;
    }
  }

  std::string normalized(std::string_view text) const override { return pre_tokenizer_.normalized(text); }

  void encode_part(std::string_view part, bool, std::vector<std::int32_t>& out) const override {
    WordIds words;
    BytePairs pairs;
    const auto encode = [&](std::string_view word, auto& ids) {
      const auto push = [&](BytePairs& to) {
        for (const char c : word) to.push(byte_ids_[static_cast<std::uint8_t>(c)], 1);
      };
      encode_word(word, pairs, push, ids);
    };
    pre_tokenizer_.split(part, [&](std::string_view word) { words.append(word, out, encode); });
  }

  PreTokenizer pre_tokenizer_;
  std::array<std::int32_t, 256> byte_ids_{};
  bool spans_spaces_ = false;  // an added token, not of spaces only, has a space behind its start
};

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

std::unique_ptr<Tokenizer> make_byte_level_tokenizer(const TokenizerFile& file) {
  return std::make_unique<ByteLevelTokenizer>(file);
}

}  // namespace efla::data
