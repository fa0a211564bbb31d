// Writes GGUF files, version 3.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "efla/io/file.h"
#include "efla/io/gguf/gguf.h"

namespace efla::io {

// A value of the metadata, in the type that it has in the file: bool, uint32, float32, text, or an array.
using GgufNewValue = std::variant<bool, std::uint32_t, float, std::string, std::vector<bool>, std::vector<std::int32_t>,
                                  std::vector<std::string>>;
using GgufEntries = std::vector<std::pair<std::string, GgufNewValue>>;

// A tensor whose bytes are made when they are written. shape: with rows last.
struct GgufNewTensor {
  std::string name;
  const GgufType* type = nullptr;
  std::vector<std::int64_t> shape;
  std::function<Bytes()> bytes;
};

// Writes a file, whole or not at all. Throws Error for a tensor whose bytes are not as many as its shape says.
void write_gguf(const std::filesystem::path& path, const GgufEntries& metadata, std::span<const GgufNewTensor> tensors);

// Writes `count` numbers in whole blocks of a type to `to`: F32, F16, BF16, Q8_0 or Q4_0 (quantise.h).
void quantise(const GgufType& type, const float* from, std::int64_t count, std::uint8_t* to);

}  // namespace efla::io
