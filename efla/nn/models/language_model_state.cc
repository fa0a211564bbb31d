#include "efla/nn/models/language_model_state.h"

#include <torch/types.h>

#include <string>

#include "efla/nn/named_tensor.h"

namespace efla::nn {
namespace {

using torch::Tensor;

std::string prefix(std::size_t layer) { return "layers." + std::to_string(layer) + "."; }

}  // namespace

LanguageModelState LanguageModelState::clone() const {
  LanguageModelState copy = *this;
  for (auto& layer : copy.layers) {
    if (auto* mixer = std::get_if<MixerState>(&layer)) {
      mixer->memory = mixer->memory.clone();
      if (mixer->conv.defined()) mixer->conv = mixer->conv.clone();
    } else {
      auto& cache = std::get<KeyValueCache>(layer);
      const KeyValueCache old = cache;
      cache = KeyValueCache(old.keys().size(0), old.keys().size(1), old.keys().size(3));
      cache.append(old.keys(), old.values());
    }
  }
  return copy;
}

std::int64_t LanguageModelState::bytes() const {
  std::int64_t total = 0;
  for (const auto& layer : layers) {
    if (const auto* mixer = std::get_if<MixerState>(&layer)) {
      total += static_cast<std::int64_t>(mixer->memory.nbytes());
      if (mixer->conv.defined()) total += static_cast<std::int64_t>(mixer->conv.nbytes());
    } else {
      const auto& cache = std::get<KeyValueCache>(layer);
      total += static_cast<std::int64_t>(cache.keys().nbytes() + cache.values().nbytes());
    }
  }
  return total;
}

std::vector<std::pair<std::string, Tensor>> LanguageModelState::tensors() const {
  std::vector<std::pair<std::string, Tensor>> all;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (const auto* mixer = std::get_if<MixerState>(&layers[i])) {
      all.emplace_back(prefix(i) + "memory", mixer->memory.contiguous());
      if (mixer->conv.defined()) all.emplace_back(prefix(i) + "conv", mixer->conv.contiguous());
    } else {
      const auto& cache = std::get<KeyValueCache>(layers[i]);
      all.emplace_back(prefix(i) + "keys", cache.keys().contiguous());
      all.emplace_back(prefix(i) + "values", cache.values().contiguous());
    }
  }
  return all;
}

void LanguageModelState::read(const io::SafetensorsFile& file, std::int64_t read_tokens) {
  LanguageModelState own = *this;
  own.tokens = read_tokens;
  const auto fresh = [&](const std::string& name, at::IntArrayRef sizes) {
    const auto tensor = torch::empty(sizes);
    read_tensor(file, name, tensor);
    return tensor;
  };
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (auto* mixer = std::get_if<MixerState>(&own.layers[i])) {
      mixer->memory = fresh(prefix(i) + "memory", mixer->memory.sizes());
      if (mixer->conv.defined()) mixer->conv = fresh(prefix(i) + "conv", mixer->conv.sizes());
    } else {
      auto& cache = std::get<KeyValueCache>(own.layers[i]);
      auto sizes = cache.keys().sizes().vec();
      sizes[2] = read_tokens;
      cache = KeyValueCache(sizes[0], sizes[1], sizes[3]);
      cache.append(fresh(prefix(i) + "keys", sizes), fresh(prefix(i) + "values", sizes));
    }
  }
  *this = own;
}

}  // namespace efla::nn
