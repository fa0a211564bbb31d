// Parts of HTTP's syntax that Beast does not parse.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace efla::serve {

// Returns the text with the letters A to Z in lowercase, because names in headers have no case.
std::string lowercase(std::string_view text);

// Returns the text with each percent-encoded byte decoded (RFC 3986), such as "a b" for "a%20b". Returns nothing where
// two hexadecimal digits do not follow each "%".
std::optional<std::string> percent_decoded(std::string_view text);

}  // namespace efla::serve
