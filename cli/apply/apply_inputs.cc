#include "cli/apply/apply_inputs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "efla/base/error.h"
#include "efla/base/text.h"

namespace efla::cli {
namespace {

using io::NamedTensor;
using io::TensorType;

struct Expected {
  const char* name;
  const char* sizes;
  bool required, state;
  const NamedTensor* ApplyInputs::*slot;
};

constexpr std::array<Expected, 10> kExpected{{
    {"q", "[B, T, H, K]", true, false, &ApplyInputs::q},
    {"k", "[B, T, H, K]", true, false, &ApplyInputs::k},
    {"v", "[B, T, HV, V]", true, false, &ApplyInputs::v},
    {"beta", "[B, T, HV]", true, false, &ApplyInputs::beta},
    {"initial_state", "[N, HV, K, V]", false, true, &ApplyInputs::initial_state},
    {"dout", "[B, T, HV, V]", false, false, &ApplyInputs::dout},
    {"dfinal_state", "[N, HV, K, V]", false, true, &ApplyInputs::dfinal_state},
    {"g", "[B, T, HV]", false, true, &ApplyInputs::g},
    {"cu_seqlens", "[N + 1]", false, false, &ApplyInputs::cu_seqlens},
    {"erase_key", "[B, T, H, K]", false, false, &ApplyInputs::erase_key},
}};

std::string shape_of(const NamedTensor& tensor) {
  return shape_text(tensor.shape.data(), static_cast<int>(tensor.shape.size()));
}

void check_names(const io::SafetensorsFile& file) {
  std::vector<std::string> names;
  for (const auto& expected : kExpected) names.emplace_back(expected.name);
  for (const auto& tensor : file.tensors()) {
    if (std::find(names.begin(), names.end(), tensor.name) == names.end()) {
      throw Error("apply", "tensors of " + file.path(), "'" + io::printable(tensor.name) + "'",
                  fmt::format("{} (nearest: {})", fmt::join(names, ", "), nearest_name(tensor.name, names)));
    }
  }
}

// Returns the extents of a tensor with these letters, from the sizes of q and v.
std::vector<std::int64_t> extents(const char* sizes, const DeltaShape& shape) {
  std::vector<std::int64_t> all;
  for (const char* letter = sizes; *letter != '\0'; ++letter) {
    if (letter[0] == 'H' && letter[1] == 'V') {
      all.push_back(shape.value_heads);
      ++letter;
      continue;
    }
    switch (*letter) {
      case 'N':
        all.push_back(shape.sequences());
        break;
      case 'B':
        all.push_back(shape.batch);
        break;
      case 'T':
        all.push_back(shape.tokens);
        break;
      case 'H':
        all.push_back(shape.heads);
        break;
      case 'K':
        all.push_back(shape.key_dim);
        break;
      case 'V':
        all.push_back(shape.value_dim);
        break;
    }
  }
  return all;
}

void check_shape(const NamedTensor& tensor, const Expected& expected, const DeltaShape& shape) {
  const auto wanted = extents(expected.sizes, shape);
  if (tensor.shape == wanted) return;
  throw Error("apply", tensor.name, "shape " + shape_of(tensor),
              fmt::format("{} = {}, from the shapes of q and v", expected.sizes,
                          shape_text(wanted.data(), static_cast<int>(wanted.size()))));
}

void check_type(const NamedTensor& tensor, bool state, TensorType type) {
  const auto wanted = state && type != TensorType::F64 ? TensorType::F32 : type;
  if (tensor.type != wanted) {
    throw Error("apply", tensor.name, std::string(io::type_name(tensor.type)),
                fmt::format("{}, where q is {}", io::type_name(wanted), io::type_name(type)));
  }
}

std::string index_text(std::size_t element, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> index(shape.size());
  auto rest = static_cast<std::int64_t>(element);
  for (std::size_t d = shape.size(); d-- > 0;) {
    index[d] = rest % shape[d];
    rest /= shape[d];
  }
  return shape_text(index.data(), static_cast<int>(index.size()));
}

template <class T>
T from_double(double x) {
  if constexpr (sizeof(T) == sizeof(bfloat16)) {
    return to_bfloat16(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

template <class T, class Stored>
std::vector<T> converted_from(const NamedTensor& tensor) {
  std::vector<T> all(tensor.bytes.size() / sizeof(Stored));
  for (std::size_t i = 0; i < all.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, tensor.bytes.data() + i * sizeof(Stored), sizeof(Stored));
    const double x = to_float(stored);
    all[i] = from_double<T>(x);
    if (!std::isfinite(to_float(all[i]))) {
      throw Error("apply", tensor.name, fmt::format("{} at {}", x, index_text(i, tensor.shape)),
                  fmt::format("numbers that are finite in {}", DTypeOf<T>::name));
    }
  }
  return all;
}

// Sets the number of packed sequences.
void read_sequences(ApplyInputs& inputs) {
  const auto* ends = inputs.cu_seqlens;
  if (ends == nullptr) return;
  if (ends->type != TensorType::I64) {
    throw Error("apply", "cu_seqlens", std::string(io::type_name(ends->type)), "I64");
  }
  if (ends->shape.size() != 1 || ends->shape[0] < 2) {
    throw Error("apply", "cu_seqlens", "shape " + shape_of(*ends), "[N + 1] with N ≥ 1");
  }
  inputs.shape.packed = ends->shape[0] - 1;
}

}  // namespace

ApplyInputs read_inputs(const io::SafetensorsFile& file) {
  check_names(file);
  ApplyInputs inputs;
  for (const auto& expected : kExpected) {
    inputs.*expected.slot = file.find(expected.name);
    if (expected.required && inputs.*expected.slot == nullptr) {
      throw Error("apply", expected.name, "nothing", fmt::format("a tensor {} in {}", expected.sizes, file.path()));
    }
  }
  for (const auto* tensor : {inputs.q, inputs.v}) {
    if (tensor->shape.size() != 4) {
      throw Error("apply", tensor->name, "shape " + shape_of(*tensor),
                  tensor == inputs.q ? "[B, T, H, K]" : "[B, T, HV, V]");
    }
  }
  const auto& size = inputs.q->shape;
  inputs.shape = {.batch = size[0],
                  .tokens = size[1],
                  .heads = size[2],
                  .value_heads = inputs.v->shape[2],
                  .key_dim = size[3],
                  .value_dim = inputs.v->shape[3]};
  const auto heads = inputs.shape.heads, value_heads = inputs.shape.value_heads;
  if (heads > 0 && (value_heads < heads || value_heads % heads != 0)) {
    throw Error("apply", "v", "shape " + shape_of(*inputs.v), fmt::format("HV a multiple of H = {}", heads));
  }
  read_sequences(inputs);
  if (inputs.g != nullptr) inputs.decay = inputs.g->shape.size() == 3 ? Decay::scalar : Decay::channel;
  inputs.type = inputs.q->type;
  if (inputs.type != TensorType::F32 && inputs.type != TensorType::BF16 && inputs.type != TensorType::F64) {
    throw Error("apply", "q", std::string(io::type_name(inputs.type)), "F32, BF16 or F64");
  }
  for (const auto& expected : kExpected) {
    if (const auto* tensor = inputs.*expected.slot) {
      if (tensor == inputs.cu_seqlens) continue;
      Expected by_axes = expected;
      if (tensor == inputs.g && inputs.decay == Decay::channel) by_axes.sizes = "[B, T, HV, K]";
      check_shape(*tensor, by_axes, inputs.shape);
      check_type(*tensor, expected.state, inputs.type);
    }
  }
  return inputs;
}

template <class T>
std::vector<T> converted(const NamedTensor& tensor) {
  switch (tensor.type) {
    case TensorType::F64:
      return converted_from<T, double>(tensor);
    case TensorType::BF16:
      return converted_from<T, bfloat16>(tensor);
    default:
      return converted_from<T, float>(tensor);
  }
}

std::vector<std::int64_t> integers(const NamedTensor& tensor) {
  std::vector<std::int64_t> all(tensor.bytes.size() / sizeof(std::int64_t));
  std::memcpy(all.data(), tensor.bytes.data(), all.size() * sizeof(std::int64_t));
  return all;
}

template std::vector<float> converted(const NamedTensor&);
template std::vector<bfloat16> converted(const NamedTensor&);
template std::vector<double> converted(const NamedTensor&);

}  // namespace efla::cli
