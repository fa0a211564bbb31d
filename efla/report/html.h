// Text for HTML pages: escaping, templates and numbers as people read them.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace efla::report {

// The text with & < > " ' as entities: safe between tags and inside quoted attributes.
std::string escape(std::string_view text);

// JSON for a <script> element: every < is written \u003c, so that no tag can start inside. Bytes that are not UTF-8
// become U+FFFD.
std::string script_json(const nlohmann::json& value);

// Replaces each {{name}} of the template by its value, in one pass: what is filled in is not looked at again. Throws
// std::logic_error on a name without a value.
std::string fill(std::string_view page, const std::map<std::string, std::string, std::less<>>& values);

std::string fixed(double value, int digits);  // 0.0725, 2 → "0.07"; a minus sign is U+2212
std::string compact(double value);            // as few digits as say it: 0.003, 16, 1e-05
std::string percent(double share);            // 0.9654 → "96.5 %"
std::string thousands(double value);          // 12345.6 → "12,346"

}  // namespace efla::report
