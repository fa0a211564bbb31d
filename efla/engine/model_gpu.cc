#include <torch/types.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "efla/base/error.h"
#include "efla/engine/model_steps.h"
#include "efla/nn/inference/gpu_decoder.h"
#include "efla/torch/tensor_copies.h"

namespace efla::engine {
namespace {

using libtorch::TensorCopies;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

// A decode step computes the first rows of one tensor per layer, as many as the next power of two, because each number
// of rows has a CUDA graph of its own. So a text's state moves from its slot to one of these rows when the text is
// decoded first, and back when it is not decoded any more. A row without a text computes numbers that nobody reads.
class GpuModel final : public StepModel {
 public:
  GpuModel(std::shared_ptr<const nn::LanguageModel> model, nn::WeightType weights, std::int64_t drawable)
      : model_(std::move(model)), decoder_(*model_, weights, drawable) {
    const auto state = model_->initial_state(1);
    std::size_t offset = 0;
    for (const auto& [name, tensor] : state.tensors()) {
      const auto floats = static_cast<std::size_t>(tensor.numel());
      parts_.push_back({name, tensor.sizes().vec(), offset, floats});
      offset += floats;
    }
    floats_ = offset;
  }

  const nn::LanguageModelConfig& config() const override { return model_->config(); }
  Capabilities capabilities() const override { return {.in_process = false, .draws = true}; }
  std::size_t weight_bytes() const override { return bytes_of(*model_); }
  TextMemory text_memory() const override { return {.constant = 2 * floats_ * sizeof(float)}; }
  StateLayout layout(std::int64_t /*tokens*/) const override { return {.parts = parts_}; }

  void make_slots(std::int64_t slots, std::int64_t /*pages*/) override {
    slots_ = tensors_of(model_->initial_state(slots));
    rows_ = model_->initial_state(slots);
    row_of_.assign(static_cast<std::size_t>(slots), -1);
  }

  void clear(std::int64_t slot) override {
    drop(slot);
    at::_foreach_zero_(slot_tensors(slot));
  }

  void set(std::int64_t slot, const nn::TextState& given) override {
    const auto state = torch::tensor(at::ArrayRef<float>(*given.constant)).to(device());
    drop(slot);
    TensorCopies copies;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const Tensor to = slots_[i][slot];
      copies.add(state.narrow(0, static_cast<std::int64_t>(parts_[i].offset), to.numel()).view(to.sizes()), to);
    }
    copies.make();
  }

  void copy(std::int64_t from, std::int64_t to, std::int64_t /*tokens*/) override {
    drop(to);
    TensorCopies copies;
    copies.add(current(from), slot_tensors(to));
    copies.make();
  }

  void drop(std::int64_t slot) override {
    auto& row = row_of_[static_cast<std::size_t>(slot)];
    if (row >= 0) slot_of_[static_cast<std::size_t>(row)] = -1;
    row = -1;
  }

  nn::TextState state(std::int64_t slot, std::int64_t tokens) override {
    std::vector<Tensor> parts;
    for (const auto& tensor : current(slot)) parts.push_back(tensor.flatten());
    const auto all = torch::cat(parts).to(torch::kCPU);
    const float* floats = all.data_ptr<float>();
    return {tokens, std::make_shared<std::vector<float>>(floats, floats + all.numel())};
  }

 private:
  torch::Device device() const override { return model_->head().device(); }

  // Returns tensors in the order of parts_, as all functions do that return Tensors.
  static Tensors tensors_of(const nn::LanguageModelState& state) {
    Tensors all;
    for (const auto& layer : state.layers) {
      const auto& mixer = std::get<nn::MixerState>(layer);
      all.push_back(mixer.memory);
      if (mixer.conv.defined()) all.push_back(mixer.conv);
    }
    return all;
  }

  // Returns a state with these tensors, for models whose layers do not depend on the number of tokens.
  nn::LanguageModelState state_of(const Tensors& tensors, std::int64_t batch) const {
    nn::LanguageModelState state{batch, 0, rows_.layers};
    auto next = tensors.begin();
    for (auto& layer : state.layers) {
      auto& mixer = std::get<nn::MixerState>(layer);
      mixer.memory = *next++;
      if (mixer.conv.defined()) mixer.conv = *next++;
    }
    return state;
  }

  static Tensors elements(const Tensors& tensors, std::int64_t index) {
    Tensors state;
    for (const auto& tensor : tensors) state.push_back(tensor[index]);
    return state;
  }

  Tensors slot_tensors(std::int64_t slot) const { return elements(slots_, slot); }

  // Returns the tensors of a text's state where they are.
  Tensors current(std::int64_t slot) const {
    const auto row = row_of_[static_cast<std::size_t>(slot)];
    return row < 0 ? slot_tensors(slot) : elements(tensors_of(rows_), row);
  }

  // Copies the states of texts that are not among these runs from their rows to their slots.
  void leave_rows(std::span<const nn::TextRun> staying) override {
    TensorCopies copies;
    for (const auto slot : std::vector(slot_of_)) {
      const auto is_own = [&](const nn::TextRun& run) { return run.slot == slot; };
      if (slot < 0 || std::ranges::any_of(staying, is_own)) continue;
      copies.add(current(slot), slot_tensors(slot));
      drop(slot);
    }
    copies.make();
  }

  // Moves the states of these runs to the first rows, as many as the smallest graph for them has. Returns this number.
  std::int64_t take_rows(std::span<const nn::TextRun> runs) override {
    std::int64_t count = 1;
    while (std::cmp_less(count, runs.size())) count = std::min<std::int64_t>(2 * count, std::ssize(row_of_));
    const auto all = tensors_of(rows_);
    slot_of_.resize(std::max(slot_of_.size(), static_cast<std::size_t>(count)), -1);
    std::int64_t free = 0;
    TensorCopies copies;
    for (const auto& run : runs) {
      auto& row = row_of_[static_cast<std::size_t>(run.slot)];
      if (row >= 0 && row < count) continue;
      while (slot_of_[static_cast<std::size_t>(free)] >= 0) ++free;
      copies.add(current(run.slot), elements(all, free));
      drop(run.slot);
      row = free;
      slot_of_[static_cast<std::size_t>(free)] = run.slot;
    }
    copies.make();
    slot_of_.resize(static_cast<std::size_t>(count));
    return count;
  }

  nn::StepOutput step(const Tensor& ids) override {
    const std::int64_t count = ids.size(0);
    auto& state = first_rows_[count];
    if (state.batch == 0) {
      Tensors first;
      for (const auto& tensor : tensors_of(rows_)) first.push_back(tensor.narrow(0, 0, count));
      state = state_of(first, count);
    }
    return decoder_.step_drawn(ids, state);
  }

  std::int64_t row_of(std::int64_t slot) const override { return row_of_[static_cast<std::size_t>(slot)]; }

  Tensor head(const Tensor& hidden) const override { return decoder_.logits(hidden); }

  // Reads all runs in one call.
  Tensor read(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs) override {
    std::vector<std::int64_t> ends{0};
    Tensors before;
    for (const auto& tensor : slots_) {
      auto shape = tensor.sizes().vec();
      shape[0] = std::ssize(runs);
      before.push_back(torch::empty(shape, tensor.options()));
    }
    TensorCopies from_slots, to_slots;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      ends.push_back(ends.back() + runs[i].tokens);
      from_slots.add(slot_tensors(runs[i].slot), elements(before, static_cast<std::int64_t>(i)));
    }
    from_slots.make();
    auto state = state_of(before, std::ssize(runs));
    const auto hidden =
        decoder_.advance_packed(on_device({ids.begin(), ids.end()}).unsqueeze(0), on_device(ends), state);
    const auto after = tensors_of(state);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      to_slots.add(elements(after, static_cast<std::int64_t>(i)), slot_tensors(runs[i].slot));
    }
    to_slots.make();
    return hidden[0];
  }

  std::shared_ptr<const nn::LanguageModel> model_;
  nn::GpuDecoder decoder_;
  std::vector<nn::StatePart> parts_;
  std::size_t floats_ = 0;
  Tensors slots_;                                              // [slots, ...]
  nn::LanguageModelState rows_;                                // of as many rows
  std::vector<std::int64_t> row_of_, slot_of_;                 // of a slot, and of a row; −1: none
  std::map<std::int64_t, nn::LanguageModelState> first_rows_;  // of rows_, by their number, with their CUDA graphs
};

}  // namespace

std::unique_ptr<EngineModel> make_gpu_model(std::shared_ptr<const nn::LanguageModel> model, nn::WeightType weights,
                                            std::int64_t drawable) {
  if (model->config().has_attention()) {
    throw Error("engine", "model", "layers of softmax attention", "a state of constant size");
  }
  return std::make_unique<GpuModel>(std::move(model), weights, drawable);
}

}  // namespace efla::engine
