#include "efla/generate/stop_strings.h"

#include <algorithm>
#include <utility>

#include "efla/base/error.h"
#include "efla/base/utf8.h"

namespace efla::generate {
namespace {

// Returns the length of the longest suffix of the text that is a proper prefix of the string.
std::size_t begun(std::string_view text, std::string_view string) {
  for (std::size_t size = std::min(text.size(), string.size() - 1); size > 0; --size) {
    if (text.ends_with(string.substr(0, size))) return size;
  }
  return 0;
}

}  // namespace

void require_stop_strings(const std::string& operation, const std::vector<std::string>& strings) {
  for (const auto& string : strings) {
    if (!string.empty() && utf8_prefix(string) == string.size()) continue;
    throw Error(operation, "stop", string.empty() ? "an empty text" : "a text that is not UTF-8",
                "UTF-8 that ends the reply");
  }
}

StopStrings::StopStrings(std::vector<std::string> strings, std::string held)
    : strings_(std::move(strings)), held_(std::move(held)) {}

std::string StopStrings::push(std::string_view piece) {
  if (stopped_) return {};
  held_ += piece;
  std::size_t first_end = std::string::npos, begin = 0;
  for (const auto& string : strings_) {
    const auto found = held_.find(string);
    if (found == std::string::npos) continue;
    const auto end = found + string.size();
    if (end < first_end || (end == first_end && found < begin)) {
      first_end = end;
      begin = found;
      matched_ = string;
    }
  }
  std::size_t certain = begin;
  if (first_end != std::string::npos) {
    stopped_ = true;
  } else {
    std::size_t longest = 0;
    for (const auto& string : strings_) longest = std::max(longest, begun(held_, string));
    certain = held_.size() - longest;
  }
  std::string text = held_.substr(0, certain);
  held_.erase(0, stopped_ ? std::string::npos : certain);
  return text;
}

std::string StopStrings::finish() { return std::exchange(held_, {}); }

}  // namespace efla::generate
