#include "efla/data/tokenizers/sentencepiece_tokenizer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/data/tokenizers/byte_pairs.h"
#include "efla/data/tokenizers/json_tokenizer.h"
#include "efla/data/tokenizers/pieces.h"
#include "efla/data/tokenizers/sentencepiece_model.h"
#include "efla/data/tokenizers/tokenizer_config.h"
#include "efla/data/tokenizers/tokenizer_json.h"
#include "efla/io/content_error.h"
#include "efla/io/sha256.h"

namespace efla::data {
namespace {

using Kind = SentencePieceModel::Kind;
using Type = SentencePieceModel::Type;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  io::fail_in(path, "a SentencePiece model with " + what + ", which is not supported");
}

// Refuses by name every feature of the format that encode and bytes_of do not implement.
void check_supported(const SentencePieceModel& model, const std::string& path) {
  static constexpr std::array<const char*, 5> kTypes{"", "unigram", "BPE", "word", "character"};
  if (model.type != Type::bpe) {
    refuse(path, fmt::format("the type {} instead of BPE", kTypes[static_cast<std::size_t>(model.type)]));
  }
  if (model.normalizes || model.denormalizes) refuse(path, "a normalizer other than identity");
  if (model.remove_extra_whitespaces) refuse(path, "remove_extra_whitespaces");
  if (!model.escape_whitespaces) refuse(path, "escape_whitespaces off");
  if (model.whitespace_as_suffix) refuse(path, "treat_whitespace_as_suffix");
  for (const auto& piece : model.pieces) {
    if (piece.kind == Kind::user_defined) refuse(path, "user-defined pieces");
    if (piece.kind == Kind::unused) refuse(path, "unused pieces");
  }
}

// Byte-pair encoding with scored pieces: the pair with the highest score is joined first.
class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(SentencePieceModel model, io::TokenizerInfo info, const std::string& path)
      : Tokenizer(std::move(info)), pieces_(std::move(model.pieces)), add_prefix_(model.add_dummy_prefix) {
    byte_ids_.fill(-1);
    bytes_.reserve(pieces_.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) add_piece(static_cast<std::int32_t>(i), model, path);
    if (unknown_ < 0) refuse(path, "no unknown piece");
    byte_fallback_ = model.byte_fallback;
    if (byte_fallback_ && std::count(byte_ids_.begin(), byte_ids_.end(), -1) > 0) {
      refuse(path, "byte_fallback and without a piece for every byte");
    }
    // If no piece has a space after another character, no join crosses the start of a word, so words are independent.
    // The space itself must be a piece, because a run of unknown characters is one token.
    const auto crosses = [](const auto& entry) { return word_end(entry.first, 0) != entry.first.size(); };
    words_ = ids_.contains(kSpaceMark) && std::none_of(ids_.begin(), ids_.end(), crosses);
  }

  std::vector<std::int32_t> encode_part(std::string_view part, bool begins) const override;

  std::string_view bytes_of(std::int32_t id) const override {
    if (id < 0 || id >= vocab_size()) {
      throw Error("decode", "id", std::to_string(id), fmt::format("0 to {}", vocab_size() - 1));
    }
    return bytes_[static_cast<std::size_t>(id)];
  }

  bool begins_with_added_space(std::int32_t id) const override {
    const auto& piece = pieces_[static_cast<std::size_t>(id)];
    return add_prefix_ && piece.kind == Kind::normal && piece.text.starts_with(kSpaceMark);
  }

  std::size_t replaced_size(std::string_view) const override { return 1; }

  std::size_t last_cut(std::string_view part) const override {
    return joined_.last_break(part, [&](std::size_t, std::string_view before, std::string_view behind) {
      return byte_fallback_ || find(before) >= 0 || find(behind) >= 0;  // a run of unknown characters is one token
    });
  }

 private:
  void add_piece(std::int32_t id, const SentencePieceModel& model, const std::string& path) {
    const auto& piece = pieces_[static_cast<std::size_t>(id)];
    switch (piece.kind) {
      case Kind::unknown:
        if (unknown_ >= 0) refuse(path, "two unknown pieces");
        unknown_ = id;
        bytes_.push_back(model.unknown_surface);
        break;
      case Kind::byte: {
        const int byte = byte_of(piece.text);
        if (byte < 0) refuse(path, fmt::format("piece {} of a byte not written as <0x..>", id));
        byte_ids_[static_cast<std::size_t>(byte)] = id;
        bytes_.emplace_back(1, static_cast<char>(byte));
        break;
      }
      case Kind::control:
        bytes_.emplace_back();
        set_special_text(id, piece.text);
        break;
      default:
        bytes_.push_back(with_spaces(piece.text));
        joined_.add_all(piece.text);
        ids_.emplace(piece.text, id);
    }
  }

  std::int32_t find(std::string_view text) const {
    const auto found = ids_.find(text);
    return found == ids_.end() ? -1 : found->second;
  }

  void encode_word(std::string_view word, BytePairs& pairs, std::vector<std::int32_t>& out) const;

  std::vector<SentencePieceModel::Piece> pieces_;
  std::vector<std::string> bytes_;                          // [vocab_size] bytes of each token
  std::unordered_map<std::string_view, std::int32_t> ids_;  // of the normal pieces; keys point into pieces_
  JoinedCharacters joined_;                                 // in the normal pieces
  std::array<std::int32_t, 256> byte_ids_{};                // −1: none
  std::int32_t unknown_ = -1;
  bool add_prefix_, byte_fallback_ = false;
  bool words_ = false;  // whether words can be encoded one by one
};

void SentencePieceTokenizer::encode_word(std::string_view word, BytePairs& pairs,
                                         std::vector<std::int32_t>& out) const {
  pairs.clear();
  for (std::size_t at = 0; at < word.size();) {
    const auto size = static_cast<std::size_t>(utf8_character(word.substr(at)));
    pairs.push(find(word.substr(at, size)), size);
    at += size;
  }
  const auto joined = [&](const BytePairs::Symbol& left, const BytePairs::Symbol& right) -> BytePairs::Joined {
    const auto id = find(word.substr(left.begin, left.size + right.size));
    return {id, id < 0 ? 0.0 : -pieces_[static_cast<std::size_t>(id)].score};
  };
  pairs.join(joined, [&](const BytePairs::Symbol& symbol) {
    if (symbol.id >= 0 || !byte_fallback_) {
      out.push_back(symbol.id >= 0 ? symbol.id : unknown_);
      return;
    }
    for (const char c : word.substr(symbol.begin, symbol.size)) out.push_back(byte_ids_[static_cast<std::uint8_t>(c)]);
  });
}

std::vector<std::int32_t> SentencePieceTokenizer::encode_part(std::string_view part, bool begins) const {
  if (const auto valid = utf8_prefix(part); valid != part.size()) {
    throw Error("encode", "text", fmt::format("a byte at {} that is not UTF-8", valid), "UTF-8");
  }
  if (part.size() > static_cast<std::size_t>(INT32_MAX) / kSpaceMark.size()) {
    throw Error("encode", "text", fmt::format("{} bytes", part.size()), "a text in parts of less than 700 MB");
  }
  std::vector<std::int32_t> out;
  if (part.empty()) return out;
  const std::string marked = (add_prefix_ && begins ? std::string(kSpaceMark) : "") + with_marks(part);

  WordIds words;
  BytePairs pairs;
  const std::string_view rest = marked;
  for (std::size_t begin = 0; begin < rest.size();) {
    const auto end = words_ ? word_end(rest, begin) : rest.size();
    words.append(rest.substr(begin, end - begin), out,
                 [&](std::string_view word, auto& ids) { encode_word(word, pairs, ids); });
    begin = end;
  }
  // A run of unknown characters is one token.
  const auto both_unknown = [&](std::int32_t a, std::int32_t b) { return a == unknown_ && b == unknown_; };
  if (!byte_fallback_) out.erase(std::unique(out.begin(), out.end(), both_unknown), out.end());
  return out;
}

// Returns the id of a piece; −1: there is none of this kind and text.
std::int32_t find_piece(const SentencePieceModel& model, Kind kind, std::string_view text) {
  const auto is = [&](const auto& piece) { return piece.kind == kind && piece.text == text; };
  const auto found = std::find_if(model.pieces.begin(), model.pieces.end(), is);
  return found == model.pieces.end() ? -1 : static_cast<std::int32_t>(found - model.pieces.begin());
}

}  // namespace

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(io::ByteView bytes, const std::string& path) {
  const auto model = parse_sentencepiece_model(bytes, path);
  check_supported(model, path);
  const auto control = [&](std::string_view text) { return find_piece(model, Kind::control, text); };
  io::TokenizerInfo info{std::filesystem::path(path).filename().string(), io::sha256(bytes),
                         static_cast<std::int64_t>(model.pieces.size()), control(model.bos_piece),
                         control(model.eos_piece)};
  auto config = read_tokenizer_config(path);
  const auto is_own = [&](const AddedToken& token) {
    return control(token.text) >= 0 || find_piece(model, Kind::unknown, token.text) >= 0;
  };
  bool same = std::all_of(config.added.begin(), config.added.end(), is_own);
  for (const auto& [field, piece] : {std::pair("bos_token", model.bos_piece), {"eos_token", model.eos_piece}}) {
    if (config.text_of(field).empty()) {
      if (control(piece) >= 0) config.names.push_back({field, piece, path});
    } else {
      same = same && config.text_of(field) == piece;
    }
  }
  auto tokenizer = std::make_unique<SentencePieceTokenizer>(model, std::move(info), path);
  if (same) return tokenizer;
  return make_json_tokenizer(tokenizer_json(model, config).tokenizer, config, bytes, path);
}

}  // namespace efla::data
