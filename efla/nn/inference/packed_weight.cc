#include "efla/nn/inference/packed_weight.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "efla/base/error.h"
#include "efla/base/quantise.h"
#include "efla/ops/layers/linear.h"

namespace efla::nn {
namespace {

constexpr WeightType kTypes[]{WeightType::float32, WeightType::bfloat16, WeightType::int8, WeightType::int4};

// The numbers of a weight in int8.
struct Quantised {
  std::vector<std::int8_t> bytes;
  std::vector<float> scales;
};

std::int64_t columns_of(const LinearForward& p) {
  if (p.quant_weight) return p.quant_weight.columns;
  return p.narrow_weight ? p.narrow_weight.extent[1] : p.weight.extent[1];
}

// Returns the scale of some numbers of a row: with it the largest becomes 127.
float scale_for(float largest) {
  const float scale = largest / 127.0F;
  // A denormal scale may be rounded down far, even to 0, so that a quotient would be above 127.
  return largest > 0.0F && scale < std::numeric_limits<float>::min() ? std::nextafter(scale, 1.0F) : scale;
}

}  // namespace

WeightType parse_weight_type(const std::string& name) {
  for (const auto type : kTypes) {
    if (name == name_of(type)) return type;
  }
  throw Error("model", "weights", "'" + name + "'", "float32, bfloat16, int8 or int4");
}

std::string_view name_of(WeightType type) {
  switch (type) {
    case WeightType::float32:
      return "float32";
    case WeightType::bfloat16:
      return "bfloat16";
    case WeightType::int8:
      return "int8";
    case WeightType::int4:
      return "int4";
  }
  return "";
}

StoredMatrix rows_of(const StoredMatrix& matrix, std::int64_t first, std::int64_t count) {
  StoredMatrix rows = matrix;
  const auto cut = [&](auto& view) {
    view.data = view.at(first);
    view.extent[0] = count;
  };
  matrix.narrow ? cut(rows.narrow) : cut(rows.wide);
  return rows;
}

PackedWeight::PackedWeight(const std::vector<torch::Tensor>& parts, WeightType type) {
  std::vector<StoredMatrix> matrices;
  for (const auto& part : parts) {
    const auto rows = std::make_shared<const torch::Tensor>(part.detach().contiguous());
    matrices.push_back(
        {.wide = View<const float, 2>::contiguous(rows->data_ptr<float>(), {rows->size(0), rows->size(1)}),
         .owner = rows});
  }
  *this = PackedWeight(std::span<const StoredMatrix>(matrices), type);
}

PackedWeight::Part PackedWeight::rounded(const LinearForward& from) {
  const std::int64_t rows = from.outputs(), columns = from.weight.extent[1];
  const auto numbers = std::make_shared<std::vector<bfloat16>>(static_cast<std::size_t>(rows * columns));
  auto to = numbers->begin();
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t c = 0; c < columns; ++c) *to++ = to_bfloat16(from.weight_at(n, c));
  }
  LinearForward p;
  p.narrow_weight = View<const bfloat16, 2>::contiguous(numbers->data(), {rows, columns});
  return {p, numbers};
}

PackedWeight::Part PackedWeight::quantised(const LinearForward& from) {
  const std::int64_t rows = from.outputs();
  const std::int64_t columns = columns_of(from);
  const std::int64_t blocks = (columns + kScaleBlock - 1) / kScaleBlock;
  const auto numbers = std::make_shared<Quantised>();
  numbers->bytes.reserve(static_cast<std::size_t>(rows * columns));
  numbers->scales.reserve(static_cast<std::size_t>(rows * blocks));
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t begin = 0; begin < columns; begin += kScaleBlock) {
      const std::int64_t end = std::min(begin + kScaleBlock, columns);
      float largest = 0.0F;  // a NaN if one is among the weights, which a comparison would leave out
      for (std::int64_t c = begin; c < end && !std::isnan(largest); ++c) {
        const float size = std::abs(from.weight_at(n, c));
        largest = size <= largest ? largest : size;
      }
      const float scale = numbers->scales.emplace_back(scale_for(largest));
      const bool divides = scale > 0.0F && std::isfinite(scale);
      for (std::int64_t c = begin; c < end; ++c) {
        numbers->bytes.push_back(static_cast<std::int8_t>(divides ? std::lround(from.weight_at(n, c) / scale) : 0));
      }
    }
  }
  LinearForward p;
  p.byte_weight = View<const std::int8_t, 2>::contiguous(numbers->bytes.data(), {rows, columns});
  p.scales = View<const float, 2>::contiguous(numbers->scales.data(), {rows, blocks});
  return {p, numbers};
}

PackedWeight::Part PackedWeight::four_bits(const LinearForward& from) {
  constexpr QuantType kType = QuantType::q4_0;
  constexpr QuantLayout kLayout = layout_of(kType);
  QuantMatrix matrix{kType, nullptr, from.outputs(), columns_of(from)};
  const auto bytes =
      std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(matrix.rows * matrix.row_bytes()));
  matrix.data = bytes->data();
  auto* block = reinterpret_cast<std::uint8_t*>(bytes->data());
  for (std::int64_t n = 0; n < matrix.rows; ++n) {
    for (std::int64_t begin = 0; begin < matrix.columns; begin += kLayout.elements, block += kLayout.bytes) {
      std::array<float, kLayout.elements> numbers{};
      for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = from.weight_at(n, begin + static_cast<int>(i));
      quantise_q4_0(numbers, block);
    }
  }
  LinearForward p;
  p.quant_weight = matrix;
  return {p, bytes};
}

PackedWeight::PackedWeight(std::span<const StoredMatrix> parts, WeightType type, bool rounds_x) {
  for (const auto& part : parts) {
    LinearForward p;
    p.weight = part.wide;
    p.narrow_weight = part.narrow;
    p.quant_weight = part.blocks;
    columns_ = columns_of(p);
    outputs_ += p.outputs();
    const bool held =
        part.keep || part.blocks || type == WeightType::float32 || (type == WeightType::bfloat16 && part.narrow);
    const bool fits_blocks = columns_ % layout_of(QuantType::q4_0).elements == 0;
    Part& own = parts_.emplace_back(held                                      ? Part{p, part.owner}
                                    : type == WeightType::int4 && fits_blocks ? four_bits(p)
                                    : is_integer(type)                        ? quantised(p)
                                                                              : rounded(p));
    const bool multiplied_narrow = type == WeightType::bfloat16 || own.problem.quant_weight;
    own.problem.rounds_x = rounds_x && multiplied_narrow && !part.keep;
  }
}

std::size_t PackedWeight::bytes() const {
  std::size_t total = 0;
  for (const auto& [p, owner] : parts_) {
    total += static_cast<std::size_t>(p.weight.size()) * sizeof(float);
    total += static_cast<std::size_t>(p.narrow_weight.size()) * sizeof(bfloat16);
    total += static_cast<std::size_t>(p.quant_weight.rows * p.quant_weight.row_bytes());
    total += static_cast<std::size_t>(p.byte_weight.size() + p.scales.size() * std::int64_t{sizeof(float)});
  }
  return total;
}

void PackedWeight::apply(const View<const float, 2>& x, const View<float, 2>& y, ThreadPool& pool) const {
  std::vector<LinearForward> problems;
  std::int64_t first = 0;
  for (const auto& part : parts_) {
    auto& p = problems.emplace_back(part.problem);
    p.x = x;
    p.y = y;
    p.y.data += first;
    p.y.extent[1] = p.outputs();
    first += p.outputs();
  }
  linear_forward(problems, {.context = {.pool = &pool}});
}

void PackedWeight::copy_row(std::int64_t n, float* to) const {
  for (const auto& [p, owner] : parts_) {
    if (n >= p.outputs()) {
      n -= p.outputs();
      continue;
    }
    if (p.quant_weight) return dequantise_row(p.quant_weight, n, to);
    for (std::int64_t c = 0; c < columns_; ++c) to[c] = p.weight_at(n, c);
    return;
  }
}

torch::Tensor PackedWeight::widened() const {
  torch::Tensor wide = torch::empty({outputs_, columns_});
  for (std::int64_t n = 0; n < outputs_; ++n) copy_row(n, wide.data_ptr<float>() + n * columns_);
  return wide;
}

}  // namespace efla::nn
