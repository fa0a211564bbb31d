// What the engine computes with: a model, and the states of texts in slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "efla/base/threads.h"
#include "efla/base/view.h"
#include "efla/engine/batch_sampler.h"
#include "efla/engine/session_format.h"
#include "efla/nn/families/family_model.h"
#include "efla/nn/families/gpu_family_model.h"
#include "efla/nn/inference/gpu_decoder.h"
#include "efla/nn/inference/inference_model.h"
#include "efla/nn/models/language_model.h"

namespace efla::engine {

// The memory that a running text takes: a constant part, and pages that grow with the text.
struct TextMemory {
  std::size_t constant = 0;      // bytes for any length
  std::size_t page = 0;          // bytes of a page; 0: the model needs none
  std::int64_t page_tokens = 1;  // tokens of a page

  // Return the pages of a running text of this many tokens, of these the ones that never change, and the bytes.
  std::int64_t pages(std::int64_t tokens) const { return page == 0 ? 0 : (tokens + page_tokens - 1) / page_tokens; }
  std::int64_t full_pages(std::int64_t tokens) const { return page == 0 ? 0 : tokens / page_tokens; }
  std::size_t bytes(std::int64_t tokens) const { return constant + static_cast<std::size_t>(pages(tokens)) * page; }
};

// What a model can do, as the schedule needs to know it.
struct Capabilities {
  bool in_process = true;          // slots and weights lie in the process's memory, not in a GPU's
  bool draws = false;              // has EngineModel::draw
  std::int64_t most_drafted = 0;   // tokens of a draft, which are computed together with the token before them
  std::int64_t most_drafting = 0;  // texts in a step beyond which drafts cost more than they save
  std::int64_t cut_tokens = nn::kCutTokens;  // a prompt may be cut at multiples of this many tokens of the text
};

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
  virtual Capabilities capabilities() const = 0;
  // Return the bytes of the weights, and of the memory that holds them and the slots: what the process may use, or what
  // a GPU has.
  virtual std::size_t weight_bytes() const = 0;
  virtual double memory_bytes() const;
  // Returns the memory of a running text, on a GPU with its row in the tensors of decode steps.
  virtual TextMemory text_memory() const = 0;
  // Returns the layout of a state after this many tokens. A model that computes on a GPU has the layout of the same
  // model on a CPU, so that a session can move between both.
  virtual StateLayout layout(std::int64_t tokens) const = 0;

  // Makes the slots, once, before the functions that follow. pages: the most pages, of the size of text_memory(), that
  // the texts in them fill together; a page that several texts share, by `set` or `copy`, counts once.
  virtual void make_slots(std::int64_t slots, std::int64_t pages) = 0;
  // Set the state in a slot: to the state of an empty text, to a state outside of slots, and to the state in another
  // slot, which has seen this many tokens.
  virtual void clear(std::int64_t slot) = 0;
  virtual void set(std::int64_t slot, const nn::TextState& state) = 0;
  virtual void copy(std::int64_t from, std::int64_t to, std::int64_t tokens) = 0;
  // Says that the state in a slot is not needed any more.
  virtual void drop(std::int64_t slot) = 0;
  // Returns the state in a slot, which has seen this many tokens. Its pages lie in the process's memory. A page that
  // the slot got from `set` or `copy`, or that an earlier call has returned, is returned as the same object, because
  // whatever holds states counts each page once.
  virtual nn::TextState state(std::int64_t slot, std::int64_t tokens) = 0;

  // Advances the texts of the runs, as InferenceModel::advance does, with drafts as capabilities() says.
  virtual void advance(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs, ThreadPool& pool) = 0;
  // Returns the logits [rows, vocab_size] after some of the ids of the last advance; `rows` has the numbers of these
  // ids in its list. The caller may change the logits, which are valid until the next call.
  virtual View<float, 2> logits(std::span<const std::int64_t> rows, ThreadPool& pool) = 0;
  // Draws a token after each of some ids of the last advance, as sample_rows does from the first `drawable` logits;
  // `rows` is as in logits. With `ahead` all ids of the last advance were decoded, and `rows` has them all: then the
  // model also begins to decode the drawn tokens, before the function waits for them. The next advance that decodes
  // must decode these tokens, of some of the texts and of no other text, unless none of them goes on. The state of
  // these texts must not be read before. Throws Error where capabilities() say that the model does not draw.
  virtual std::vector<DrawnId> draw(std::span<const std::int64_t> rows, std::span<const Draw> draws,
                                    const SamplingOptions& options, std::int64_t drawable, bool ahead);
  // Drafts the `most` likeliest tokens after `id`, which follows the text in a slot, of this many tokens. The state
  // does not change. Throws Error where the model has no head for drafts.
  virtual std::vector<std::int32_t> draft(std::int64_t slot, std::int64_t tokens, std::int32_t id, std::int64_t most,
                                          ThreadPool& pool);
  // Advances the text of draft number `draft` of the last advance by the draft's first `tokens` tokens. Throws Error
  // where capabilities() say that the model takes no drafts.
  virtual void accept(std::size_t draft, std::int64_t tokens, ThreadPool& pool);
};

// Takes the weights of a model on the CPU. Throws Error for a model that InferenceModel refuses.
std::unique_ptr<EngineModel> make_cpu_model(const nn::LanguageModel& model, nn::WeightType weights);

// Computes by GpuDecoder with a model on a GPU, whose weights already have the values of the type. Throws Error for
// layers of softmax attention, and for weights in integers. drawable: ids that may be drawn.
std::unique_ptr<EngineModel> make_gpu_model(std::shared_ptr<const nn::LanguageModel> model, nn::WeightType weights,
                                            std::int64_t drawable);

// Computes with LibTorch's operators, on the model's device and with its present weights: any model, also one that is
// being trained. decoder: made from the model, for a GPU; without it the model draws no tokens.
std::unique_ptr<EngineModel> make_torch_model(std::shared_ptr<const nn::LanguageModel> model,
                                              std::shared_ptr<const nn::GpuDecoder> decoder = nullptr);

// Computes with a model of a family, whose texts take pages. weights: with which the model was loaded.
std::unique_ptr<EngineModel> make_family_model(std::shared_ptr<nn::FamilyModel> model, nn::WeightType weights);
std::unique_ptr<EngineModel> make_family_model(std::shared_ptr<nn::GpuFamilyModel> model);

// Returns what the engine reads of the configuration of a model of a family.
nn::LanguageModelConfig engine_config(const nn::FamilyConfig& config);

// Returns the SHA-256 of a model's configuration and weights.
std::string fingerprint(const nn::LanguageModel& model);

}  // namespace efla::engine
