#include "efla/nn/families/family_weights.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>
#include <utility>

#include "efla/base/text.h"
#include "efla/io/content_error.h"

namespace efla::nn {
namespace {

using io::TensorType;

std::string shape_of(const std::vector<std::int64_t>& shape) {
  return shape_text(shape.data(), static_cast<int>(shape.size()));
}

// Throws IoError(content) unless a tensor has a type that efla computes with, and this shape.
void check_tensor(const TensorSource& source, const io::NamedTensor& tensor, const std::vector<std::int64_t>& shape) {
  const bool known =
      tensor.type == TensorType::F32 || tensor.type == TensorType::BF16 || tensor.type == TensorType::F16;
  if (known && tensor.shape == shape) return;
  io::fail_in(source.path(), io::printable(tensor.name) + " is " + std::string(io::type_name(tensor.type)) + " " +
                                 shape_of(tensor.shape) + ", expected F32, BF16 or F16 " + shape_of(shape));
}

// Copies the elements of a tensor.
template <class T>
std::vector<T> elements_of(const io::NamedTensor& tensor) {
  std::vector<T> elements(tensor.bytes.size() / sizeof(T));
  std::memcpy(static_cast<void*>(elements.data()), tensor.bytes.data(), tensor.bytes.size());
  return elements;
}

template <class T>
Vector widened(const io::NamedTensor& tensor) {
  const auto elements = elements_of<T>(tensor);
  Vector wide(elements.size());
  std::ranges::transform(elements, wide.begin(), [](T x) { return to_float(x); });
  return wide;
}

Vector values_of(const io::NamedTensor& tensor) {
  if (tensor.type == TensorType::BF16) return widened<bfloat16>(tensor);
  return tensor.type == TensorType::F16 ? widened<float16>(tensor) : elements_of<float>(tensor);
}

// Returns a view of a tensor's rows of `columns` elements in memory that is kept by `owner`, or by a copy if the
// elements are not aligned.
template <class T>
std::pair<View<const T, 2>, std::shared_ptr<const void>> rows_of(const io::NamedTensor& tensor, std::int64_t columns,
                                                                 std::shared_ptr<const void> owner) {
  const auto* data = reinterpret_cast<const T*>(tensor.bytes.data());
  if (std::bit_cast<std::uintptr_t>(data) % alignof(T) != 0) {
    auto copy = std::make_shared<std::vector<T>>(elements_of<T>(tensor));
    data = copy->data();
    owner = std::move(copy);
  }
  const auto count = static_cast<std::int64_t>(tensor.bytes.size() / sizeof(T));
  return {View<const T, 2>::contiguous(data, {count / columns, columns}), std::move(owner)};
}

}  // namespace

FamilyWeights::FamilyWeights(const std::filesystem::path& folder, const Family& family)
    : source_(open_tensors(folder)), family_(family) {
  for (const auto prefix : family.prefixes) {
    prefix_ = prefix;
    if (!has("norm.weight")) continue;
    for_mlx_ = find_form();
    return;
  }
  std::string names;
  for (const auto prefix : family.prefixes) {
    names.append(names.empty() ? "" : " nor ").append(prefix).append("norm.weight");
  }
  io::fail_in(source_->path(), "has neither " + names);
}

// Returns whether the first of the convolutions has MLX's shape.
bool FamilyWeights::find_form() const {
  if (family_.convolutions.empty()) return false;
  const auto end = std::string(".").append(family_.convolutions.front()).append(".weight");
  for (const auto& name : source_->names()) {
    if (!name.starts_with(prefix_) || !name.ends_with(end)) continue;
    const auto& shape = source_->shape(name);
    return shape.size() == 3 && shape[1] > 1 && shape[2] == 1;
  }
  return false;
}

std::string FamilyWeights::first_of(const std::string& before, const Names& names, std::string_view after) const {
  for (const auto name : names) {
    auto candidate = before + std::string(name).append(after);
    if (has(candidate)) return candidate;
  }
  return before + std::string(names.front()).append(after);
}

bool FamilyWeights::begin_draft_head() {
  for (const auto prefix : family_.draft_heads) {
    if (!source_->has(std::string(prefix) + "fc.weight")) continue;
    draft_head_ = std::exchange(prefix_, prefix);
    return true;
  }
  return false;
}

bool FamilyWeights::has_draft_head() const {
  return std::ranges::any_of(family_.draft_heads,
                             [&](auto prefix) { return source_->has(std::string(prefix) + "fc.weight"); });
}

SourceTensor FamilyWeights::find(const std::string& full_name, bool matrix) {
  if (!source_->has(full_name)) {
    io::fail_in(source_->path(), "has no tensor " + full_name + ", which a model of its configuration has");
  }
  read_.insert(full_name);
  return source_->read(full_name, matrix);
}

// Returns a tensor of this shape as one matrix, whose rows are along the last dimension.
StoredMatrix FamilyWeights::stored(const std::string& full_name, const std::vector<std::int64_t>& shape) {
  const auto [tensor, blocks, owner] = find(full_name, shape.size() == 2);
  check_tensor(*source_, tensor, shape);
  const std::int64_t columns = shape.back();
  StoredMatrix matrix;
  if (blocks) return {.blocks = blocks, .owner = owner};
  if (tensor.type == TensorType::BF16) {
    std::tie(matrix.narrow, matrix.owner) = rows_of<bfloat16>(tensor, columns, owner);
  } else if (tensor.type == TensorType::F32) {
    std::tie(matrix.wide, matrix.owner) = rows_of<float>(tensor, columns, owner);
  } else {
    auto wide = std::make_shared<Vector>(values_of(tensor));
    matrix.wide = View<const float, 2>::contiguous(wide->data(), {std::ssize(*wide) / columns, columns});
    matrix.owner = std::move(wide);
  }
  return matrix;
}

StoredMatrix FamilyWeights::matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
  return stored(full(name), {rows, columns});
}

std::vector<StoredMatrix> FamilyWeights::matrices(const std::string& name, std::int64_t count, std::int64_t rows,
                                                  std::int64_t columns) {
  const StoredMatrix all = stored(full(name), {count, rows, columns});
  std::vector<StoredMatrix> matrices;
  for (std::int64_t i = 0; i < count; ++i) matrices.push_back(rows_of(all, i * rows, rows));
  return matrices;
}

std::string FamilyWeights::head_name() const {
  const std::string name(kHead);
  // Conversions for MLX keep the head beside the text model's part.
  const bool beside = !source_->has(name) && prefix_.starts_with("language_model.");
  return beside ? "language_model." + name : name;
}

StoredMatrix FamilyWeights::head(std::int64_t rows, std::int64_t columns) {
  return stored(head_name(), {rows, columns});
}

Vector FamilyWeights::vector(const std::string& name, const std::vector<std::int64_t>& shape) {
  const auto [tensor, blocks, owner] = find(full(name), false);
  check_tensor(*source_, tensor, shape);
  return values_of(tensor);
}

Vector FamilyWeights::taps(const std::vector<std::string>& names, std::int64_t channels, std::int64_t width) {
  Vector all;
  for (const auto& name : names) {
    const auto [tensor, blocks, owner] = find(full(name), false);
    const std::int64_t rows = tensor.shape.empty() ? 0 : tensor.shape.front();
    const std::vector<std::int64_t> plain{rows, width}, usual{rows, 1, width}, mlx{rows, width, 1};
    check_tensor(*source_, tensor, tensor.shape.size() == 2 ? plain : for_mlx_ ? mlx : usual);
    const auto values = values_of(tensor);
    all.insert(all.end(), values.begin(), values.end());
  }
  if (std::ssize(all) != channels * width) {
    io::fail_in(source_->path(), full(names.front()) + " and its neighbours have " +
                                     std::to_string(std::ssize(all) / width) + " rows, expected " +
                                     std::to_string(channels));
  }
  return all;
}

std::int64_t FamilyWeights::elements_read() const {
  std::int64_t total = 0;
  for (const auto& name : read_) {
    std::int64_t elements = 1;
    for (const auto extent : source_->shape(name)) elements *= extent;
    total += elements;
  }
  return total;
}

std::int64_t FamilyWeights::check_all_read() const {
  std::int64_t skipped = 0;
  for (const auto& name : source_->names()) {
    if (read_.contains(name)) continue;
    const auto begins = [&](std::string_view beginning) { return name.starts_with(beginning); };
    if (std::ranges::none_of(family_.skipped, begins) || (!draft_head_.empty() && begins(draft_head_))) {
      io::fail_in(source_->path(), "has a tensor " + io::printable(name) +
                                       ", which a model of its configuration has not (nearest: " +
                                       nearest_name(name, {read_.begin(), read_.end()}) + ")");
    }
    ++skipped;
  }
  return skipped;
}

}  // namespace efla::nn
