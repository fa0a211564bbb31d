// Advances a session's text by its pending ids and draws the next ones.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "efla/base/view.h"
#include "efla/generate/prompt_lookup.h"
#include "efla/generate/sampler.h"
#include "efla/generate/session.h"
#include "efla/nn/inference/gpu_decoder.h"
#include "efla/nn/inference/inference_model.h"
#include "efla/nn/models/language_model.h"

namespace efla::generate {

// Draws the next id of a session from logits [vocab_size]. The id becomes the session's only pending id.
std::int64_t draw(std::span<const float> logits, Session& session, const SamplingOptions& options);

// Throws Error if a session has no pending id.
void require_pending(const Session& session);

// Draws an id in [0, limit) after each row of logits, on their device, for each row whose session is not null. The id
// becomes the session's pending one, and `drawn` is called with row and id, before the next row. output.likeliest may
// be undefined. `go_on`, if given, is called with the ids [B] on their device before the host reads them: it can launch
// the next step, which may overwrite the output. Throws std::runtime_error at the first row for which sample throws.
void draw_rows(const nn::GpuDecoder::Output& output, std::span<Session* const> sessions, const SamplingOptions& options,
               std::int64_t limit, const std::function<void(std::size_t row, std::int64_t id)>& drawn,
               const std::function<void(const torch::Tensor& ids)>& go_on = {});

// Advances a session's state by its pending ids. With an InferenceModel the session's state is out of date until the
// destructor of this object copies the new state back.
class Advance {
 public:
  // Computes with `inference`, if given, otherwise with the model and, if given, its decoder. All must outlive the
  // object.
  Advance(const nn::LanguageModel& model, nn::InferenceModel* inference, const nn::GpuDecoder* decoder,
          Session& session);
  ~Advance();
  Advance(const Advance&) = delete;
  Advance& operator=(const Advance&) = delete;

  // Computes all pending ids (a prompt's unless `decode`) and draws the next one in [0, limit), which becomes pending.
  // Throws Error if nothing is pending. `ahead`: a decoder also computes the step after the drawn id, so that at the
  // end the state may already have seen the pending id.
  std::int64_t draw(const SamplingOptions& options, std::int64_t limit, bool decode, bool ahead = false);

  // Computes the first `count` pending ids (a prompt's unless `decode`). Returns the logits [vocab_size] after them.
  torch::Tensor take(std::size_t count, bool decode);

  // Drafts at most `most` tokens after the pending one; none without an InferenceModel.
  std::span<const std::int32_t> draft(std::span<const std::int32_t> prompt, std::span<const std::int32_t> reply,
                                      std::int64_t most);
  // Computes the pending id and the draft. Returns the logits [1 + draft, vocab_size] after each of these tokens.
  torch::Tensor take_draft();
  // Advances the state by the pending id and the draft's first tokens, `tokens` in all.
  void accept(std::size_t tokens);

 private:
  std::int64_t draw_by_decoder(const SamplingOptions& options, std::int64_t limit, bool ahead);
  void compute_logits(std::int64_t first, std::int64_t count);
  View<float, 2> rows(std::int64_t count, std::int64_t columns);

  const nn::LanguageModel& model_;
  nn::InferenceModel* inference_;
  const nn::GpuDecoder* decoder_;
  Session& session_;
  std::optional<nn::StatePool> states_;
  std::vector<float> hidden_;
  torch::Tensor logits_;
  PromptLookup lookup_;
  std::vector<nn::Draft> drafts_;
  std::optional<nn::GpuDecoder::Output> ahead_;  // after the pending id
};

}  // namespace efla::generate
