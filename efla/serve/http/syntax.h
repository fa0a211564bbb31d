// Parts of HTTP's syntax that Beast does not parse.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace efla::serve {

// Returns the text with the letters A to Z in lowercase, because names in headers have no case.
std::string lowercase(std::string_view text);

// Returns the path of a request's target, without the query: of "/a?b", and of the absolute form "http://host/a?b"
// (RFC 9112, 3.2.2). Slashes that follow a slash, and slashes at the end, do not count: "/a" for "//a/".
std::string path_of(std::string_view target);

// Returns the part of a target after its first "?", or "".
std::string_view query_of(std::string_view target);

// Returns the text with each percent-encoded byte decoded (RFC 3986), such as "a b" for "a%20b". Returns nothing where
// two hexadecimal digits do not follow each "%".
std::optional<std::string> percent_decoded(std::string_view text);

}  // namespace efla::serve
