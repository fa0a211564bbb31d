#include "efla/serve/api/fields.h"

#include <algorithm>
#include <cmath>

#include "efla/base/error.h"
#include "efla/base/printable.h"
#include "efla/base/text.h"
#include "efla/io/json.h"

namespace efla::serve {
namespace {

std::string range_text(double low, double high) { return "from " + value_text(low) + " to " + value_text(high); }

std::string range_text(std::int64_t low, std::int64_t high) {
  if (high == std::numeric_limits<std::int64_t>::max()) return "of at least " + std::to_string(low);
  return "from " + std::to_string(low) + " to " + std::to_string(high);
}

}  // namespace

std::string short_text(const nlohmann::json& value) {
  constexpr std::size_t kLongest = 100;
  if (value.is_array()) return "a list of " + std::to_string(value.size());
  if (value.is_object()) return "an object";
  if (value.is_string()) return "\"" + printable(value.get_ref<const std::string&>(), kLongest) + "\"";
  return io::shown(value);
}

nlohmann::json parse_body(std::string_view body) {
  try {
    return io::parse_json(io::as_bytes(body), "the request");
  } catch (const IoError& error) {
    throw ApiError(400, error.what());
  }
}

Fields::Fields(const nlohmann::json& object, std::string path) : object_(object), path_(std::move(path)) {
  if (object.is_object()) return;
  const auto name = path_.empty() ? std::string("the request") : path_;
  throw ApiError(400, name + ": got " + short_text(object) + ", expected an object", path_);
}

const nlohmann::json* Fields::find(const std::string& name) {
  known_.push_back(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::optional<std::string> Fields::text(const std::string& name) {
  const auto* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(name, "a text");
  return value->get<std::string>();
}

std::optional<bool> Fields::flag(const std::string& name) {
  const auto* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(name, "true or false");
  return value->get<bool>();
}

std::optional<std::int64_t> Fields::integer(const std::string& name, std::int64_t low, std::int64_t high) {
  const auto* value = find(name);
  if (value == nullptr) return std::nullopt;
  const auto expected = "a whole number " + range_text(low, high);
  if (!value->is_number_integer()) refuse(name, expected);
  if (value->is_number_unsigned() && value->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
    refuse(name, expected);
  }
  const auto number = value->get<std::int64_t>();
  if (number < low || number > high) refuse(name, expected);
  return number;
}

std::optional<double> Fields::number(const std::string& name, double low, double high) {
  const auto* value = find(name);
  if (value == nullptr) return std::nullopt;
  const auto expected = "a number " + range_text(low, high);
  if (!value->is_number()) refuse(name, expected);
  const auto number = value->get<double>();
  if (!(number >= low && number <= high)) refuse(name, expected);
  return number;
}

void Fields::refuse_others() const {
  for (const auto& [name, value] : object_.items()) {
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    const auto shown = printable(full(name), 100);
    throw ApiError(400, shown + ": unknown field, nearest is \"" + nearest_name(name, known_) + "\"", shown,
                   "unknown_field");
  }
}

void Fields::refuse(const std::string& name, const std::string& expected) const {
  throw ApiError(400, full(name) + ": got " + short_text(object_.at(name)) + ", expected " + expected, full(name));
}

}  // namespace efla::serve
