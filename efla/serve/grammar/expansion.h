// How large expressions and grammars become when their repetitions are written out.
#pragma once

#include <cstdint>
#include <string_view>

namespace efla::serve {

inline constexpr std::int64_t kMostExpanded = 4000;  // characters of an expression, repetitions of a grammar

// Returns the number of characters of a regular expression whose repetitions {m,n} are written out, at most about twice
// kMostExpanded.
std::int64_t expanded_size(std::string_view expression);

// Returns the product of the bounds of all repetitions {m,n} of a grammar in EBNF, at most about twice kMostExpanded.
std::int64_t expanded_repeats(std::string_view grammar);

}  // namespace efla::serve
