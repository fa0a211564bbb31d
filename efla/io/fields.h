// Reads the fields of JSON objects. A field that is missing, unknown or of another type is refused in one form: its
// name, what was got, what was expected.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/base/error.h"

namespace efla::io {

// Throws the error for a field. `field` has the names of the objects around it, as in "question.choices[1].text", and
// is empty for the whole object.
using RefuseField = std::function<void(const std::string& field, const std::string& got, const std::string& expected)>;

// Returns a function that throws IoError(content) for fields of a file: "run.json: line 2: data: got 3, expected an
// object". where: "", or the place in the file, as in "line 2: ". offset: the byte of the place; −1: none.
RefuseField refuse_in_file(std::string path, std::string where = "", std::int64_t offset = -1);

// Returns a function that throws FieldError(operation, field, got, expected).
RefuseField refuse_argument(std::string operation);

// Returns a value as messages show it: JSON of at most 100 bytes, or the size of a long list or object.
std::string brief(const nlohmann::json& value);

// Returns a whole number from -2^63 to 2^63 - 1; nothing for any other value. A number with a point, such as 4.0, is a
// whole number up to 2^53, because JSON does not distinguish 4.0 from 4.
std::optional<std::int64_t> whole_number(const nlohmann::json& value);

// The fields of a JSON object, which must outlive the Fields. A field that is null counts as missing, even if its name
// is unknown. Not for several threads at once, because every call notes the name of its field. The functions for a type
// T take bool, std::int64_t, std::uint64_t, double, std::string and std::vector of std::int64_t or std::string.
class Fields {
 public:
  // Throws if `object` is not a JSON object. Messages put `name` before the names of the fields.
  Fields(const nlohmann::json& object, RefuseField refuse, std::string name = "");

  const nlohmann::json& content() const { return *object_; }

  // Returns a field's value, nullptr if it is missing.
  const nlohmann::json* find(const std::string& name) const;

  // Returns a field's value, nothing if it is missing. Throws for another type and for a number outside of the range.
  template <class T>
  std::optional<T> find(const std::string& name) const {
    const auto* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!holds<T>(*value)) refuse(name, type_text<T>());
    return value->get<T>();
  }
  template <class T>
  std::optional<T> find(const std::string& name, std::type_identity_t<T> low, std::type_identity_t<T> high) const {
    const auto* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!holds<T>(*value) || !(*value >= low && *value <= high)) refuse(name, range_text(low, high));
    return value->get<T>();
  }

  // Return the same, but throw if the field is missing.
  template <class T>
  T get(const std::string& name) const {
    if (auto value = find<T>(name)) return std::move(*value);
    refuse(name, type_text<T>());
  }
  template <class T>
  T get(const std::string& name, std::type_identity_t<T> low, std::type_identity_t<T> high) const {
    if (const auto value = find<T>(name, low, high)) return *value;
    refuse(name, range_text(low, high));
  }
  template <class T>
  void get_to(const std::string& name, T& value) const {
    value = get<T>(name);
  }
  Fields object(const std::string& name) const;
  std::vector<Fields> objects(const std::string& name) const;  // the objects of a list

  // Returns the fields of an object that is somewhere inside of a field.
  Fields within(const std::string& name, const nlohmann::json& object) const { return {object, refuse_, full(name)}; }

  // Sets the value where the object has the field.
  template <class T>
  void read(const std::string& name, T& value) const {
    if (auto found = find<T>(name)) value = std::move(*found);
  }
  template <class T>
  void read(const std::string& name, std::optional<T>& value) const {
    auto found = find<T>(name);
    if (found || object_->contains(name)) value = std::move(found);
  }

  // Returns whether a function above was called for this field.
  bool is_known(const std::string& name) const;

  // Throws if the object has a field that is not null and for which no function above was called.
  void refuse_others() const;

  // Calls f. Throws for the field of the object that an Error of f names as its argument.
  template <class F>
  decltype(auto) check(const F& f) const {
    try {
      return f();
    } catch (const Error& error) {
      refuse_(full(error.argument()), error.got(), error.expected());
      throw;
    }
  }

  // Throws for the field's value, or for its absence.
  [[noreturn]] void refuse(const std::string& name, const std::string& expected) const;

 private:
  template <class T>
  static bool holds(const nlohmann::json& value) {
    if constexpr (std::is_same_v<T, bool>) {
      return value.is_boolean();
    } else if constexpr (std::is_same_v<T, double>) {
      return value.is_number();
    } else if constexpr (std::is_same_v<T, std::string>) {
      return value.is_string();
    } else if constexpr (std::is_same_v<T, std::uint64_t>) {
      return value.is_number_unsigned() || whole_number(value).value_or(-1) >= 0;
    } else if constexpr (std::is_same_v<T, std::int64_t>) {
      return whole_number(value).has_value();
    } else {
      return value.is_array() && std::all_of(value.begin(), value.end(), holds<typename T::value_type>);
    }
  }

  template <class T>
  static std::string type_text() {
    if (std::is_same_v<T, bool>) return "true or false";
    if (std::is_same_v<T, double>) return "a number";
    if (std::is_same_v<T, std::string>) return "a text";
    if (std::is_same_v<T, std::uint64_t>) return "a whole number from 0";
    if (std::is_same_v<T, std::int64_t>) return "a whole number below 2^63";
    return std::is_same_v<T, std::vector<std::string>> ? "a list of texts" : "a list of whole numbers below 2^63";
  }

  static std::string range_text(double low, double high);
  static std::string range_text(std::int64_t low, std::int64_t high);

  std::string full(const std::string& name) const { return name_.empty() ? name : name_ + "." + name; }

  const nlohmann::json* object_;
  RefuseField refuse_;
  std::string name_;
  mutable std::vector<std::string> known_;  // the names that the functions were called with
};

}  // namespace efla::io
