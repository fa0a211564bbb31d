#include "efla/data/tokenizers/piece_tokenizer.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "efla/base/utf8.h"
#include "efla/data/tokenizers/pieces.h"
#include "efla/data/tokenizers/stages.h"

namespace efla::data {
namespace {

using nlohmann::json;

// Returns whether a Replace stage replaces `from` by `to`.
bool replaces(const io::Fields& stage, std::string_view from, std::string_view to) {
  return stage.get<std::string>("content") == to && stage.object("pattern").find<std::string>("String") == from;
}

// What happens to a text before it is joined, and to the text of tokens afterwards.
struct Spaces {
  enum class Prefix { never, first, always };

  bool prepends = false, replaces = false;  // the normalizer puts kSpaceMark before each part, and in place of spaces
  bool metaspace = false, splits = false;   // the pre_tokenizer replaces spaces, and splits before each of them
  Prefix prefix = Prefix::never;  // parts that the pre_tokenizer begins with kSpaceMark if they do not already
  bool strips = false;            // the decoder drops the first space of a text
};

void read_normalizer(const json& normalizer, Spaces& spaces, const std::string& path) {
  for (const auto& stage : stages_of(normalizer, "normalizer", "normalizers", path)) {
    const auto type = stage.get<std::string>("type");
    if (type == "Prepend" && stage.get<std::string>("prepend") == kSpaceMark && !spaces.prepends) {
      spaces.prepends = true;
    } else if (type == "Replace" && replaces(stage, " ", kSpaceMark)) {
      spaces.replaces = true;
    } else {
      refuse_tokenizer(path, "the normalizer " + io::brief(stage.content()));
    }
  }
}

void read_pre_tokenizer(const json& pre_tokenizer, Spaces& spaces, const std::string& path) {
  for (const auto& stage : stages_of(pre_tokenizer, "pre_tokenizer", "pretokenizers", path)) {
    const auto type = stage.get<std::string>("type");
    // After the normalizer there is nothing to split at.
    if (type == "Split" && spaces.replaces && stage.object("pattern").find<std::string>("String") == " ") continue;
    if (type != "Metaspace" || stage.get<std::string>("replacement") != kSpaceMark || spaces.metaspace) {
      refuse_tokenizer(path, "the pre_tokenizer " + io::brief(stage.content()));
    }
    static constexpr std::array<std::string_view, 3> kPrefixes{"never", "first", "always"};
    const auto scheme = stage.find<std::string>("prepend_scheme").value_or("always");
    const auto* const prefix = std::find(kPrefixes.begin(), kPrefixes.end(), scheme);
    if (prefix == kPrefixes.end()) stage.refuse("prepend_scheme", "never, first or always");
    if (!stage.find<bool>("add_prefix_space").value_or(true) && scheme != "never") {
      stage.refuse("add_prefix_space", "true, or the prepend_scheme never");
    }
    spaces.metaspace = true;
    spaces.splits = stage.find<bool>("split").value_or(true);
    spaces.prefix = static_cast<Spaces::Prefix>(prefix - kPrefixes.begin());
  }
  if (!spaces.replaces && !spaces.metaspace) refuse_tokenizer(path, "spaces that neither stage replaces by ▁");
}

void read_decoder(const json& decoder, Spaces& spaces, const std::string& path) {
  const auto stages = stages_of(decoder, "decoder", "decoders", path);
  const auto is = [&](std::size_t i, const char* type) {
    return i < stages.size() && stages[i].get<std::string>("type") == type;
  };
  spaces.strips = stages.size() == 4 && is(3, "Strip") && stages[3].get<std::string>("content") == " " &&
                  stages[3].get<std::int64_t>("start") == 1 && stages[3].get<std::int64_t>("stop") == 0;
  if (!is(0, "Replace") || !replaces(stages[0], kSpaceMark, " ") || !is(1, "ByteFallback") || !is(2, "Fuse") ||
      stages.size() != (spaces.strips ? 4U : 3U)) {
    refuse_tokenizer(path, "another decoder than ByteLevel, or Replace, ByteFallback, Fuse and Strip");
  }
}

class PieceTokenizer final : public JsonTokenizer {
 public:
  PieceTokenizer(const TokenizerFile& file, const Spaces& spaces) : JsonTokenizer(file), spaces_(spaces) {
    const auto model = file.document.object("model");
    const json& vocabulary = model.object("vocab").content();
    byte_ids_.fill(-1);
    if (model.find<bool>("byte_fallback").value_or(false)) {
      for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
        const auto found = vocabulary.find(fmt::format("<0x{:02X}>", byte));
        if (found == vocabulary.end()) refuse_tokenizer(file.path, fmt::format("no token of the byte {}", byte));
        byte_ids_[byte] = *found;
      }
    } else {
      const auto unknown = model.find<std::string>("unk_token");
      if (!unknown || !vocabulary.contains(*unknown)) model.refuse("unk_token", "a token, or byte_fallback");
      unknown_ = vocabulary.at(*unknown);
      fuses_unknown_ = model.find<bool>("fuse_unk").value_or(false);
    }
    // If no token has a space after another character, no merge crosses the start of a word, so words are independent.
    // The space itself must be a token, because a run of unknown characters is one token.
    words_ = vocabulary.contains(kSpaceMark) && (spaces.splits || !whole_words());
    for (const auto& [text, id] : vocabulary.items()) {
      const int byte = byte_of(text);
      add(id, text, byte < 0 ? with_spaces(text) : std::string(1, static_cast<char>(byte)), file.path);
      words_ = words_ && (spaces.splits || word_end(text, 0) == text.size());
      joined_.add_all(text);
      bytes_join_ = bytes_join_ || (byte < 0 && text.find("<0x") != std::string::npos);
    }
    add_merges_and_added_tokens(file);
    for (const auto& token : file.added) {
      if (token.special) continue;
      set_bytes(token.id, with_spaces(token.normalized ? normalized(token.text, Behind::nothing) : token.text));
    }
  }

  bool begins_with_added_space(std::int32_t id) const override {
    return spaces_.strips && bytes_of(id).starts_with(' ');
  }

  std::size_t replaced_size(std::string_view) const override { return 1; }

  std::size_t last_cut(std::string_view part) const override {
    return joined_.last_break(part, [&](std::size_t place, std::string_view before, std::string_view behind) {
      if (whole_words() && !(spaces_.splits && behind == kSpaceMark)) return false;
      const bool before_known = find(before) >= 0, behind_known = find(behind) >= 0;
      // A run of unknown characters may be one token.
      if (unknown_ >= 0 && !before_known && !behind_known) return false;
      if (bytes_join_ && !(before_known && behind_known)) return false;
      return cuts_no_added_token(part, place, place - std::min(place, reach()), std::min(place + reach(), part.size()));
    });
  }

 private:
  std::string normalized(std::string_view part, Behind behind) const override {
    return (spaces_.prepends && behind != Behind::text ? std::string(kSpaceMark) : "") +
           (spaces_.replaces ? with_marks(part) : std::string(part));
  }

  void encode_normal(std::string_view part, Behind behind, std::vector<std::int32_t>& out) const override {
    using Prefix = Spaces::Prefix;
    std::string marked;
    if (spaces_.metaspace) {
      marked = with_marks(part);
      const bool prefixed = behind == Behind::nothing ? spaces_.prefix != Prefix::never
                                                      : behind == Behind::token && spaces_.prefix == Prefix::always;
      if (prefixed && !marked.starts_with(kSpaceMark)) marked.insert(0, kSpaceMark);
      part = marked;
    }
    WordIds words;
    BytePairs pairs;
    const auto encode = [&](std::string_view word, auto& ids) {
      encode_word(
          word, pairs, [&](BytePairs& to) { push(word, to); }, ids);
    };
    for (std::size_t begin = 0; begin < part.size();) {
      const auto end = end_of_word(part, begin);
      words.append(part.substr(begin, end - begin), out, encode);
      begin = end;
    }
  }

  std::size_t end_of_word(std::string_view text, std::size_t begin) const {
    if (spaces_.splits) return std::min(text.find(kSpaceMark, begin + 1), text.size());
    return words_ ? word_end(text, begin) : text.size();
  }

  // Pushes the tokens of the characters of a word: of each character, of its bytes, or the unknown token.
  void push(std::string_view word, BytePairs& pairs) const {
    std::size_t unknown = 0;  // bytes of a run of unknown characters
    const auto end_run = [&] {
      if (unknown > 0) pairs.push(unknown_, unknown);
      unknown = 0;
    };
    for (std::size_t at = 0; at < word.size();) {
      const auto character = word.substr(at, static_cast<std::size_t>(utf8_character(word.substr(at))));
      at += character.size();
      const auto id = find(character);
      if (id < 0 && unknown_ >= 0) {
        if (!fuses_unknown_) end_run();
        unknown += character.size();
        continue;
      }
      end_run();
      if (id >= 0) {
        pairs.push(id, character.size());
      } else {
        for (const char c : character) pairs.push(byte_ids_[static_cast<std::uint8_t>(c)], 1);
      }
    }
    end_run();
  }

  Spaces spaces_;
  std::array<std::int32_t, 256> byte_ids_{};  // −1: no byte_fallback
  std::int32_t unknown_ = -1;                 // −1: byte_fallback
  bool fuses_unknown_ = false;                // a run of unknown characters is one token
  bool words_ = false;                        // whether words can be encoded one by one
  bool bytes_join_ = false;                   // whether tokens of bytes may be joined, also of two characters
  JoinedCharacters joined_;                   // in the texts of the vocabulary
};

}  // namespace

std::unique_ptr<Tokenizer> make_piece_tokenizer(const TokenizerFile& file) {
  const json& document = file.document.content();
  Spaces spaces;
  read_decoder(document.value("decoder", json()), spaces, file.path);
  read_normalizer(document.value("normalizer", json()), spaces, file.path);
  read_pre_tokenizer(document.value("pre_tokenizer", json()), spaces, file.path);
  return std::make_unique<PieceTokenizer>(file, spaces);
}

}  // namespace efla::data
