#include "efla/data/tokenizers/token_offsets.h"

#include <algorithm>
#include <array>
#include <string>

#include <utf8proc.h>

#include "efla/base/utf8.h"
#include "efla/data/tokenizers/pieces.h"

namespace efla::data {
namespace {

// How many bytes behind its expected place a token is searched after an unknown one.
constexpr std::size_t kReach = 256;

// The full decomposition of a character. The character that stands for a space is one.
struct Decomposition {
  explicit Decomposition(std::string_view character) {
    if (character == kSpaceMark) character = " ";
    utf8proc_int32_t code = 0;
    utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(character.data()),
                     static_cast<utf8proc_ssize_t>(character.size()), &code);
    constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
    int boundary = 0;
    const auto count = utf8proc_decompose_char(code, codes.data(), std::ssize(codes), kOptions, &boundary);
    size = static_cast<std::size_t>(std::max<utf8proc_ssize_t>(count, 1));
  }

  std::array<utf8proc_int32_t, 32> codes{};  // the longest of Unicode has 18
  std::size_t size = 0;
};

// Walks through a text with the texts of its tokens.
class Walk {
 public:
  explicit Walk(std::string_view text) : text_(text) {}

  // Returns the offset of the next token. token: its own text. spaces: for the first token of a text, or the first one
  // behind a special token, the number of spaces at the start of this token and the tokens behind it; otherwise 0.
  std::size_t push(std::string_view token, std::size_t spaces) {
    if (!held_.empty() || ahead_ > 0) return push_normalized(token);
    if (spaces > 0 && spaces > spaces_here(spaces)) token.remove_prefix(1);  // encode has added it
    if (rest().starts_with(token)) return pass(token.size());
    if (rest().empty()) return begun_;
    if (token.starts_with(' ') && token.size() > 1 && rest().starts_with(token.substr(1))) {
      return pass(token.size() - 1);  // behind an added token that is not special
    }
    const bool is_whole = utf8_character(token) > 0;
    const bool is_known =
        !is_whole || Decomposition(utf8_first(token)).codes[0] == Decomposition(utf8_first(rest())).codes[0];
    return is_known ? push_normalized(token) : push_unknown(token);
  }

 private:
  std::string_view rest() const { return text_.substr(at_); }

  // Returns the number of spaces that the rest of the text begins with. Counts no further than `most`.
  std::size_t spaces_here(std::size_t most) const {
    std::size_t count = 0;
    for (auto text = rest(); count < most && !text.empty(); ++count) {
      const auto character = utf8_first(text);
      if (Decomposition(character).codes[0] != ' ') break;
      text.remove_prefix(character.size());
    }
    return count;
  }

  // Moves on by bytes. Returns the offset before them.
  std::size_t pass(std::size_t bytes) {
    const auto offset = begun_;
    for (const char c : rest().substr(0, bytes)) begun_ += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
    at_ += bytes;
    return offset;
  }

  // Moves on by the text whose decomposition is as long as the token's.
  std::size_t push_normalized(std::string_view token) {
    const auto offset = begun_ + (held_.empty() || ahead_ > 0 ? 0 : 1);
    held_ += token;
    while (!held_.empty() && utf8_character(held_) >= 0) {
      const auto character = utf8_first(held_);
      const auto size = Decomposition(character).size;
      for (; ahead_ < size && !rest().empty(); pass(utf8_first(rest()).size())) {
        ahead_ += Decomposition(utf8_first(rest())).size;
      }
      ahead_ -= std::min(ahead_, size);
      held_.erase(0, character.size());
    }
    return offset;
  }

  // Moves on to the token if it stands near. An unknown token does not, and the next token finds its own place.
  std::size_t push_unknown(std::string_view token) {
    const auto skipped = rest().substr(0, kReach).find(token);
    if (skipped == std::string_view::npos) return begun_;
    pass(skipped);
    return pass(token.size());
  }

  std::string_view text_;
  std::size_t at_ = 0, begun_ = 0;  // bytes passed, and characters that begin in them
  std::size_t ahead_ = 0;           // how much longer the decomposition of the text is than the tokens' so far
  std::string held_;                // an unfinished character of normalized tokens
};

}  // namespace

std::vector<std::size_t> token_offsets(const Tokenizer& tokenizer, std::string_view text,
                                       std::span<const std::int32_t> ids, std::size_t added) {
  const auto own_text = [&](std::int32_t id) {
    const auto special = tokenizer.special_texts().find(id);
    return special == tokenizer.special_texts().end() ? tokenizer.bytes_of(id) : std::string_view(special->second);
  };
  // Returns how many spaces begin with the token of ids[i].
  const auto spaces_from = [&](std::size_t i) {
    std::size_t count = 0;
    for (; i < ids.size(); ++i) {
      const auto own = own_text(ids[i]);
      const auto end = std::min(own.find_first_not_of(' '), own.size());
      count += end;
      if (end < own.size()) break;
    }
    return count;
  };
  std::vector<std::size_t> offsets(std::min(added, ids.size()), 0);
  Walk walk(text);
  bool begins_part = true;
  for (std::size_t i = offsets.size(); i < ids.size(); ++i) {
    offsets.push_back(walk.push(own_text(ids[i]), begins_part ? spaces_from(i) : 0));
    begins_part = tokenizer.special_texts().contains(ids[i]);
  }
  return offsets;
}

}  // namespace efla::data
