#include "efla/data/tokenizers/expression_borders.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <oniguruma.h>

#include "efla/base/utf8.h"

namespace efla::data {

// A set of characters: an atom of the expression, as an expression of its own.
class ExpressionBorders::Class {
 public:
  explicit Class(std::string source) : source_(std::move(source)) {
    const auto* begin = reinterpret_cast<const OnigUChar*>(source_.data());
    OnigErrorInfo info;
    OnigRegex regex = nullptr;
    if (onig_new(&regex, begin, begin + source_.size(), ONIG_OPTION_NONE, ONIG_ENCODING_UTF8, ONIG_SYNTAX_DEFAULT,
                 &info) != ONIG_NORMAL) {
      regex = nullptr;
    }
    regex_.reset(regex);
  }

  const std::string& source() const { return source_; }
  bool valid() const { return regex_ != nullptr; }
  bool matches(std::string_view character) const {
    const auto* begin = reinterpret_cast<const OnigUChar*>(character.data());
    const auto* end = begin + character.size();
    return onig_match(regex_.get(), begin, end, begin, nullptr, ONIG_OPTION_NONE) == end - begin;
  }

  Positions positions;

 private:
  struct Free {
    void operator()(OnigRegex regex) const { onig_free(regex); }
  };

  std::string source_;
  std::unique_ptr<std::remove_pointer_t<OnigRegex>, Free> regex_;
};

namespace {

using Positions = ExpressionBorders::Positions;

// A part of an expression: the positions with which it may begin and end, and whether it may match nothing.
struct Part {
  Positions first, last;
  bool empty = true;
};

// Thrown for syntax that is not known.
struct Unknown {};

}  // namespace

// Parses an expression by recursive descent.
class ExpressionBorders::Parser {
 public:
  Parser(ExpressionBorders& borders, std::string_view text) : borders_(borders), rest_(text) {}

  void parse() {
    bool empty = false;
    do {
      exact_ = true;
      literal_ = '\0';
      const std::size_t before = borders_.follow_.size();
      const Part branch = sequence();
      const bool one = borders_.follow_.size() == before + 1;
      if (exact_ && (one || !possessive_)) borders_.alone_ |= branch.first & branch.last;
      empty = empty || branch.empty;
      possessive_ = false;
    } while (skip("|"));
    // Positions cannot tell where an expression that matches the empty text splits.
    if (!rest_.empty() || empty) throw Unknown();
  }

 private:
  bool skip(std::string_view text) {
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }

  char peek() const { return rest_.empty() ? '\0' : rest_.front(); }

  std::string_view take(std::size_t size) {
    if (size == 0 || size > rest_.size()) throw Unknown();
    const auto taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  void connect(const Positions& from, const Positions& to) {
    for (std::size_t i = 0; i < borders_.follow_.size(); ++i) {
      if (from[i]) borders_.follow_[i] |= to;
    }
  }

  Part alternatives() {
    Part all = sequence();
    while (skip("|")) {
      literal_ = '\0';
      const Part other = sequence();
      all = {all.first | other.first, all.last | other.last, all.empty || other.empty};
    }
    return all;
  }

  Part sequence() {
    Part all;
    while (!rest_.empty() && peek() != '|' && peek() != ')') {
      const Part next = repeated(atom());
      connect(all.last, next.first);
      all = {all.empty ? all.first | next.first : all.first, next.empty ? all.last | next.last : next.last,
             all.empty && next.empty};
    }
    return all;
  }

  // Reads the quantifiers behind a part. One behind another makes it lazy or possessive, or repeats it once more.
  Part repeated(Part part) {
    for (char before = '\0';;) {
      const char c = peek();
      if (c == '{') {
        const auto [least, most] = interval();
        part.empty = part.empty || least == 0;
        exact_ = exact_ && least < 2 && most > 0;
      } else if (c == '?' || c == '*' || c == '+') {
        take(1);
        const bool lazy = c == '?' && before != '\0' && before != '{';
        part.empty = part.empty || (c != '+' && !lazy);
        possessive_ = possessive_ || (c == '+' && before != '\0');
      } else {
        return part;
      }
      if (c != '?') connect(part.last, part.first);
      before = c;
      literal_ = '\0';
    }
  }

  // Reads {n}, {n,}, {,m} or {n,m}. Counts beyond 1 do not matter.
  std::pair<int, int> interval() {
    take(1);
    const auto number = [&](int otherwise) {
      if (peek() < '0' || peek() > '9') return otherwise;
      int value = 0;
      for (; peek() >= '0' && peek() <= '9'; take(1)) value = std::min(2, 10 * value + (peek() - '0'));
      return value;
    };
    const int least = number(-1);
    const int most = skip(",") ? number(2) : least;
    if (!skip("}") || most < 0) throw Unknown();
    return {std::max(least, 0), most};
  }

  Part atom() {
    if (peek() == '(') return group();
    const char before = std::exchange(literal_, '\0');
    switch (peek()) {
      case '[':
        return position(take(class_size()));
      case '\\':
        return position(take(escape_size()));
      case '.':
        return position(take(1));
      case '$':  // looks at the next character, whichever it is
        take(1);
        exact_ = false;
        return {position("(?m:.)").first, {}, true};
      case '^':
      case '{':
      case '}':
      case ']':
      case '*':
      case '+':
      case '?':
        throw Unknown();
      default:
        break;
    }
    const int size = utf8_character(rest_);
    if (size < 1) throw Unknown();
    return literal(before, take(static_cast<std::size_t>(size)));
  }

  // Adds the position of a literal. Throws if case does not matter and one character may match two literals, as ß
  // matches ss and ﬁ matches fi: a position stands for one literal.
  Part literal(char before, std::string_view character) {
    if (flags_.find('i') != std::string::npos) {
      if (character.size() > 1) throw Unknown();
      literal_ = static_cast<char>(character[0] | 0x20);
      static constexpr std::array<std::string_view, 5> kTwo{"ss", "st", "ff", "fi", "fl"};
      if (std::find(kTwo.begin(), kTwo.end(), std::string{before, literal_}) != kTwo.end()) throw Unknown();
    }
    return position(character);
  }

  Part group() {
    take(1);
    const std::string flags = flags_;
    bool looks_ahead = false;
    if (skip("?")) {
      if (skip("=") || skip("!")) {
        looks_ahead = true;
      } else if (skip(">")) {
        possessive_ = true;
      } else {
        while (peek() == 'i' || peek() == 'm' || peek() == 'x') {
          if (peek() == 'x') throw Unknown();
          flags_ += take(1);
        }
        if (!skip(":")) throw Unknown();  // among others (?<, which looks behind
      }
    }
    Part part = alternatives();
    if (!skip(")")) throw Unknown();
    flags_ = flags;
    if (looks_ahead) {
      exact_ = false;
      part = {part.first, {}, true};
    }
    return part;
  }

  // Returns the size of the class [...] at the start.
  std::size_t class_size() const {
    std::size_t depth = 0;
    for (std::size_t at = 0; at < rest_.size(); ++at) {
      const char c = rest_[at];
      if (c == '\\') {
        ++at;
      } else if (c == '[') {
        ++depth;
        if (rest_.substr(at + 1).starts_with('^')) ++at;
        if (rest_.substr(at + 1).starts_with(']')) ++at;  // not the end
      } else if (c == ']' && --depth == 0) {
        return at + 1;
      }
    }
    throw Unknown();
  }

  // Returns the size of the escape at the start that stands for one character.
  std::size_t escape_size() const {
    const char c = rest_.size() > 1 ? rest_[1] : '\0';
    if (c == 'p' || c == 'P') {
      const auto end = rest_.find('}');
      if (rest_.size() < 3 || rest_[2] != '{' || end == std::string_view::npos) throw Unknown();
      return end + 1;
    }
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    constexpr std::string_view kClasses = "sSdDwWhHnrtfvae", kAnchors = "<>`'";
    const bool known = letter ? kClasses.find(c) != std::string_view::npos
                              : c > ' ' && c < 0x7f && kAnchors.find(c) == std::string_view::npos;
    if (!known) throw Unknown();
    return 2;
  }

  // Adds a position that matches one character of a class.
  Part position(std::string_view source) {
    const bool ascii =
        std::all_of(source.begin(), source.end(), [](char c) { return c != 0 && static_cast<std::uint8_t>(c) < 0x80; });
    const bool without_case = flags_.find('i') != std::string::npos;
    if (without_case && (!ascii || (source.size() > 1 && source[0] == '\\'))) throw Unknown();
    const std::string whole = flags_.empty() ? std::string(source) : "(?" + flags_ + ":" + std::string(source) + ")";
    auto& classes = borders_.classes_;
    auto found = std::find_if(classes.begin(), classes.end(), [&](const Class& c) { return c.source() == whole; });
    if (found == classes.end()) {
      classes.emplace_back(whole);
      found = classes.end() - 1;
      if (!found->valid()) throw Unknown();
    }
    const auto place = borders_.follow_.size();
    if (place == kMaxPositions) throw Unknown();
    borders_.follow_.emplace_back();
    found->positions.set(place);
    Part part{{}, {}, false};
    part.first.set(place);
    part.last.set(place);
    return part;
  }

  ExpressionBorders& borders_;
  std::string_view rest_;
  std::string flags_;
  char literal_ = '\0';      // the literal just before, in lower case, where case does not matter
  bool exact_ = true;        // whether a position that both begins and ends the branch is a match of the branch
  bool possessive_ = false;  // whether the branch has a part that gives no characters back, so that a match may fail
};

ExpressionBorders::ExpressionBorders(std::string_view expression) {
  try {
    Parser(*this, expression).parse();
  } catch (const Unknown&) {
    return;
  }
  known_ = true;
  for (std::size_t byte = 0; byte < ascii_.size(); ++byte) {
    const char character = static_cast<char>(byte);
    ascii_[byte] = look_up({&character, 1});
  }
}
ExpressionBorders::~ExpressionBorders() = default;
ExpressionBorders::ExpressionBorders(ExpressionBorders&&) noexcept = default;

ExpressionBorders::Positions ExpressionBorders::look_up(std::string_view character) const {
  Positions positions;
  for (const Class& one : classes_) {
    if (one.matches(character)) positions |= one.positions;
  }
  return positions;
}

ExpressionBorders::Positions ExpressionBorders::positions_of(std::string_view character) const {
  return character.size() == 1 ? ascii_[static_cast<std::uint8_t>(character[0])] : look_up(character);
}

bool ExpressionBorders::separates(const Positions& before, const Positions& behind) const {
  if (!known_) return false;
  for (std::size_t i = 0; i < follow_.size(); ++i) {
    if (before[i] && (follow_[i] & behind).any()) return false;
  }
  return true;
}

}  // namespace efla::data
