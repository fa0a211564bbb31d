// Files of GGUF, made in memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace efla::test {

// A file while it is made. Texts are the bytes of numbers too.
struct GgufBytes {
  std::uint32_t version = 3;
  std::string values = {}, entries = {}, data = {};
  std::uint64_t keys = 0, tensors = 0;

  template <class T>
  static std::string number(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof(T)};
  }
  static std::string sized(std::string_view text) { return number(std::uint64_t{text.size()}).append(text); }
  // Adds a value, whose type in the format is `type`.
  GgufBytes& value(std::string_view key, std::uint32_t type, const std::string& bytes) {
    values += sized(key) + number(type) + bytes;
    ++keys;
    return *this;
  }
  GgufBytes& integer(std::string_view key, std::int64_t x) { return value(key, 11, number(x)); }
  GgufBytes& real(std::string_view key, float x) { return value(key, 6, number(x)); }
  GgufBytes& text(std::string_view key, std::string_view x) { return value(key, 8, sized(x)); }
  GgufBytes& integers(std::string_view key, std::span<const std::int64_t> x) {
    std::string bytes = number(std::uint32_t{11}) + number(std::uint64_t{x.size()});
    for (const auto one : x) bytes += number(one);
    return value(key, 9, bytes);
  }
  GgufBytes& texts(std::string_view key, std::span<const std::string> x) {
    std::string bytes = number(std::uint32_t{8}) + number(std::uint64_t{x.size()});
    for (const auto& one : x) bytes += sized(one);
    return value(key, 9, bytes);
  }
  // Adds a tensor with rows last in its shape.
  GgufBytes& tensor(std::string_view name, std::uint32_t type, const std::vector<std::uint64_t>& shape,
                    std::string_view bytes) {
    data.append((32 - data.size() % 32) % 32, '\0');
    entries += sized(name) + number(static_cast<std::uint32_t>(shape.size()));
    for (auto extent = shape.rbegin(); extent != shape.rend(); ++extent) entries += number(*extent);
    entries += number(type) + number(std::uint64_t{data.size()});
    data.append(bytes);
    ++tensors;
    return *this;
  }
  std::string bytes() const {
    std::string all = "GGUF" + number(version) + number(tensors) + number(keys) + values + entries;
    all.append((32 - all.size() % 32) % 32, '\0');
    return all + data;
  }
};

}  // namespace efla::test
