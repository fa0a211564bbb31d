#include "efla/nn/families/quantised_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

#include "efla/base/dtype.h"
#include "efla/base/text.h"
#include "efla/io/content_error.h"
#include "efla/nn/families/quantisation_config.h"

namespace efla::nn {
namespace {

using io::NamedTensor;
using io::TensorType;
using Shape = std::vector<std::int64_t>;

constexpr std::int64_t kPerWord = 8;  // numbers of 4 bits in an int32

struct FormatRow {
  WeightFormat format;
  const char* name;
  std::vector<std::string_view> parts;  // behind the name of the layer
};

// The first row whose parts are all there counts.
const std::vector<FormatRow>& formats() {
  static const std::vector<FormatRow> rows{
      {WeightFormat::fp8_blocks, "F8_E4M3", {"weight", "weight_scale_inv"}},
      {WeightFormat::packed, "int4 (compressed-tensors)", {"weight_packed", "weight_scale", "weight_shape"}},
      {WeightFormat::gptq, "int4 (GPTQ)", {"qweight", "qzeros", "scales", "g_idx"}},
      {WeightFormat::awq, "int4 (AWQ)", {"qweight", "qzeros", "scales"}}};
  return rows;
}

// Throws unless a tensor has one of these types, and this shape.
void require(const std::string& path, const NamedTensor& tensor, const std::vector<TensorType>& types,
             const Shape& shape) {
  const auto text = [](const Shape& s) { return shape_text(s.data(), static_cast<int>(s.size())); };
  if (std::ranges::find(types, tensor.type) != types.end() && tensor.shape == shape) return;
  std::string expected;
  for (const auto type : types) expected.append(expected.empty() ? "" : " or ").append(io::type_name(type));
  io::fail_in(path, io::printable(tensor.name) + " is " + std::string(io::type_name(tensor.type)) + " " +
                        text(tensor.shape) + ", expected " + expected + " " + text(shape));
}

template <class T>
std::vector<T> elements_of(const NamedTensor& tensor) {
  std::vector<T> elements(tensor.bytes.size() / sizeof(T));
  std::memcpy(static_cast<void*>(elements.data()), tensor.bytes.data(), tensor.bytes.size());
  return elements;
}

template <class T>
std::vector<float> widened(const NamedTensor& tensor) {
  const auto elements = elements_of<T>(tensor);
  std::vector<float> wide(elements.size());
  std::ranges::transform(elements, wide.begin(), [](T x) { return to_float(x); });
  return wide;
}

std::vector<float> factors_of(const NamedTensor& tensor) {
  if (tensor.type == TensorType::F32) return elements_of<float>(tensor);
  return tensor.type == TensorType::BF16 ? widened<bfloat16>(tensor) : widened<float16>(tensor);
}

// Returns the number of 4 bits at a place of words.
int quarter(const std::vector<std::uint32_t>& words, std::int64_t word, std::int64_t place) {
  return static_cast<int>(words[static_cast<std::size_t>(word)] >> (4 * place) & 0xfU);
}

// Returns the numbers of all bytes: a sign, four bits of an exponent with bias 7, three bits of a fraction. The numbers
// of exponent 0 are subnormal. There are no infinities, and the largest magnitude of bits is NaN.
std::array<float, 256> e4m3_numbers() {
  constexpr int kBias = 7, kFractionBits = 3;
  std::array<float, 256> numbers;
  for (int bits = 0; bits < 256; ++bits) {
    const int exponent = bits >> kFractionBits & 0xf, fraction = bits & 0x7;
    const int whole = exponent == 0 ? fraction : fraction + (1 << kFractionBits);
    const auto size = std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - kBias - kFractionBits);
    const auto magnitude = (bits & 0x7f) == 0x7f ? std::numeric_limits<float>::quiet_NaN() : size;
    numbers[static_cast<std::size_t>(bits)] = bits < 0x80 ? magnitude : -magnitude;
  }
  return numbers;
}

// Fills a weight, row by row.
using Rows = std::vector<bfloat16>;
template <class F>
void fill(Rows& rows, std::int64_t columns, F&& number_at) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    rows[i] = to_bfloat16(number_at(at / columns, at % columns));
  }
}

void read_fp8(const std::string& path, const QuantisedWeight& w, Rows& rows) {
  static const auto numbers = e4m3_numbers();
  const auto blocks = [](std::int64_t count) { return (count + kFp8Block - 1) / kFp8Block; };
  const std::int64_t columns = w.shape[1], across = blocks(columns);
  require(path, *w.parts[1], {TensorType::F32, TensorType::BF16}, {blocks(w.shape[0]), across});
  const auto scales = factors_of(*w.parts[1]);
  const auto* const bits = reinterpret_cast<const std::uint8_t*>(w.parts[0]->bytes.data());
  fill(rows, columns, [&](std::int64_t o, std::int64_t i) {
    const auto scale = scales[static_cast<std::size_t>(o / kFp8Block * across + i / kFp8Block)];
    return scale * numbers[bits[o * columns + i]];
  });
}

// Returns the columns of a group, of which there are as many as a tensor has in dimension `axis`.
std::int64_t group_of(const std::string& path, const NamedTensor& scales, std::size_t axis, std::int64_t columns) {
  const std::int64_t groups = scales.shape.size() == 2 ? scales.shape[axis] : 0;
  if (groups > 0 && columns % groups == 0) return columns / groups;
  io::fail_in(path, io::printable(scales.name) + " has " + std::to_string(groups) +
                        " groups, expected a divisor of the " + std::to_string(columns) + " columns");
}

const std::vector<TensorType>& scale_types() {
  static const std::vector<TensorType> types{TensorType::F16, TensorType::BF16, TensorType::F32};
  return types;
}

void read_packed(const std::string& path, const QuantisedWeight& w, Rows& rows) {
  constexpr int kZero = 8;
  const std::int64_t columns = w.shape[1], words = (columns + kPerWord - 1) / kPerWord;
  require(path, *w.parts[0], {TensorType::I32}, {w.shape[0], words});
  const std::int64_t group = group_of(path, *w.parts[1], 1, columns), groups = columns / group;
  require(path, *w.parts[1], scale_types(), {w.shape[0], groups});
  const auto packed = elements_of<std::uint32_t>(*w.parts[0]);
  const auto scales = factors_of(*w.parts[1]);
  fill(rows, columns, [&](std::int64_t o, std::int64_t i) {
    const int q = quarter(packed, o * words + i / kPerWord, i % kPerWord) - kZero;
    return scales[static_cast<std::size_t>(o * groups + i / group)] * static_cast<float>(q);
  });
}

// What GPTQ and AWQ have in common: scales [G, O] and zeros [G, O/8].
struct Groups {
  std::int64_t outputs;
  std::vector<float> scales;
  std::vector<std::uint32_t> zeros;

  Groups(const std::string& path, const QuantisedWeight& w) : outputs(w.shape[0]) {
    const NamedTensor& given = *w.parts[2];
    const std::int64_t groups = given.shape.empty() ? 0 : given.shape[0];
    require(path, given, scale_types(), {groups, outputs});
    require(path, *w.parts[1], {TensorType::I32}, {groups, outputs / kPerWord});
    scales = factors_of(given);
    zeros = elements_of<std::uint32_t>(*w.parts[1]);
  }
  std::int64_t count() const { return std::ssize(scales) / outputs; }
  // Returns the number that q stands for in an output of a group, whose zero is at a place of its word.
  float number(int q, std::int64_t group, std::int64_t output, std::int64_t place, int more) const {
    const int zero = quarter(zeros, group * (outputs / kPerWord) + output / kPerWord, place) + more;
    return scales[static_cast<std::size_t>(group * outputs + output)] * static_cast<float>(q - zero);
  }
};

void read_gptq(const std::string& path, const QuantisedWeight& w, Rows& rows) {
  const std::int64_t outputs = w.shape[0], columns = w.shape[1];
  require(path, *w.parts[0], {TensorType::I32}, {columns / kPerWord, outputs});
  require(path, *w.parts[3], {TensorType::I32}, {columns});
  const Groups groups(path, w);
  const auto words = elements_of<std::uint32_t>(*w.parts[0]);
  const auto group_at = elements_of<std::int32_t>(*w.parts[3]);
  for (const auto group : group_at) {
    if (group >= 0 && group < groups.count()) continue;
    io::fail_in(path, io::printable(w.parts[3]->name) + " has group " + std::to_string(group) +
                          ", expected one of the " + std::to_string(groups.count()) + " groups");
  }
  fill(rows, columns, [&](std::int64_t o, std::int64_t i) {
    const int q = quarter(words, i / kPerWord * outputs + o, i % kPerWord);
    return groups.number(q, group_at[static_cast<std::size_t>(i)], o, o % kPerWord, 1);
  });
}

void read_awq(const std::string& path, const QuantisedWeight& w, Rows& rows) {
  constexpr std::int64_t kPlaces[kPerWord]{0, 4, 1, 5, 2, 6, 3, 7};  // of the outputs of a word
  const std::int64_t words = w.shape[0] / kPerWord, columns = w.shape[1];
  require(path, *w.parts[0], {TensorType::I32}, {columns, words});
  const Groups groups(path, w);
  const std::int64_t group = group_of(path, *w.parts[2], 0, columns);
  const auto packed = elements_of<std::uint32_t>(*w.parts[0]);
  fill(rows, columns, [&](std::int64_t o, std::int64_t i) {
    const std::int64_t place = kPlaces[o % kPerWord];
    return groups.number(quarter(packed, i * words + o / kPerWord, place), i / group, o, place, 0);
  });
}

// Returns the shape of a weight; nothing if its tensors do not have one.
std::optional<Shape> shape_of(WeightFormat format, const std::vector<const NamedTensor*>& parts) {
  const Shape& first = parts.front()->shape;
  if (first.size() != 2) return std::nullopt;
  switch (format) {
    case WeightFormat::fp8_blocks:
      if (parts.front()->type != TensorType::F8_E4M3) return std::nullopt;
      return first;
    case WeightFormat::packed: {
      const NamedTensor& shape = *parts.back();
      if (shape.type != TensorType::I64 || shape.shape != Shape{2}) return std::nullopt;
      return elements_of<std::int64_t>(shape);
    }
    case WeightFormat::gptq:
      return Shape{first[1], first[0] * kPerWord};
    case WeightFormat::awq:
      return Shape{first[1] * kPerWord, first[0]};
  }
  return std::nullopt;
}

const NamedTensor* find_tensor(const io::SafetensorsFolder& folder, const std::string& name) {
  const auto* file = folder.file_with(name);
  return file == nullptr ? nullptr : file->find(name);
}

}  // namespace

SourceTensor QuantisedWeight::read(const std::string& path, const std::string& name) const {
  using Reader = void (*)(const std::string&, const QuantisedWeight&, Rows&);
  constexpr Reader kReaders[]{read_fp8, read_packed, read_gptq, read_awq};  // in the order of WeightFormat
  // Each weight has at least a part of a byte in its first tensor.
  const auto stored = static_cast<double>(parts.front()->bytes.size()) * 2.0;
  if (shape[0] < 1 || shape[1] < 1 || static_cast<double>(shape[0]) * static_cast<double>(shape[1]) > stored) {
    io::fail_in(path, io::printable(parts.front()->name) + " has " + std::to_string(parts.front()->bytes.size()) +
                          " bytes, expected the numbers of a weight " + shape_text(shape.data(), 2));
  }
  const auto rows = std::make_shared<Rows>(static_cast<std::size_t>(shape[0] * shape[1]));
  kReaders[static_cast<std::size_t>(format)](path, *this, *rows);
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(rows->data());
  return {.tensor = {name, TensorType::BF16, shape, {bytes, rows->size() * sizeof(bfloat16)}}, .owner = rows};
}

std::map<std::string, QuantisedWeight, std::less<>> quantised_weights(const io::SafetensorsFolder& folder) {
  std::map<std::string, QuantisedWeight, std::less<>> weights;
  for (const auto& name : folder.names()) {
    const auto dot = name.rfind('.');
    if (dot == std::string::npos) continue;
    const std::string layer(name, 0, dot + 1);
    for (const auto& row : formats()) {
      if (std::string_view(name).substr(dot + 1) != row.parts.front()) continue;
      QuantisedWeight weight;
      weight.format = row.format;
      for (const auto part : row.parts) weight.parts.push_back(find_tensor(folder, layer + std::string(part)));
      if (std::ranges::find(weight.parts, nullptr) != weight.parts.end()) continue;
      const auto shape = shape_of(row.format, weight.parts);
      if (!shape) continue;
      weight.shape = *shape;
      weights.emplace(layer + "weight", weight);
      break;
    }
  }
  return weights;
}

const char* name_of(WeightFormat format) { return std::ranges::find(formats(), format, &FormatRow::format)->name; }

}  // namespace efla::nn
