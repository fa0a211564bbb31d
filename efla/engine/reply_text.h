// Converts the ids of a reply to text, up to a stop string.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"

namespace efla::engine {

// Throws Error of the operation about "stop" unless every string is UTF-8 and not empty.
void require_stop_strings(const std::string& operation, const std::vector<std::string>& strings);

// The text of a reply up to the stop string that is complete first; if several end at the same byte, up to the longest.
// Text that may be the start of a stop string is held back until more ids decide it.
//
// Special tokens such as "<|im_end|>" have no bytes, and do not appear in the text. A stop string that contains the
// text of a special token nevertheless ends the reply where this token stands. Stop strings ignore all special tokens
// that they do not contain.
class ReplyText {
 public:
  // What stop strings are compared with: one symbol per byte, and one per special token.
  using Symbols = std::u32string;

  // No string may be empty. held: the text that another object with the same strings held back. last_ids: the last ids
  // before the reply, which may end with an unfinished character. The tokenizer must outlive the object.
  ReplyText(const data::Tokenizer& tokenizer, const std::vector<std::string>& strings, std::string held = {},
            std::span<const std::int32_t> last_ids = {});
  ReplyText(const ReplyText&) = delete;

  // Returns the text that is certain now. Returns nothing after a stop.
  std::string push(std::int32_t id);
  // Returns the bytes that an id would add to the text.
  std::string_view bytes_of(std::int32_t id) const { return decoder_.bytes_of(id); }
  // Returns the text held back, at the end of a reply that no stop string has ended. This text may end at a stop
  // string.
  std::string finish();

  bool stopped() const { return stop_ != nullptr; }
  // Returns the stop string that ended the text. The functions about this string may be called only after a stop.
  const std::string& stop() const { return stop_->string; }
  // Returns the symbols of this string.
  const Symbols& stop_symbols() const { return stop_->symbols; }
  // Returns the symbols of an id that count for this string.
  Symbols symbols_for_stop(std::int32_t id) const;

  // Returns the text held back, which another object can continue.
  std::string held() const { return resumed_ + held_; }
  // Returns the number of symbols in the longest start of a stop string that the reply ends with.
  std::size_t begun() const;
  // Returns the number of symbols that an id has.
  std::size_t symbols_of(std::int32_t id) const;

 private:
  struct Stop {
    std::string string;
    Symbols symbols;
    std::vector<std::size_t> shorter;  // [i]: the length of the next shorter match, for a match of i + 1 symbols
    std::size_t matched = 0;           // symbols of the match at the end of the reply

    Stop(std::string text, Symbols all);
    bool has(char32_t symbol) const { return symbols.find(symbol) != Symbols::npos; }
    // Adds a symbol of the reply. Returns whether the stop string is complete.
    bool push(char32_t symbol);
    // Returns the size of the text of the first symbols.
    std::size_t text_size(std::size_t count) const;
  };

  void add(std::string_view text);
  void add_symbol(char32_t symbol);
  std::string take();

  const data::Tokenizer& tokenizer_;
  data::StreamDecoder decoder_;
  std::vector<Stop> stops_;
  std::string resumed_;  // text that another object held back, before the first id
  std::string held_;
  const Stop* stop_ = nullptr;  // the one that ended the text
};

}  // namespace efla::engine
