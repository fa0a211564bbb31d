// Converts text to token ids and back: SentencePiece models, BPE from a tokenizer.json, and bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "efla/io/tokens/token_shard.h"

namespace efla::data {

// A tokenizer. Its functions may be called by several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Returns the ids of a text. Every tokenizer except "bytes" throws Error, with the byte offset, if the text is not
  // UTF-8, and if the text is longer than 700 MB.
  std::vector<std::int32_t> encode(std::string_view text) const { return encode_part(text, true); }

  // Returns the ids of a part of a text that was cut where last_cut says. begins: whether the text begins with the
  // part.
  virtual std::vector<std::int32_t> encode_part(std::string_view part, bool begins) const = 0;

  // Returns the same as encode_part, but finds no special token such as "<|im_end|>" in the text.
  virtual std::vector<std::int32_t> encode_as_text(std::string_view part, bool begins) const {
    return encode_part(part, begins);
  }

  // Returns the bytes of a token, often only a part of a character; empty for bos, eos and similar ids. Throws Error
  // for an id outside of [0, vocab_size()).
  virtual std::string_view bytes_of(std::int32_t id) const = 0;

  // Returns the texts by which tokens without bytes are written, such as "<|im_end|>", by id.
  const std::map<std::int32_t, std::string>& special_texts() const { return special_texts_; }

  // Returns whether the token's bytes start with a space that encode adds if the token is the first one of a text.
  virtual bool begins_with_added_space(std::int32_t id) const = 0;

  // Returns the number of bytes that one U+FFFD replaces in decoded text, at the start of bytes that start with no
  // whole character. Here utf8_maximal_part; one byte for tokens of SentencePiece, as in its library.
  virtual std::size_t replaced_size(std::string_view bytes) const;

  // Returns the last place where a part of a text can be cut, whatever text follows the part; 0: none. The ids of the
  // text before the place, followed by the ids of the text behind it, are then the ids of the part.
  virtual std::size_t last_cut(std::string_view part) const = 0;

  const io::TokenizerInfo& info() const { return info_; }
  std::int64_t vocab_size() const { return info_.vocab_size; }
  std::int32_t bos() const { return info_.bos; }  // −1: none
  std::int32_t eos() const { return info_.eos; }  // −1: none

  // Returns the text of ids. It is always UTF-8: bytes that belong to no character become U+FFFD.
  std::string decode(std::span<const std::int32_t> ids) const;

 protected:
  explicit Tokenizer(io::TokenizerInfo info) : info_(std::move(info)) {}

  void set_special_text(std::int32_t id, std::string text) { special_texts_[id] = std::move(text); }

 private:
  io::TokenizerInfo info_;
  std::map<std::int32_t, std::string> special_texts_;
};

// Decodes token by token. Each piece is UTF-8, and all pieces together are the result of decode.
class StreamDecoder {
 public:
  // The tokenizer must outlive the decoder.
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // Returns the bytes that this token would add to the text. At the start of a text they lack the space that encode
  // adds.
  std::string_view bytes_of(std::int32_t id) const;
  // Returns the text that this token completes. The bytes of an unfinished character are held back.
  std::string push(std::int32_t id);
  // Returns what was held back, as U+FFFD. The next push starts a new text.
  std::string finish();

 private:
  std::string take(bool all);

  const Tokenizer& tokenizer_;
  std::string held_;
  bool begun_ = false;
};

// Loads "bytes" (ids 0 to 255 are the bytes, 256 is bos, 257 eos), the BPE in a file whose name ends in .json
// (json_tokenizer.h), the tokenizer in a GGUF file (gguf_tokenizer.h), or the SentencePiece model at a path: BPE with
// the identity normalizer, like the models of Llama and Mistral. Throws IoError for a file that is missing, broken, or
// of another kind.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name);

// Throws Error that names both tokenizers if they differ, because ids of one must not be read with the other.
void require_same_tokenizer(const io::TokenizerInfo& expected, const io::TokenizerInfo& got,
                            const std::string& operation);

}  // namespace efla::data
