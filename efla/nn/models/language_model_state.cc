#include "efla/nn/models/language_model_state.h"

#include <torch/torch.h>

#include <charconv>
#include <list>
#include <string>

#include "efla/base/error.h"
#include "efla/io/safetensors.h"
#include "efla/nn/named_tensor.h"

namespace efla::nn {
namespace {

using torch::Tensor;

constexpr const char* kFormat = "efla language model state 1";

std::string prefix(std::size_t layer) { return "layers." + std::to_string(layer) + "."; }

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw IoError(IoError::Kind::content, path, -1, what);
}

// A count of the file's metadata.
std::int64_t count_of(const io::SafetensorsFile& file, const char* field) {
  const auto found = file.metadata().find(field);
  std::int64_t count = -1;
  if (found != file.metadata().end()) {
    const char* end = found->second.data() + found->second.size();
    if (std::from_chars(found->second.data(), end, count).ptr != end) count = -1;
  }
  if (count < 0) refuse(file.path(), std::string("its metadata has no count \"") + field + "\"");
  return count;
}

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

void LanguageModelState::save(const std::filesystem::path& path) const {
  std::list<Tensor> held;  // what the entries point into
  std::vector<io::NamedTensor> entries;
  const auto add = [&](const std::string& name, const Tensor& tensor) {
    held.push_back(tensor.contiguous());
    entries.push_back(named_tensor(name, held.back()));
  };
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (const auto* mixer = std::get_if<MixerState>(&layers[i])) {
      add(prefix(i) + "memory", mixer->memory);
      if (mixer->conv.defined()) add(prefix(i) + "conv", mixer->conv);
    } else {
      const auto& cache = std::get<KeyValueCache>(layers[i]);
      add(prefix(i) + "keys", cache.keys());
      add(prefix(i) + "values", cache.values());
    }
  }
  io::write_safetensors(path, entries,
                        {{"format", kFormat}, {"batch", std::to_string(batch)}, {"tokens", std::to_string(tokens)}});
}

void LanguageModelState::load(const std::filesystem::path& path) {
  const io::SafetensorsFile file(path);
  const auto format = file.metadata().find("format");
  if (format == file.metadata().end() || format->second != kFormat) {
    refuse(file.path(),
           std::string("not a state of a language model (its metadata has no format \"") + kFormat + "\")");
  }
  if (count_of(file, "batch") != batch) {
    refuse(file.path(), "is of " + file.metadata().at("batch") + " sequences, expected " + std::to_string(batch));
  }
  LanguageModelState read = *this;
  read.tokens = count_of(file, "tokens");
  std::size_t entries = 0;
  const auto fresh = [&](const std::string& name, at::IntArrayRef sizes) {
    const auto tensor = torch::empty(sizes);
    read_tensor(file, name, tensor);
    ++entries;
    return tensor;
  };
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (auto* mixer = std::get_if<MixerState>(&read.layers[i])) {
      mixer->memory = fresh(prefix(i) + "memory", mixer->memory.sizes());
      if (mixer->conv.defined()) mixer->conv = fresh(prefix(i) + "conv", mixer->conv.sizes());
    } else {
      auto& cache = std::get<KeyValueCache>(read.layers[i]);
      auto sizes = cache.keys().sizes().vec();
      sizes[2] = read.tokens;
      cache = KeyValueCache(sizes[0], sizes[1], sizes[3]);
      cache.append(fresh(prefix(i) + "keys", sizes), fresh(prefix(i) + "values", sizes));
    }
  }
  if (entries != file.tensors().size()) refuse(file.path(), "has tensors of other layers than this model's");
  *this = read;
}

}  // namespace efla::nn
