#include "efla/base/quant_block.h"

namespace efla {

void dequantise(QuantType type, const std::byte* block, float* to) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(block);
  switch (type) {
    case QuantType::q8_0:
      return dequantise_block<QuantType::q8_0>(bytes, to);
    case QuantType::q4_0:
      return dequantise_block<QuantType::q4_0>(bytes, to);
    case QuantType::iq4_nl:
      return dequantise_block<QuantType::iq4_nl>(bytes, to);
    case QuantType::q4_k:
      return dequantise_block<QuantType::q4_k>(bytes, to);
    case QuantType::q5_k:
      return dequantise_block<QuantType::q5_k>(bytes, to);
    case QuantType::q6_k:
      return dequantise_block<QuantType::q6_k>(bytes, to);
  }
}

void dequantise_row(const QuantMatrix& matrix, std::int64_t n, float* to) {
  const auto [elements, bytes] = layout_of(matrix.type);
  const std::byte* block = matrix.row(n);
  for (std::int64_t c = 0; c < matrix.columns; c += elements, block += bytes) dequantise(matrix.type, block, to + c);
}

float QuantMatrix::at(std::int64_t n, std::int64_t d) const {
  const auto [elements, bytes] = layout_of(type);
  std::array<float, 256> numbers;
  dequantise(type, row(n) + d / elements * bytes, numbers.data());
  return numbers[static_cast<std::size_t>(d % elements)];
}

}  // namespace efla
