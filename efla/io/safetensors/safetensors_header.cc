#include "efla/io/safetensors/safetensors_header.h"

#include <iterator>
#include <limits>
#include <optional>
#include <set>

#include <nlohmann/json.hpp>

#include "efla/base/printable.h"
#include "efla/io/content_error.h"

namespace efla::io {
namespace {

// An iterator that makes its position visible to the handler below, because nlohmann's parser reports the position of a
// syntax error, but not the position of a value.
class PositionIterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  PositionIterator(const std::uint8_t* p, const std::uint8_t** seen) : p_(p), seen_(seen) {}
  char operator*() const { return static_cast<char>(*p_); }
  PositionIterator& operator++() {
    *seen_ = ++p_;
    return *this;
  }
  PositionIterator operator++(int) {
    auto before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const PositionIterator& a, const PositionIterator& b) { return a.p_ == b.p_; }

 private:
  const std::uint8_t* p_;
  const std::uint8_t** seen_;
};

// {"__metadata__": {text: text}, name: {"dtype": text, "shape": [n, …], "data_offsets": [begin, end]}, …}
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderHandler(ByteView text, std::size_t start, const std::string& path)
      : text_(text), start_(start), path_(path), position_(text.data()) {}

  PositionIterator begin() { return {text_.data(), &position_}; }
  PositionIterator end() { return {text_.data() + text_.size(), &position_}; }
  Header take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::start:
        return go(Place::top);
      case Place::metadata_entry:
        return go(Place::metadata);
      case Place::tensor_entry:
        return go(Place::tensor);
      default:
        fail("a JSON object where none belongs");
    }
  }

  bool end_object() override {
    if (place_ == Place::tensor) finish_tensor();
    return go(place_ == Place::top ? Place::end : Place::top);
  }

  bool key(std::string& name) override {
    if (place_ == Place::top) {
      if (!names_.insert(name).second) fail("the name \"" + printable(name) + "\" occurs twice");
      if (name == "__metadata__") return go(Place::metadata_entry);
      header_.entries.emplace_back();
      header_.entries.back().name = name;
      // The position is behind the closing quote. With escapes the key is longer in the file than the name.
      header_.entries.back().offset = offset();
      fields_.clear();
      return go(Place::tensor_entry);
    }
    if (place_ == Place::metadata) {
      if (!header_.metadata.emplace(name, "").second) fail("the key \"" + printable(name) + "\" occurs twice");
      key_ = name;
      return go(Place::metadata_value);
    }
    if (!fields_.insert(name).second) fail_tensor("has the field \"" + printable(name) + "\" twice");
    if (name == "dtype") return go(Place::dtype);
    if (name == "shape") return go(Place::shape_entry);
    if (name == "data_offsets") return go(Place::data_entry);
    fail_tensor("has the unknown field \"" + printable(name) + "\"");
  }

  bool string(std::string& value) override {
    if (place_ == Place::metadata_value) {
      header_.metadata[key_] = value;
      return go(Place::metadata);
    }
    if (place_ != Place::dtype) fail("a JSON string where none belongs");
    const auto type = type_from_name(value);
    if (!type) fail_tensor("has the unknown dtype \"" + printable(value) + "\"");
    tensor().type = *type;
    return go(Place::tensor);
  }

  bool start_array(std::size_t) override {
    numbers_ = 0;
    if (place_ == Place::shape_entry) return go(Place::shape);
    if (place_ == Place::data_entry) return go(Place::data);
    fail("a JSON array where none belongs");
  }

  bool end_array() override {
    if (place_ == Place::data && numbers_ != 2) fail_tensor("has data_offsets that are not two numbers");
    return go(Place::tensor);
  }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ == Place::shape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        fail_tensor("has an extent beyond 63 bits");
      }
      tensor().shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ != Place::data) fail("a JSON number where none belongs");
    if (numbers_ == 2) fail_tensor("has data_offsets that are not two numbers");
    tensor().data[numbers_++] = value;
    return true;
  }

  bool number_integer(std::int64_t) override { fail("a negative number where none belongs"); }
  bool number_float(double, const std::string&) override { fail("a number that is not a 64-bit integer"); }
  bool null() override { fail("a JSON null where none belongs"); }
  bool boolean(bool) override { fail("a JSON boolean where none belongs"); }
  bool binary(binary_t&) override { fail("a binary value where none belongs"); }
  bool parse_error(std::size_t byte, const std::string&, const nlohmann::json::exception&) override {
    fail_at(path_, start_ + (byte > 0 ? byte - 1 : 0), "the header is not JSON");
  }

 private:
  enum class Place {
    start,
    top,
    metadata_entry,
    metadata,
    metadata_value,
    tensor_entry,
    tensor,
    dtype,
    shape_entry,
    shape,
    data_entry,
    data,
    end
  };

  bool go(Place place) {
    place_ = place;
    return true;
  }

  HeaderEntry& tensor() { return header_.entries.back(); }
  // Returns the offset of the last byte that the parser consumed.
  std::size_t offset() const {
    const auto taken = static_cast<std::size_t>(position_ - text_.data());
    return start_ + (taken > 0 ? taken - 1 : 0);
  }

  void finish_tensor() {
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
      if (!fields_.contains(field)) fail_tensor("has no " + std::string(field));
    }
  }

  [[noreturn]] void fail(const std::string& what) const { fail_at(path_, offset(), "in the header: " + what); }
  [[noreturn]] void fail_tensor(const std::string& what) const {
    fail("tensor \"" + printable(header_.entries.back().name) + "\" " + what);
  }

  ByteView text_;
  std::size_t start_;
  const std::string& path_;
  const std::uint8_t* position_;
  Place place_ = Place::start;
  Header header_;
  std::set<std::string> names_, fields_;
  std::string key_;
  std::size_t numbers_ = 0;
};

}  // namespace

std::string printable(const std::string& name) {
  constexpr std::size_t kLongest = 200;
  return efla::printable(name, kLongest);
}

Header parse_safetensors_header(ByteView text, std::size_t start, const std::string& path) {
  HeaderHandler handler(text, start, path);
  nlohmann::json::sax_parse(handler.begin(), handler.end(), &handler);
  return handler.take();
}

}  // namespace efla::io
