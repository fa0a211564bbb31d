#include "efla/io/fields.h"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "efla/base/error.h"
#include "efla/base/printable.h"
#include "efla/base/text.h"
#include "efla/io/json.h"

namespace efla::io {

RefuseField refuse_in_file(std::string path, std::string where, std::int64_t offset) {
  return [=](const std::string& field, const std::string& got, const std::string& expected) {
    const std::string place = where + (field.empty() ? "" : field + ": ");
    throw IoError(IoError::Kind::content, path, offset, place + "got " + got + ", expected " + expected);
  };
}

RefuseField refuse_argument(std::string operation) {
  return [=](const std::string& field, const std::string& got, const std::string& expected) {
    throw FieldError(operation, field.empty() ? "content" : field, got, expected);
  };
}

namespace {

constexpr std::size_t kLongest = 100;  // bytes of a value in a message

// Returns the beginning of a text as JSON. Where it ends within a character, the part of the character becomes U+FFFD.
std::string text_begin(const std::string& text) {
  return nlohmann::json(text.substr(0, kLongest)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Appends a value as JSON, but no more of a large value than a message shows.
void append_begin(std::string& out, const nlohmann::json& value) {
  if (value.is_string()) {
    out += text_begin(value.get_ref<const std::string&>());
  } else if (!value.is_structured()) {
    out += shown(value);
  } else {
    out += value.is_array() ? '[' : '{';
    bool first = true;
    for (auto it = value.begin(); it != value.end() && out.size() <= kLongest; ++it, first = false) {
      if (!first) out += ',';
      if (value.is_object()) out += text_begin(it.key()) + ':';
      append_begin(out, *it);
    }
    out += value.is_array() ? ']' : '}';
  }
}

}  // namespace

std::string brief(const nlohmann::json& value) {
  constexpr std::size_t kMostElements = 1000;
  if (value.is_structured() && value.size() > kMostElements) {
    return (value.is_array() ? "a list of " : "an object of ") + std::to_string(value.size()) +
           (value.is_array() ? " values" : " fields");
  }
  std::string text;
  append_begin(text, value);
  return efla::printable(text, kLongest);
}

std::optional<std::int64_t> whole_number(const nlohmann::json& value) {
  constexpr double kMostExact = 0x1p53;  // float64 does not have all whole numbers beyond
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    if (std::trunc(number) != number || std::abs(number) > kMostExact) return std::nullopt;
  } else if (!value.is_number_integer() ||
             (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX))) {
    return std::nullopt;
  }
  return value.get<std::int64_t>();
}

Fields::Fields(const nlohmann::json& object, RefuseField refuse, std::string name)
    : object_(&object), refuse_(std::move(refuse)), name_(std::move(name)) {
  if (!object.is_object()) refuse_(name_, brief(object), "an object");
}

const nlohmann::json* Fields::find(const std::string& name) const {
  known_.push_back(name);
  const auto found = object_->find(name);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

Fields Fields::object(const std::string& name) const {
  if (const auto* value = find(name)) return within(name, *value);
  refuse(name, "an object");
}

std::vector<Fields> Fields::objects(const std::string& name) const {
  const auto* list = find(name);
  if (list == nullptr || !list->is_array()) refuse(name, "a list of objects");
  std::vector<Fields> all;
  for (const auto& value : *list) all.push_back(within(name + "[" + std::to_string(all.size()) + "]", value));
  return all;
}

bool Fields::is_known(const std::string& name) const {
  return std::find(known_.begin(), known_.end(), name) != known_.end();
}

void Fields::refuse_others() const {
  for (const auto& [name, value] : object_->items()) {
    if (value.is_null() || is_known(name)) continue;
    refuse(name, "no such field (nearest: " + full(nearest_name(name, known_)) + ")");
  }
}

void Fields::refuse(const std::string& name, const std::string& expected) const {
  const auto found = object_->find(name);
  refuse_(efla::printable(full(name), 100), found == object_->end() ? "nothing" : brief(*found), expected);
  throw std::logic_error("the function that refuses fields has returned");
}

std::string Fields::range_text(double low, double high) {
  return "a number from " + value_text(low) + " to " + value_text(high);
}

std::string Fields::range_text(std::int64_t low, std::int64_t high) {
  if (low == high) return value_text(low);
  if (high == std::numeric_limits<std::int64_t>::max()) {
    return low == std::numeric_limits<std::int64_t>::min()
               ? "a whole number between -2^63 and 2^63"
               : "a whole number of at least " + value_text(low) + " and below 2^63";
  }
  return "a whole number from " + value_text(low) + " to " + value_text(high);
}

}  // namespace efla::io
