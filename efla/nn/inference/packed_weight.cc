#include "efla/nn/inference/packed_weight.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "efla/base/error.h"
#include "efla/ops/layers/linear.h"

namespace efla::nn {
namespace {

constexpr WeightType kTypes[]{WeightType::float32, WeightType::bfloat16, WeightType::int8};

std::int64_t blocks_of(std::int64_t columns) { return (columns + kScaleBlock - 1) / kScaleBlock; }

}  // namespace

WeightType parse_weight_type(const std::string& name) {
  for (const auto type : kTypes) {
    if (name == name_of(type)) return type;
  }
  throw Error("model", "weights", "'" + name + "'", "float32, bfloat16 or int8");
}

std::string_view name_of(WeightType type) {
  switch (type) {
    case WeightType::float32:
      return "float32";
    case WeightType::bfloat16:
      return "bfloat16";
    case WeightType::int8:
      return "int8";
  }
  return "";
}

PackedWeight::PackedWeight(const std::vector<torch::Tensor>& parts, WeightType type) : type_(type) {
  for (const auto& part : parts) {
    const auto rows = part.detach().contiguous();
    columns_ = rows.size(1);
    outputs_ += rows.size(0);
    if (type == WeightType::float32) wide_.push_back(rows);
  }
  narrow_.reserve(type == WeightType::bfloat16 ? static_cast<std::size_t>(outputs_ * columns_) : 0);
  bytes_.reserve(type == WeightType::int8 ? static_cast<std::size_t>(outputs_ * columns_) : 0);
  for (const auto& part : parts) {
    if (type == WeightType::float32) break;
    const auto rows = part.detach().contiguous();
    for (std::int64_t n = 0; n < rows.size(0); ++n) append_row(rows.data_ptr<float>() + n * columns_);
  }
}

void PackedWeight::append_row(const float* row) {
  if (type_ == WeightType::bfloat16) {
    for (std::int64_t c = 0; c < columns_; ++c) narrow_.push_back(to_bfloat16(row[c]));
    return;
  }
  for (std::int64_t begin = 0; begin < columns_; begin += kScaleBlock) {
    const std::int64_t end = std::min(begin + kScaleBlock, columns_);
    float largest = 0.0F;
    for (std::int64_t c = begin; c < end; ++c) largest = std::max(largest, std::abs(row[c]));
    float scale = largest / 127.0F;
    // A denormal scale may be rounded down far, even to 0, so that a quotient would be above 127.
    if (largest > 0.0F && scale < std::numeric_limits<float>::min()) scale = std::nextafter(scale, 1.0F);
    scales_.push_back(scale);
    for (std::int64_t c = begin; c < end; ++c) {
      bytes_.push_back(static_cast<std::int8_t>(scale > 0.0F ? std::lround(row[c] / scale) : 0));
    }
  }
}

std::size_t PackedWeight::bytes() const {
  std::size_t total = narrow_.size() * sizeof(bfloat16) + bytes_.size() + scales_.size() * sizeof(float);
  for (const auto& part : wide_) total += part.nbytes();
  return total;
}

LinearForward PackedWeight::narrow_problem() const {
  LinearForward p;
  if (type_ == WeightType::bfloat16) {
    p.narrow_weight = View<const bfloat16, 2>::contiguous(narrow_.data(), {outputs_, columns_});
  } else {
    p.byte_weight = View<const std::int8_t, 2>::contiguous(bytes_.data(), {outputs_, columns_});
    p.scales = View<const float, 2>::contiguous(scales_.data(), {outputs_, blocks_of(columns_)});
  }
  return p;
}

void PackedWeight::apply(const View<const float, 2>& x, const View<float, 2>& y, ThreadPool& pool) const {
  std::vector<LinearForward> problems;
  if (wide_.empty()) problems.push_back(narrow_problem());
  for (const auto& part : wide_) {
    problems.emplace_back().weight = View<const float, 2>::contiguous(part.data_ptr<float>(), {part.size(0), columns_});
  }
  std::int64_t first = 0;
  for (auto& p : problems) {
    p.x = x;
    p.y = y;
    p.y.data += first;
    p.y.extent[1] = p.outputs();
    first += p.outputs();
  }
  linear_forward(problems, {.context = {.pool = &pool}});
}

void PackedWeight::copy_row(std::int64_t n, float* to) const {
  for (const auto& part : wide_) {
    if (n < part.size(0)) {
      std::copy_n(part.data_ptr<float>() + n * columns_, columns_, to);
      return;
    }
    n -= part.size(0);
  }
  const LinearForward p = narrow_problem();
  for (std::int64_t c = 0; c < columns_; ++c) to[c] = p.weight_at(n, c);
}

torch::Tensor PackedWeight::widened() const {
  torch::Tensor wide = torch::empty({outputs_, columns_});
  for (std::int64_t n = 0; n < outputs_; ++n) copy_row(n, wide.data_ptr<float>() + n * columns_);
  return wide;
}

}  // namespace efla::nn
