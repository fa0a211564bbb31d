// Problems for efla apply, in float64, and the files that hold them.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/base/random.h"
#include "efla/io/safetensors/safetensors.h"

namespace efla::test {

struct Tensor {
  std::vector<std::int64_t> shape;
  std::vector<double> values;

  std::int64_t size() const {
    std::int64_t n = 1;
    for (const auto extent : shape) n *= extent;
    return n;
  }
};
using Tensors = std::map<std::string, Tensor>;

inline Tensor random_tensor(std::vector<std::int64_t> shape, Random& random) {
  Tensor tensor{std::move(shape), {}};
  // Rounded to bfloat16, so that a file of any type holds the same numbers.
  for (auto i = tensor.size(); i > 0; --i) {
    tensor.values.push_back(to_float(to_bfloat16(static_cast<float>(random.normal()))));
  }
  return tensor;
}

// Every tensor that apply reads.
inline Tensors random_problem(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t k, std::int64_t v) {
  Random random(20 + t);
  Tensors all;
  all["q"] = random_tensor({b, t, h, k}, random);
  all["k"] = random_tensor({b, t, h, k}, random);
  all["v"] = random_tensor({b, t, h, v}, random);
  all["beta"] = random_tensor({b, t, h}, random);
  for (auto& x : all["beta"].values) x = to_float(to_bfloat16(static_cast<float>(1.0 / (1.0 + std::exp(-x)))));
  all["initial_state"] = random_tensor({b, h, k, v}, random);
  all["dout"] = random_tensor({b, t, h, v}, random);
  all["dfinal_state"] = random_tensor({b, h, k, v}, random);
  return all;
}

// Kept in float32, or float64 where the others are.
inline bool is_state(const std::string& name) {
  return name == "initial_state" || name == "dfinal_state" || name == "g";
}

inline std::vector<std::uint8_t> encoded(const Tensor& tensor, io::TensorType type) {
  std::vector<std::uint8_t> bytes;
  const auto append = [&](const auto& x) {
    const auto* begin = reinterpret_cast<const std::uint8_t*>(&x);
    bytes.insert(bytes.end(), begin, begin + sizeof(x));
  };
  for (const double x : tensor.values) {
    if (type == io::TensorType::I64) {
      append(static_cast<std::int64_t>(x));
    } else if (type == io::TensorType::F64) {
      append(x);
    } else if (type == io::TensorType::F32) {
      append(static_cast<float>(x));
    } else if (type == io::TensorType::BF16) {
      append(to_bfloat16(static_cast<float>(x)));
    } else {
      bytes.resize(bytes.size() + io::type_bytes(type));  // of a type that apply refuses: zeros
    }
  }
  return bytes;
}

// Writes tensors of `type`, states of F32 or, with F64, F64; `other` gives some another type.
inline void write_tensors(const std::string& path, const Tensors& tensors, io::TensorType type,
                          const std::map<std::string, io::TensorType>& other = {}) {
  std::vector<std::vector<std::uint8_t>> data;
  std::vector<io::NamedTensor> named;
  for (const auto& [name, tensor] : tensors) {
    auto stored = is_state(name) && type != io::TensorType::F64 ? io::TensorType::F32 : type;
    if (name == "cu_seqlens") stored = io::TensorType::I64;
    if (other.contains(name)) stored = other.at(name);
    data.push_back(encoded(tensor, stored));
    named.push_back({name, stored, tensor.shape, data.back()});
  }
  io::write_safetensors(path, named);
}

inline Tensors read_tensors(const std::string& path) {
  const io::SafetensorsFile file(path);
  Tensors all;
  for (const auto& tensor : file.tensors()) {
    Tensor& read = all[tensor.name];
    read.shape = tensor.shape;
    const auto element = [&](auto x, std::int64_t i) {
      std::memcpy(&x, tensor.bytes.data() + i * sizeof(x), sizeof(x));
      return static_cast<double>(to_float(x));
    };
    for (std::int64_t i = 0; i < read.size(); ++i) {
      if (tensor.type == io::TensorType::F64) {
        read.values.push_back(element(0.0, i));
      } else if (tensor.type == io::TensorType::F32) {
        read.values.push_back(element(0.0F, i));
      } else if (tensor.type == io::TensorType::BF16) {
        read.values.push_back(element(bfloat16{}, i));
      } else {
        throw std::runtime_error(tensor.name + " has a type that apply does not write");
      }
    }
  }
  return all;
}

}  // namespace efla::test
