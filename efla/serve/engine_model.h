// What the engine computes with: a model, and the states of texts in slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "efla/base/threads.h"
#include "efla/base/view.h"
#include "efla/generate/batch_sampler.h"
#include "efla/nn/inference/inference_model.h"
#include "efla/nn/models/language_model.h"

namespace efla::serve {

// An id, and the largest logit of its row after the penalty.
struct DrawnId {
  std::int32_t id;
  double largest;
};

// Only one thread may use the object at a time; threads may share the functions that are const.
class EngineModel {
 public:
  virtual ~EngineModel() = default;

  virtual const nn::LanguageModelConfig& config() const = 0;
  // Returns the bytes of the weights in the process's memory, not on a GPU.
  virtual std::size_t weight_bytes() const = 0;
  // Returns the parts of a state, one after the other without gaps.
  virtual std::vector<nn::StatePart> state_parts() const = 0;
  // Returns the bytes that the state of a running text takes, on a GPU with its row in the tensors of decode steps.
  virtual std::size_t slot_bytes() const = 0;
  // Returns whether slots lie on a GPU.
  virtual bool on_gpu() const = 0;

  // Makes the slots, once, before the functions that follow.
  virtual void make_slots(std::int64_t slots) = 0;
  // Set the state in a slot: to zeros, to the state that `write` writes, and to the state of another slot.
  virtual void clear(std::int64_t slot) = 0;
  virtual void set(std::int64_t slot, const std::function<void(std::span<float> state)>& write) = 0;
  virtual void copy(std::int64_t from, std::int64_t to) = 0;
  // Says that the state in a slot is not needed any more.
  virtual void drop(std::int64_t slot) = 0;
  // Returns the state in a slot.
  virtual std::vector<float> state(std::int64_t slot) = 0;

  // Advances the texts of the runs, as InferenceModel::advance does. On a GPU there are no drafts.
  virtual void advance(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs, ThreadPool& pool) = 0;
  // Returns the logits [rows, vocab_size] after some of the ids of the last advance; `rows` has the numbers of these
  // ids in its list. The caller may change the logits, which are valid until the next call.
  virtual View<float, 2> logits(std::span<const std::int64_t> rows, ThreadPool& pool) = 0;
  // Draws a token after each of some ids of the last advance, as sample_rows does from the first `drawable` logits;
  // `rows` is as in logits. Only where on_gpu(). With `ahead` all ids of the last advance were decoded, and `rows` has
  // them all: then the GPU also begins to decode the drawn tokens, before the function waits for them. The next advance
  // that decodes must decode these tokens, of some of the texts and of no other text, unless none of them goes on. The
  // state of these texts must not be read before.
  virtual std::vector<DrawnId> draw(std::span<const std::int64_t> rows, std::span<const generate::Draw> draws,
                                    const generate::SamplingOptions& options, std::int64_t drawable, bool ahead) = 0;
  // Advances the text of draft number `draft` of the last advance by the draft's first `tokens` tokens.
  virtual void accept(std::size_t draft, std::int64_t tokens, ThreadPool& pool) = 0;
};

// Takes the weights of a model on the CPU. Throws Error for a model that InferenceModel refuses.
std::unique_ptr<EngineModel> make_cpu_engine_model(const nn::LanguageModel& model, nn::WeightType weights);

// Computes by GpuDecoder with a model on a GPU, whose weights already have the values of the type. Throws Error for
// layers of softmax attention, and for weights in int8.
std::unique_ptr<EngineModel> make_gpu_engine_model(std::shared_ptr<const nn::LanguageModel> model,
                                                   nn::WeightType weights);

}  // namespace efla::serve
