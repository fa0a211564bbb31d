// Reads the fields of a JSON object that a client sent, and refuses fields that nobody reads.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "efla/serve/api/error.h"

namespace efla::serve {

// Parses the body of a request. Throws ApiError with status 400 that names the byte where it is not JSON.
nlohmann::json parse_body(std::string_view body);

// A field that is null counts as missing. All functions throw ApiError with status 400 that names the field, what it
// got and what was expected.
class Fields {
 public:
  // path: of the object in the request, such as "stream_options"; empty for the request itself.
  explicit Fields(const nlohmann::json& object, std::string path = {});

  const nlohmann::json* find(const std::string& name);

  std::optional<std::string> text(const std::string& name);
  std::optional<bool> flag(const std::string& name);
  std::optional<std::int64_t> integer(const std::string& name, std::int64_t low, std::int64_t high);
  std::optional<double> number(const std::string& name, double low, double high);
  // The same with a value for a missing field.
  bool flag(const std::string& name, bool otherwise) { return flag(name).value_or(otherwise); }

  // Refuses fields that no function above was called for.
  void refuse_others() const;

  [[noreturn]] void refuse(const std::string& name, const std::string& expected) const;

 private:
  std::string full(const std::string& name) const { return path_.empty() ? name : path_ + "." + name; }

  const nlohmann::json& object_;
  std::string path_;
  std::vector<std::string> known_;
};

// Returns a value as a message shows it.
std::string short_text(const nlohmann::json& value);

}  // namespace efla::serve
