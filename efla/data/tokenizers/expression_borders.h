// Where a regular expression surely splits a text, so that a text can be split in parts.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace efla::data {

// What two neighbouring characters tell about the matches of an expression. The expression is taken as the graph of its
// positions (Glushkov, "The abstract theory of automata", 1961): a match is a path through the graph, whatever the
// order of alternatives and the greed of repetitions, and what follows a position is all that a match or a lookahead
// can see of the next character.
class ExpressionBorders {
 public:
  static constexpr std::size_t kMaxPositions = 256;
  using Positions = std::bitset<kMaxPositions>;

  // Takes a valid expression in Oniguruma's syntax. An expression that looks behind, or that has syntax unknown to this
  // class, has no borders.
  explicit ExpressionBorders(std::string_view expression);
  ~ExpressionBorders();
  ExpressionBorders(ExpressionBorders&&) noexcept;

  // Returns the positions that match a character.
  Positions positions_of(std::string_view character) const;

  // Returns whether the matches up to a place are the same for a text that ends there, and the matches behind it the
  // same for a text that begins there. before, behind: the positions of the characters at the place.
  bool separates(const Positions& before, const Positions& behind) const;

  // Returns whether there is a character at which a match begins for sure.
  bool may_begin() const { return known_ && alone_.any(); }

  // Returns whether a match begins at a character if no match before contains it.
  bool begins(const Positions& positions) const { return known_ && (positions & alone_).any(); }

 private:
  class Parser;
  class Class;

  Positions look_up(std::string_view character) const;

  bool known_ = false;
  std::vector<Positions> follow_;  // the positions that may come next
  Positions alone_;                // the positions that can be a whole match
  std::vector<Class> classes_;     // sets of characters, with the positions that match them
  std::array<Positions, 128> ascii_{};
};

}  // namespace efla::data
