// Text to token ids and back: SentencePiece models and bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "efla/io/token_shard.h"

namespace efla::data {

// The ids of head = text[0, end) followed by those of text[next, …) are the ids of the whole text.
struct TextCut {
  std::size_t end = 0, next = 0;
};

// May be used from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // SentencePiece: throws Error with the byte offset for a text that is not UTF-8, or of more than 700 MB.
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;

  // The bytes that a token stands for, often only a part of a character; none for bos, eos and their like. Throws Error
  // for an id outside of [0, vocab_size()).
  virtual std::string_view bytes_of(std::int32_t id) const = 0;

  // Whether the first space of what ids stand for was put there by encode.
  virtual bool adds_space() const = 0;

  // The last place where a long text, of which more may follow, can be cut; end is 0 where there is none.
  virtual TextCut last_cut(std::string_view text) const = 0;

  const io::TokenizerInfo& info() const { return info_; }
  std::int64_t vocab_size() const { return info_.vocab_size; }
  std::int32_t bos() const { return info_.bos; }
  std::int32_t eos() const { return info_.eos; }

  // Always UTF-8: every byte that belongs to no character becomes U+FFFD.
  std::string decode(std::span<const std::int32_t> ids) const;

 protected:
  explicit Tokenizer(io::TokenizerInfo info) : info_(std::move(info)) {}

 private:
  io::TokenizerInfo info_;
};

// decode, token by token: what is returned is UTF-8 as it is, and all parts together are what decode returns.
class StreamDecoder {
 public:
  // The tokenizer must outlive it.
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // The text that this token completes; the bytes of an unfinished character are held back.
  std::string push(std::int32_t id);
  // What was held back, as U+FFFD; the next push begins a new text.
  std::string finish();

 private:
  std::string take(bool all);

  const Tokenizer& tokenizer_;
  std::string held_;
  bool begun_ = false;
};

// "bytes" (ids 0 to 255 are the bytes, 256 is bos, 257 eos), or the path of a SentencePiece model: BPE with the
// identity normalizer, as Llama's and Mistral's are. Throws IoError for a file that is missing, broken, or of another
// kind.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name);

// Throws Error naming both where ids of one tokenizer would be read with another's vocabulary.
void require_same_tokenizer(const io::TokenizerInfo& expected, const io::TokenizerInfo& got,
                            const std::string& operation);

}  // namespace efla::data
