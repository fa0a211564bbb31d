#include <algorithm>
#include <array>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "efla/base/error.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/io/safetensors/safetensors_checksum.h"

namespace efla::io {
namespace {

constexpr std::size_t kAlignment = 8;

struct TypeRow {
  TensorType type;
  std::string_view name;
  std::size_t bytes;
};

constexpr std::array<TypeRow, 15> kTypes{{{TensorType::F64, "F64", 8},
                                          {TensorType::F32, "F32", 4},
                                          {TensorType::F16, "F16", 2},
                                          {TensorType::BF16, "BF16", 2},
                                          {TensorType::F8_E4M3, "F8_E4M3", 1},
                                          {TensorType::F8_E5M2, "F8_E5M2", 1},
                                          {TensorType::I64, "I64", 8},
                                          {TensorType::I32, "I32", 4},
                                          {TensorType::I16, "I16", 2},
                                          {TensorType::I8, "I8", 1},
                                          {TensorType::U64, "U64", 8},
                                          {TensorType::U32, "U32", 4},
                                          {TensorType::U16, "U16", 2},
                                          {TensorType::U8, "U8", 1},
                                          {TensorType::BOOL, "BOOL", 1}}};

const TypeRow& row(TensorType type) {
  return *std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& r) { return r.type == type; });
}

void check_size(const NamedTensor& tensor) {
  std::uint64_t size = type_bytes(tensor.type);
  bool fits = true;
  for (const auto extent : tensor.shape) {
    fits = fits && extent >= 0 && !__builtin_mul_overflow(size, static_cast<std::uint64_t>(extent), &size);
  }
  if (fits && size == tensor.bytes.size()) return;
  throw Error("write_safetensors", tensor.name, fmt::format("{} bytes", tensor.bytes.size()),
              fmt::format("those of {} [{}]", type_name(tensor.type), fmt::join(tensor.shape, ", ")));
}

std::string header_text(std::span<const NamedTensor> tensors, const std::map<std::string, std::string>& metadata) {
  std::set<std::string_view> names;
  // The object is written by hand, because an ordered_json of many keys takes quadratic time.
  std::string text = "{\"__metadata__\":" + nlohmann::json(metadata).dump();
  std::uint64_t begin = 0;
  for (const auto& tensor : tensors) {
    if (tensor.name == "__metadata__" || !names.insert(tensor.name).second) {
      throw Error("write_safetensors", "name", tensor.name, "a name that is not taken");
    }
    check_size(tensor);
    const auto end = begin + tensor.bytes.size();
    text += fmt::format(",{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                        nlohmann::json(tensor.name).dump(), type_name(tensor.type), fmt::join(tensor.shape, ","), begin,
                        end);
    begin = end;
  }
  text += "}";
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  return text;
}

// Returns the start of the file: the size of the header and the header, with the checksums.
std::string file_start(std::span<const NamedTensor> tensors, std::map<std::string, std::string> metadata) {
  add_checksums(tensors, metadata);
  std::string header;
  try {
    header = header_text(tensors, metadata);
  } catch (const nlohmann::json::type_error&) {
    throw Error("write_safetensors", "name or metadata", "bytes that are not UTF-8", "UTF-8");
  }
  std::string start(8, '\0');
  for (std::size_t i = 0; i < start.size(); ++i) start[i] = static_cast<char>(header.size() >> (8 * i));
  return start + header;
}

}  // namespace

std::string_view type_name(TensorType type) { return row(type).name; }

std::size_t type_bytes(TensorType type) { return row(type).bytes; }

std::optional<TensorType> type_from_name(std::string_view name) {
  const auto found = std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& r) { return r.name == name; });
  if (found == kTypes.end()) return std::nullopt;
  return found->type;
}

std::string safetensors_bytes(std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata) {
  std::string bytes = file_start(tensors, metadata);
  std::size_t total = bytes.size();
  for (const auto& tensor : tensors) total += tensor.bytes.size();
  bytes.reserve(total);
  for (const auto& tensor : tensors) {
    bytes.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  }
  return bytes;
}

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::string start = file_start(tensors, metadata);
  AtomicFile file(path);
  file.write(start);
  for (const auto& tensor : tensors) file.write(tensor.bytes);
  file.commit();
}

}  // namespace efla::io
