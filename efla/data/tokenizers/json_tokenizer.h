// What all tokenizers of a tokenizer.json of Hugging Face's tokenizers have in common: BPE with a list of merges, and
// added tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/data/tokenizers/added_tokens.h"
#include "efla/data/tokenizers/byte_pairs.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/data/tokenizers/tokenizer_config.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"

namespace efla::data {

// A tokenizer.json while a tokenizer is made of it, and what the files beside it add.
struct TokenizerFile {
  const io::Fields& document;
  const std::string& path;
  std::vector<AddedToken> added;
  io::TokenizerInfo info;
};

// Makes a tokenizer from the bytes of the file at `path`; the files beside it (tokenizer_config.h) name bos and eos and
// may add tokens. encode finds added tokens in texts, and ignores the file's post_processor. Throws IoError(content)
// that names what is not supported.
std::unique_ptr<Tokenizer> make_json_tokenizer(io::ByteView bytes, const std::string& path);

// Makes a tokenizer from the document of a tokenizer.json. bytes: what the document was made of.
std::unique_ptr<Tokenizer> make_json_tokenizer(const nlohmann::json& document, const TokenizerConfig& config,
                                               io::ByteView bytes, const std::string& path);

// Returns the added tokens of a tokenizer.json and of the files beside it, with their ids.
std::vector<AddedToken> added_tokens_of(const nlohmann::json& document, const TokenizerConfig& config,
                                        const std::string& path);

class JsonTokenizer : public Tokenizer {
 public:
  std::vector<std::int32_t> encode_part(std::string_view part, bool begins) const final {
    return encode_part(part, begins, AddedTokens::Which::all);
  }
  std::vector<std::int32_t> encode_as_text(std::string_view part, bool begins) const final {
    return encode_part(part, begins, AddedTokens::Which::not_special);
  }
  std::string_view bytes_of(std::int32_t id) const final;

 protected:
  // What stands before a piece of text without added tokens: nothing, an added token, or other text without them.
  enum class Behind { nothing, token, text };

  explicit JsonTokenizer(const TokenizerFile& file);

  // Returns the part in its normal form.
  virtual std::string normalized(std::string_view part, Behind behind) const = 0;

  // Appends the ids of a normalized part.
  virtual void encode_normal(std::string_view part, Behind behind, std::vector<std::int32_t>& out) const = 0;

  // Returns whether a text can be cut at a place without a change of its added tokens: a search in the two parts finds
  // the same tokens as a search in the whole text. The normal form of the bytes [begin, end) must not depend on the
  // other bytes. They must reach at least reach() bytes to each side of the place, or to the end of the text.
  bool cuts_no_added_token(std::string_view text, std::size_t place, std::size_t begin, std::size_t end) const;

  // Returns the most bytes of a text that an added token of the normalized text can stand for.
  std::size_t reach() const;

  // Adds a token of the vocabulary: its text as `encode_normal` joins it, and its bytes. Throws for an id given twice.
  void add(std::int32_t id, std::string text, std::string bytes, const std::string& path);
  // Adds the merges and the added tokens. The vocabulary must be added, and `normalized` must be ready.
  void add_merges_and_added_tokens(const TokenizerFile& file);
  void set_bytes(std::int32_t id, std::string bytes) { bytes_[static_cast<std::size_t>(id)] = std::move(bytes); }

  // Returns the id of a text of the vocabulary; −1: none.
  std::int32_t find(std::string_view text) const;

  // Appends the ids of a word, whose first symbols `push(pairs)` pushes.
  template <class Push>
  void encode_word(std::string_view word, BytePairs& pairs, const Push& push, std::vector<std::int32_t>& out) const {
    if (whole_words_) {
      if (const auto id = find(word); id >= 0) return out.push_back(id);
    }
    pairs.clear();
    push(pairs);
    const auto joined = [&](const BytePairs::Symbol& left, const BytePairs::Symbol& right) -> BytePairs::Joined {
      const auto found = merges_.find(pair_of(left.id, right.id));
      if (found == merges_.end()) return {-1, 0};
      return {found->second.id, static_cast<double>(found->second.rank)};
    };
    pairs.join(joined, [&](const BytePairs::Symbol& symbol) { out.push_back(symbol.id); });
  }

  // Whether a word that is in the vocabulary becomes that token without merges.
  bool whole_words() const { return whole_words_; }

 private:
  struct Merge {
    std::int32_t rank, id;
  };

  std::vector<std::int32_t> encode_part(std::string_view part, bool begins, AddedTokens::Which found) const;

  // Returns the key in merges_ of two neighbouring tokens.
  static std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
  }

  // The keys of ids_ may be looked up without a copy.
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  AddedTokens tokens_, normalized_tokens_;  // found before and after the text is normalized
  AddedTokens texts_;                       // all of them, as files give their texts
  std::vector<std::string> bytes_;          // [vocab_size] bytes of each token
  std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>> ids_;
  std::unordered_map<std::uint64_t, Merge> merges_;
  bool whole_words_;
};

}  // namespace efla::data
