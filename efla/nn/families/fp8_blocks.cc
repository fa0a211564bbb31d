#include "efla/nn/families/fp8_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/base/text.h"
#include "efla/io/content_error.h"
#include "efla/nn/families/family_config.h"

namespace efla::nn {
namespace {

using io::TensorType;

std::string text_of(const io::NamedTensor& tensor) {
  return io::printable(tensor.name) + " is " + std::string(io::type_name(tensor.type)) + " " +
         shape_text(tensor.shape.data(), static_cast<int>(tensor.shape.size()));
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

template <class T>
std::vector<float> widened(io::ByteView bytes) {
  std::vector<float> wide(bytes.size() / sizeof(T));
  for (std::size_t i = 0; i < wide.size(); ++i) {
    T x;
    std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
    wide[i] = to_float(x);
  }
  return wide;
}

}  // namespace

SourceTensor from_fp8_blocks(const std::string& path, const io::NamedTensor& weight, const io::NamedTensor& scales) {
  static const auto numbers = e4m3_numbers();
  const auto blocks = [](std::int64_t count) { return (count + kFp8Block - 1) / kFp8Block; };
  if (weight.shape.size() != 2)
    io::fail_in(path, text_of(weight) + ", expected a matrix, because it has a scale per block");
  const std::int64_t rows = weight.shape[0], columns = weight.shape[1];
  const std::vector<std::int64_t> shape{blocks(rows), blocks(columns)};
  if ((scales.type != TensorType::F32 && scales.type != TensorType::BF16) || scales.shape != shape) {
    io::fail_in(path, text_of(scales) + ", expected F32 or BF16 " + shape_text(shape.data(), 2));
  }
  const auto factors = scales.type == TensorType::F32 ? widened<float>(scales.bytes) : widened<bfloat16>(scales.bytes);
  const auto values = std::make_shared<std::vector<bfloat16>>(weight.bytes.size());
  auto from = weight.bytes.begin();
  auto to = values->begin();
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* const of_row = factors.data() + row / kFp8Block * shape[1];
    for (std::int64_t column = 0; column < columns; ++column) {
      *to++ = to_bfloat16(of_row[column / kFp8Block] * numbers[static_cast<std::uint8_t>(*from++)]);
    }
  }
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(values->data());
  return {.tensor = {weight.name, TensorType::BF16, weight.shape, {bytes, values->size() * sizeof(bfloat16)}},
          .owner = values};
}

}  // namespace efla::nn
