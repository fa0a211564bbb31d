#include "efla/io/gguf/gguf_write.h"

#include <cstring>
#include <functional>
#include <numeric>
#include <string_view>

#include "efla/base/dtype.h"
#include "efla/base/error.h"
#include "efla/base/quantise.h"

namespace efla::io {
namespace {

constexpr std::uint64_t kGgufAlignment = 32;

template <class T>
void append_number(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void append_text(std::string& to, std::string_view text) {
  append_number(to, std::uint64_t{text.size()});
  to.append(text);
}

// The ids of types of values. An array has its id, the elements' one, and their number.
void append_value(std::string& to, bool value) { append_number(to, static_cast<std::uint8_t>(value)); }
void append_value(std::string& to, std::uint32_t value) { append_number(to, value); }
void append_value(std::string& to, std::int32_t value) { append_number(to, value); }
void append_value(std::string& to, float value) { append_number(to, value); }
void append_value(std::string& to, const std::string& value) { append_text(to, value); }

constexpr std::uint32_t id_of(bool) { return 7; }
constexpr std::uint32_t id_of(std::uint32_t) { return 4; }
constexpr std::uint32_t id_of(std::int32_t) { return 5; }
constexpr std::uint32_t id_of(float) { return 6; }
constexpr std::uint32_t id_of(std::string_view) { return 8; }
constexpr std::uint32_t kArrayId = 9;

template <class T>
void append_typed(std::string& to, const T& value) {
  append_number(to, id_of(value));
  append_value(to, value);
}

template <class T>
void append_typed(std::string& to, const std::vector<T>& values) {
  append_number(to, kArrayId);
  append_number(to, id_of(T()));
  append_number(to, std::uint64_t{values.size()});
  for (const auto& value : values) append_value(to, static_cast<const T&>(value));
}

std::uint64_t bytes_of(const GgufNewTensor& tensor) {
  const auto elements = std::accumulate(tensor.shape.begin(), tensor.shape.end(), std::int64_t{1}, std::multiplies<>());
  return static_cast<std::uint64_t>(elements / tensor.type->elements * tensor.type->bytes);
}

std::uint64_t padding_of(std::uint64_t size) { return (kGgufAlignment - size % kGgufAlignment) % kGgufAlignment; }

}  // namespace

void write_gguf(const std::filesystem::path& path, const GgufEntries& metadata,
                std::span<const GgufNewTensor> tensors) {
  constexpr std::uint32_t kVersion = 3;
  std::string head = "GGUF";
  append_number(head, kVersion);
  append_number(head, std::uint64_t{tensors.size()});
  append_number(head, std::uint64_t{metadata.size()});
  for (const auto& [key, value] : metadata) {
    append_text(head, key);
    std::visit([&](const auto& own) { append_typed(head, own); }, value);
  }
  std::uint64_t begin = 0;
  for (const auto& tensor : tensors) {
    append_text(head, tensor.name);
    append_number(head, static_cast<std::uint32_t>(tensor.shape.size()));
    for (auto extent = tensor.shape.rbegin(); extent != tensor.shape.rend(); ++extent) append_number(head, *extent);
    append_number(head, tensor.type->id);
    append_number(head, begin);
    begin += bytes_of(tensor) + padding_of(bytes_of(tensor));
  }
  head.append(padding_of(head.size()), '\0');
  AtomicFile file(path);
  file.write(head);
  for (const auto& tensor : tensors) {
    const Bytes bytes = tensor.bytes();
    if (bytes.size() != bytes_of(tensor)) {
      throw Error("write_gguf", tensor.name, std::to_string(bytes.size()) + " bytes", std::to_string(bytes_of(tensor)));
    }
    file.write(bytes);
    file.write(std::string(padding_of(bytes.size()), '\0'));
  }
  file.commit();
}

void quantise(const GgufType& type, const float* from, std::int64_t count, std::uint8_t* to) {
  const auto put = [&](auto number) {
    std::memcpy(to, &number, sizeof(number));
    to += sizeof(number);
  };
  if (type.name == "Q8_0" || type.name == "Q4_0") {
    for (std::int64_t at = 0; at < count; at += type.elements, to += type.bytes) {
      const std::span<const float, 32> block(from + at, 32);
      type.name == "Q8_0" ? quantise_q8_0(block, to) : quantise_q4_0(block, to);
    }
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    if (type.name == "F16") {
      put(to_float16(from[i]));
    } else if (type.name == "BF16") {
      put(to_bfloat16(from[i]));
    } else {
      put(from[i]);
    }
  }
}

}  // namespace efla::io
