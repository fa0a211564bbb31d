#include "efla/serve/http/syntax.h"

#include <algorithm>
#include <charconv>
#include <cstddef>

namespace efla::serve {

std::string lowercase(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return lower;
}

std::string path_of(std::string_view target) {
  target = target.substr(0, target.find('?'));
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (lowercase(target.substr(0, scheme.size())) != scheme) continue;
    target.remove_prefix(std::min(target.find('/', scheme.size()), target.size()));
  }
  if (!target.empty() && target.front() != '/') return std::string(target);  // such as the "*" of OPTIONS
  std::string path;
  for (const char c : target) {
    if (c != '/' || !path.ends_with('/')) path += c;
  }
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path.empty() ? "/" : path;
}

std::string_view query_of(std::string_view target) {
  const auto question = target.find('?');
  return question == std::string_view::npos ? std::string_view() : target.substr(question + 1);
}

std::optional<std::string> percent_decoded(std::string_view text) {
  std::string decoded;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded += text[i];
      continue;
    }
    unsigned char byte = 0;
    const auto digits = text.substr(i + 1, 2);
    const auto* const end = digits.data() + digits.size();
    if (digits.size() != 2 || std::from_chars(digits.data(), end, byte, 16).ptr != end) return std::nullopt;
    decoded += static_cast<char>(byte);
    i += 2;
  }
  return decoded;
}

}  // namespace efla::serve
