#include "efla/report/html.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace efla::report {
namespace {

std::string print(const char* format, int digits, double value) {
  std::array<char, 400> buffer{};  // a double in %f has at most 309 digits before the point
  std::snprintf(buffer.data(), buffer.size(), format, digits, value);
  return buffer.data();
}

// A true minus sign in front of negative numbers, and none in front of a zero.
std::string with_minus(std::string text) {
  if (text.empty() || text[0] != '-') return text;
  if (text.find_first_of("123456789") == std::string::npos) return text.substr(1);
  return "−" + text.substr(1);
}

}  // namespace

std::string escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string script_json(const nlohmann::json& value) {
  std::string out;
  for (const char c : value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

std::string fill(std::string_view page, const std::map<std::string, std::string, std::less<>>& values) {
  std::string out;
  while (true) {
    const auto open = page.find("{{");
    const auto close = page.find("}}", open == std::string_view::npos ? page.size() : open);
    if (close == std::string_view::npos) return out.append(page);
    const auto name = page.substr(open + 2, close - open - 2);
    const auto value = values.find(name);
    if (value == values.end()) throw std::logic_error("template: no value for {{" + std::string(name) + "}}");
    out.append(page.substr(0, open)).append(value->second);
    page.remove_prefix(close + 2);
  }
}

std::string fixed(double value, int digits) {
  if (!std::isfinite(value)) return "–";
  return with_minus(print("%.*f", digits, value));
}

std::string compact(double value) {
  if (!std::isfinite(value)) return "–";
  return with_minus(print("%.*g", 6, value));
}

std::string percent(double share) {
  if (!std::isfinite(share)) return "–";
  return fixed(100 * share, 1) + "\u00a0%";
}

std::string thousands(double value) {
  const auto digits = fixed(value, 0);
  const auto first = digits.find_first_of("0123456789");
  std::string out;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > first && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

}  // namespace efla::report
