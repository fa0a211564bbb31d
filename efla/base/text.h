// Texts in messages: nearest names, shapes and values.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace efla {

// Returns the first of `names` with the smallest edit distance to `name`; "" if there are no names. A name that starts
// with `name` counts as at most one edit away.
std::string nearest_name(std::string_view name, const std::vector<std::string>& names);

// Returns a shape as text, such as "[2, 16, 4, 64]".
std::string shape_text(const std::int64_t* extent, int rank);

// Returns a value as a message shows it. A floating-point number has the fewest digits that identify the number. A text
// is not changed.
std::string value_text(double value);
inline std::string value_text(std::integral auto value) { return std::to_string(value); }
inline std::string value_text(bool value) { return value ? "true" : "false"; }
inline std::string value_text(std::string text) { return text; }
inline std::string value_text(const char* text) { return text; }

}  // namespace efla
