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
  }

  bool begins_with_added_space(std::int32_t) const override { return false; }

  std::size_t last_cut(std::string_view part) const override {
    return pre_tokenizer_.last_border(part, [&](std::size_t place) {
      const auto begin = apart_before(part, place), end = apart_behind(part, place);
      return end > 0 && cuts_no_added_token(part, place, begin, end);
    });
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

  std::string normalized(std::string_view part, Behind) const override { return pre_tokenizer_.normalized(part); }

  // Returns a place at least reach() bytes before `place` at which the text can be normalized apart, or the text's
  // start.
  std::size_t apart_before(std::string_view text, std::size_t place) const {
    std::size_t at = place - std::min(place, reach());
    while (at > 0 && pre_tokenizer_.normalizes() && !pre_tokenizer_.normalizes_apart(text, at)) --at;
    return at;
  }

  // Returns a place at least reach() bytes behind `place` at which the text can be normalized apart; without normalizer
  // also the text's end. 0: none.
  std::size_t apart_behind(std::string_view text, std::size_t place) const {
    if (!pre_tokenizer_.normalizes()) return std::min(place + reach(), text.size());
    for (std::size_t at = place + reach(); at < text.size(); ++at) {
      if (pre_tokenizer_.normalizes_apart(text, at)) return at;
    }
    return 0;
  }

  void encode_normal(std::string_view part, Behind, std::vector<std::int32_t>& out) const override {
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
