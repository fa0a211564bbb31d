// Where a text can be cut before it is normalized and split.
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include <utf8proc.h>

#include "efla/base/utf8.h"
#include "efla/data/tokenizers/pre_tokenizer.h"

namespace efla::data {
namespace {

using Positions = ExpressionBorders::Positions;

// Returns the size of the whole character at the start of a text; 0: there is none.
std::size_t character_size(std::string_view text) {
  return text.empty() ? 0 : static_cast<std::size_t>(std::max(utf8_character(text), 0));
}

// Returns whether a character never combines with the characters before it, in any normal form.
bool stands_alone(std::string_view character) {
  if (character.size() == 1) return true;
  utf8proc_int32_t code = 0;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(character.data()),
                   static_cast<utf8proc_ssize_t>(character.size()), &code);
  std::array<utf8proc_int32_t, 32> parts{};
  int bound_class = 0;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
  const auto count =
      utf8proc_decompose_char(code, parts.data(), static_cast<utf8proc_ssize_t>(parts.size()), options, &bound_class);
  if (count < 1 || count > static_cast<utf8proc_ssize_t>(parts.size())) return false;
  const auto first = parts[0];
  const bool jamo = (first >= 0x1160 && first <= 0x11FF) || (first >= 0xD7B0 && first <= 0xD7FF);  // vowels and finals
  const auto category = utf8proc_category(first);
  return !jamo && category != UTF8PROC_CATEGORY_MN && category != UTF8PROC_CATEGORY_MC &&
         category != UTF8PROC_CATEGORY_ME && category != UTF8PROC_CATEGORY_CN;
}

}  // namespace

// Looks for borders in one text. Remembers what it has found about the characters.
class PreTokenizer::BorderFinder {
 public:
  BorderFinder(const PreTokenizer& owner, std::string_view text) : owner_(owner), text_(text) {}

  // Returns whether a piece surely begins at a place, where a character begins.
  bool is_border(std::size_t place) {
    const auto begin = start_of_unit(place), end = end_of_unit(place);
    if (end == 0 || !owner_.normalizes_apart(text_, place)) return false;
    const auto& before = unit(text_.substr(begin, place - begin));
    const auto& behind = unit(text_.substr(place, end - place));
    for (std::size_t i = 0; i < owner_.borders_.size(); ++i) {
      const auto& borders = owner_.borders_[i];
      if (!borders.separates(before.last[i], behind.first[i])) return false;
      if (borders.begins(behind.first[i])) return true;
    }
    return false;
  }

 private:
  // A stretch of text that is normalized apart from the rest: a character, and the characters that may combine with it.
  struct Unit {
    std::vector<Positions> first, last;  // by expression, of the first and last character in normal form
  };

  std::size_t start_of_unit(std::size_t end) const {
    std::size_t at = utf8_last(text_.substr(0, end));
    while (at > 0 && !owner_.normalizes_apart(text_, at)) at = utf8_last(text_.substr(0, at));
    return at;
  }

  // Returns the end of the unit that begins at a place; 0 if text that follows may belong to the unit.
  std::size_t end_of_unit(std::size_t begin) const {
    std::size_t at = begin;
    do {
      const auto size = character_size(text_.substr(at));
      if (size == 0) return 0;
      at += size;
      if (!owner_.normalizes()) return at;
    } while (!owner_.normalizes_apart(text_, at));
    return at;
  }

  const Unit& unit(std::string_view text) {
    const auto [place, is_new] = units_.try_emplace(std::string(text));
    Unit& unit = place->second;
    if (!is_new) return unit;
    const std::string normal = owner_.normalized(text);
    for (const auto& borders : owner_.borders_) {
      unit.first.push_back(borders.positions_of(std::string_view(normal).substr(0, character_size(normal))));
      unit.last.push_back(borders.positions_of(std::string_view(normal).substr(utf8_last(normal))));
    }
    return unit;
  }

  const PreTokenizer& owner_;
  std::string_view text_;
  std::unordered_map<std::string, Unit> units_;
};

std::size_t PreTokenizer::last_border(std::string_view text, const std::function<bool(std::size_t)>& allowed) const {
  const auto may_begin = [](const ExpressionBorders& borders) { return borders.may_begin(); };
  if (std::none_of(borders_.begin(), borders_.end(), may_begin)) return 0;
  BorderFinder finder(*this, text);
  for (std::size_t at = utf8_last(text); at > 0; at = utf8_last(text.substr(0, at))) {
    if (finder.is_border(at) && allowed(at)) return at;
  }
  return 0;
}

bool PreTokenizer::normalizes_apart(std::string_view text, std::size_t place) const {
  const auto size = character_size(text.substr(place));
  return size > 0 && (!normalizes() || stands_alone(text.substr(place, size)));
}

}  // namespace efla::data
