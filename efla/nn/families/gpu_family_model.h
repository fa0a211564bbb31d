// A language model of a family (family.h) on a GPU. The tokens of many texts go through the layers in one call: tokens
// of prompts by LibTorch's products and efla's operators, decoded tokens by a few kernels per layer, which are replayed
// as a CUDA graph (docs/design/2026-11-cuda-decode.md).
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "efla/nn/families/family_config.h"
#include "efla/nn/families/family_tensors.h"
#include "efla/nn/families/gpu_text_pages.h"
#include "efla/nn/inference/gpu_step.h"
#include "efla/nn/inference/text_run.h"
#include "efla/torch/graph_replay.h"

namespace efla::nn {

// Weights have one type, bfloat16 or float32, and states have float32. Products of prompts round their inputs to the
// type of the weights; decoded tokens are computed in float32. Only one thread may use the object at a time. On the CPU
// it computes the same by references, for tests.
class GpuFamilyModel {
 public:
  // Loads the model of a folder to a device. The type is bfloat16 with WeightType::bfloat16, and with float32 if the
  // folder has its embeddings in bfloat16. Only ids in [0, drawable) may be drawn. Throws IoError for a folder that is
  // not a model of a family, or not a whole one, and Error for weights in integers. kv_cache_type: of keys and values;
  // none: the type of the weights in slots, and float32 outside.
  GpuFamilyModel(const std::filesystem::path& folder, WeightType weights, std::int64_t drawable, torch::Device device,
                 std::optional<KeyValueType> kv_cache_type = {});
  ~GpuFamilyModel();

  const FamilyConfig& config() const { return config_; }
  torch::Device device() const { return device_; }
  std::int64_t parameters() const { return parameters_; }
  std::size_t weight_bytes() const { return static_cast<std::size_t>(parameters_) * torch::elementSize(type_); }
  // Returns the SHA-256 of configuration and tensors.
  std::string fingerprint() const { return tensors_.fingerprint(); }

  std::size_t constant_bytes() const;                             // of a text
  std::size_t page_bytes() const { return pages_.page_bytes(); }  // of kAttentionBlock tokens in a slot
  // Return the type of pages outside of slots, and their bytes.
  KeyValueType kv_cache_type() const { return pages_.outside(); }
  std::size_t outside_page_bytes() const { return pages_.outside_bytes(); }
  // Returns the parts of TextState::constant.
  std::vector<StatePart> state_parts() const { return family_state_parts(config_, plan_); }

  // Do what FamilyModel's functions do.
  void make_slots(std::int64_t slots);
  void clear(std::int64_t slot);
  void set(std::int64_t slot, const TextState& state);
  void copy(std::int64_t from, std::int64_t to, std::int64_t tokens);
  void drop(std::int64_t slot) { pages_.clear(slot); }
  TextState state(std::int64_t slot, std::int64_t tokens);

  // Decodes one token per entry, ids [B] on the device. `begin` tokens of each text precede it. An entry whose slot is
  // −1 has no text, and computes numbers that nobody reads. The next step may overwrite the output.
  struct Entry {
    std::int64_t slot = -1, begin = 0;
  };
  StepOutput step(const torch::Tensor& ids, std::span<const Entry> entries);
  // Reads runs of prompts, ids [T] on the device. Returns the inputs of the head [T, D] float32.
  torch::Tensor read(const torch::Tensor& ids, std::span<const TextRun> runs);
  // Maps inputs of the head [N, D] to logits [N, vocab_size] float32.
  torch::Tensor logits(const torch::Tensor& hidden) const;

 private:
  struct Layer;
  struct Prompts;

  torch::Tensor on_device(const Vector& values) const;
  torch::Tensor packed(std::span<const StoredMatrix> parts) const;
  Layer packed_layer(const LayerTensors& from) const;

  void load_kernels();
  std::vector<torch::Tensor> held() const;
  torch::Tensor decode(const torch::Tensor& ids, const torch::Tensor& entries) const;
  torch::Tensor mix_step(const Layer& layer, const torch::Tensor& x, const torch::Tensor& slots) const;
  torch::Tensor composed_step(const Layer& layer, const Projected& projected, const torch::Tensor& slots) const;
  torch::Tensor attend_step(const Layer& layer, const torch::Tensor& qkv, const torch::Tensor& entries) const;

  torch::Tensor mix(const Layer& layer, const torch::Tensor& h, const Prompts& prompts) const;
  torch::Tensor convolve(const Layer& layer, const torch::Tensor& projected, const Prompts& prompts) const;
  torch::Tensor attend(const Layer& layer, const torch::Tensor& h, const Prompts& prompts) const;
  torch::Tensor rotate(const torch::Tensor& heads, const Prompts& prompts) const;
  void copy_tokens(const Layer& layer, bool to_pages, const torch::Tensor& slots, const torch::Tensor& positions,
                   const torch::Tensor& keys, const torch::Tensor& values) const;
  torch::Tensor apply_mlp(const Layer& layer, const torch::Tensor& h) const;

  FamilyConfig config_;
  MixerPlan plan_;
  FamilyTensors tensors_;
  torch::Device device_;
  torch::ScalarType type_ = torch::kFloat;
  std::int64_t drawable_, parameters_ = 0;
  torch::Tensor embeddings_, norm_, head_;
  std::vector<Layer> layers_;
  GpuTextPages pages_;
  torch::Tensor arrivals_;  // of attention_step
  libtorch::GraphReplay graph_;
};

}  // namespace efla::nn
