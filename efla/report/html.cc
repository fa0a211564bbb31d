#include "efla/report/html.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace efla::report {
namespace {

using nlohmann::json;

std::string dumped(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string print(const char* format, int digits, double value) {
  std::array<char, 400> buffer{};  // a double in %f has at most 309 digits before the point
  std::snprintf(buffer.data(), buffer.size(), format, digits, value);
  return buffer.data();
}

// Replaces a hyphen by a minus sign, and removes it in front of a zero.
std::string with_minus(std::string text) {
  if (text.empty() || text[0] != '-') return text;
  if (text.find_first_of("123456789") == std::string::npos) return text.substr(1);
  return "−" + text.substr(1);
}

}  // namespace

std::string escape(std::string_view text) {
  // The way through JSON replaces invalid UTF-8.
  const auto clean = json::parse(dumped(std::string(text))).get<std::string>();
  std::string out;
  for (const char c : clean) {
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

std::string script_json(const nlohmann::ordered_json& value) {
  std::string out;
  for (const char c : dumped(value)) {
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

std::string plus_minus(const Spread& spread, double scale, int digits) {
  const auto mean = fixed(scale * spread.mean, digits);
  if (!std::isfinite(spread.mean) || !std::isfinite(spread.deviation)) return mean;
  return mean + "\u00a0±\u00a0" + fixed(scale * spread.deviation, digits);
}

std::string joined(const std::vector<std::string>& parts, const std::string& separator) {
  std::string out;
  for (const auto& part : parts) out += (out.empty() ? "" : separator) + part;
  return out;
}

std::string string_of(const json& value) { return value.is_string() ? value.get<std::string>() : dumped(value); }

std::string text_of(const json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? "" : string_of(*it);
}

double number_of(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number() ? it->get<double>() : NAN;
}

}  // namespace efla::report
