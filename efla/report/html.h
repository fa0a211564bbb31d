// Text for HTML pages: escaping, templates and numbers as people read them.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "efla/base/statistics.h"

namespace efla::report {

// Returns the text with & < > " ' as entities: safe between tags and inside quoted attributes. Bytes that are not UTF-8
// become U+FFFD.
std::string escape(std::string_view text);

// Returns JSON for a <script> element: every < is written \u003c, so that no tag can start inside. Bytes that are not
// UTF-8 become U+FFFD.
std::string script_json(const nlohmann::ordered_json& value);

// Replaces each {{name}} of the template by its value, in one pass: a {{name}} in a value stays. Throws
// std::logic_error on a name without a value.
std::string fill(std::string_view page, const std::map<std::string, std::string, std::less<>>& values);

std::string fixed(double value, int digits);  // 0.0725, 2 → "0.07"; a minus sign is U+2212
std::string compact(double value);            // at most 6 significant digits: 0.003, 16, 1e-05
std::string percent(double share);            // 0.9654 → "96.5 %"
std::string thousands(double value);          // 12345.6 → "12,346"

// Returns "96.5 ± 0.2": mean and deviation, times scale; the mean alone for one value, a dash for none.
std::string plus_minus(const Spread& spread, double scale = 1.0, int digits = 1);

std::string joined(const std::vector<std::string>& parts, const std::string& separator);

// Return an object's value under a key as text or as a number; "" or NaN if there is none.
std::string text_of(const nlohmann::json& object, const char* key);
double number_of(const nlohmann::json& object, const char* key);

// Returns a string as it is, any other value as JSON.
std::string string_of(const nlohmann::json& value);

}  // namespace efla::report
