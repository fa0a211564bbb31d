#include "efla/nn/models/language_model_state.h"

#include <torch/types.h>

#include <algorithm>
#include <string>

namespace efla::nn {
namespace {

using torch::Tensor;

std::string prefix(std::size_t layer) { return "layers." + std::to_string(layer) + "."; }

// Returns the slots of all sequences' first tokens, if the last tokens are in slot tokens − 1.
Tensor starts_of(const std::vector<const LanguageModelState*>& states, std::int64_t tokens, torch::Device device) {
  std::vector<std::int64_t> starts;
  for (const auto* state : states) {
    starts.insert(starts.end(), static_cast<std::size_t>(state->batch), tokens - state->tokens);
  }
  return torch::tensor(starts, torch::kLong).to(device);
}

}  // namespace

LanguageModelState LanguageModelState::clone() const {
  LanguageModelState copy = *this;
  copy.decode = {};
  for (auto& layer : copy.layers) {
    if (auto* mixer = std::get_if<MixerState>(&layer)) {
      mixer->memory = mixer->memory.clone();
      if (mixer->conv.defined()) mixer->conv = mixer->conv.clone();
    } else {
      auto& cache = std::get<KeyValueCache>(layer);
      const KeyValueCache old = cache;
      cache = KeyValueCache(old.keys().size(0), old.keys().size(1), old.keys().size(3), old.keys().device());
      cache.append(old.keys(), old.values());
    }
  }
  return copy;
}

LanguageModelState LanguageModelState::joined(const std::vector<const LanguageModelState*>& states) {
  LanguageModelState all = *states.at(0);
  all.decode = {};
  all.batch = 0;
  for (const auto* state : states) {
    all.batch += state->batch;
    all.tokens = std::max(all.tokens, state->tokens);
  }
  for (std::size_t i = 0; i < all.layers.size(); ++i) {
    if (std::holds_alternative<KeyValueCache>(all.layers[i])) {
      std::vector<const KeyValueCache*> caches;
      for (const auto* state : states) caches.push_back(&std::get<KeyValueCache>(state->layers[i]));
      all.layers[i] = KeyValueCache::joined(caches);
      if (!all.starts.defined()) all.starts = starts_of(states, all.tokens, caches[0]->keys().device());
      continue;
    }
    std::vector<Tensor> memories, convs;
    for (const auto* state : states) {
      const auto& mixer = std::get<MixerState>(state->layers[i]);
      memories.push_back(mixer.memory);
      if (mixer.conv.defined()) convs.push_back(mixer.conv);
    }
    all.layers[i] = MixerState{torch::cat(memories), convs.empty() ? Tensor() : torch::cat(convs)};
  }
  return all;
}

LanguageModelState LanguageModelState::selected(const std::vector<std::int64_t>& rows) const {
  LanguageModelState some = *this;
  some.decode = {};
  some.batch = static_cast<std::int64_t>(rows.size());
  const auto index = torch::tensor(rows, torch::kLong);
  if (starts.defined()) some.starts = starts.index_select(0, index.to(starts.device()));
  for (auto& layer : some.layers) {
    if (auto* cache = std::get_if<KeyValueCache>(&layer)) {
      *cache = cache->selected(index.to(cache->keys().device()));
      continue;
    }
    auto& mixer = std::get<MixerState>(layer);
    const auto on_device = index.to(mixer.memory.device());
    mixer.memory = mixer.memory.index_select(0, on_device);
    if (mixer.conv.defined()) mixer.conv = mixer.conv.index_select(0, on_device);
  }
  return some;
}

LanguageModelState LanguageModelState::row(std::int64_t index, std::int64_t row_tokens) const {
  LanguageModelState one{1, row_tokens, layers};
  for (auto& layer : one.layers) {
    if (auto* mixer = std::get_if<MixerState>(&layer)) {
      mixer->memory = mixer->memory.narrow(0, index, 1).clone();
      if (mixer->conv.defined()) mixer->conv = mixer->conv.narrow(0, index, 1).clone();
      continue;
    }
    const KeyValueCache all = std::get<KeyValueCache>(layer);
    const auto own = [&](const Tensor& of_all) {
      return of_all.narrow(0, index, 1).narrow(2, all.tokens() - row_tokens, row_tokens);
    };
    const Tensor keys = own(all.keys()), values = own(all.values());
    auto& cache = std::get<KeyValueCache>(layer);
    cache = KeyValueCache(1, keys.size(1), keys.size(3), keys.device());
    cache.append(keys, values);
  }
  return one;
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
    const auto add = [&](const char* name, const Tensor& tensor) {
      all.emplace_back(prefix(i) + name, tensor.to(torch::kCPU).contiguous());
    };
    if (const auto* mixer = std::get_if<MixerState>(&layers[i])) {
      add("memory", mixer->memory);
      if (mixer->conv.defined()) add("conv", mixer->conv);
    } else {
      const auto& cache = std::get<KeyValueCache>(layers[i]);
      add("keys", cache.keys());
      add("values", cache.values());
    }
  }
  return all;
}

void LanguageModelState::read(const Reader& tensor, std::int64_t read_tokens) {
  LanguageModelState own = *this;
  own.tokens = read_tokens;
  const auto fresh = [&](const std::string& name, at::IntArrayRef sizes, torch::Device device) {
    return tensor(name, sizes).to(device);
  };
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (auto* mixer = std::get_if<MixerState>(&own.layers[i])) {
      mixer->memory = fresh(prefix(i) + "memory", mixer->memory.sizes(), mixer->memory.device());
      if (mixer->conv.defined()) mixer->conv = fresh(prefix(i) + "conv", mixer->conv.sizes(), mixer->conv.device());
    } else {
      auto& cache = std::get<KeyValueCache>(own.layers[i]);
      auto sizes = cache.keys().sizes().vec();
      sizes[2] = read_tokens;
      const torch::Device device = cache.keys().device();
      cache = KeyValueCache(sizes[0], sizes[1], sizes[3], device);
      const Tensor keys = fresh(prefix(i) + "keys", sizes, device);
      cache.append(keys, fresh(prefix(i) + "values", sizes, device));
    }
  }
  *this = own;
}

}  // namespace efla::nn
