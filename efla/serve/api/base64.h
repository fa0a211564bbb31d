// Base64 (RFC 4648, section 4), for states inside JSON.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace efla::serve {

std::string to_base64(std::string_view bytes);

// Returns the bytes, or nothing for a text that is not base64 with its padding.
std::optional<std::string> from_base64(std::string_view text);

}  // namespace efla::serve
