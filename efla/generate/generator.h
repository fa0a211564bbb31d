// Generates text with a language model: prefills the prompt in pieces, then decodes with a state of constant size.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/generate/sampler.h"
#include "efla/generate/session.h"
#include "efla/nn/inference/gpu_decoder.h"
#include "efla/nn/inference/inference_model.h"
#include "efla/nn/models/language_model.h"

namespace efla::generate {

struct ReplyOptions {
  SamplingOptions sampling = {};
  std::int64_t max_tokens = 0;
  std::vector<std::string> stop = {};  // UTF-8; the text ends before the first of them (reply_text.h)
  // With an InferenceModel: most tokens that are drafted from repetitions in prompt and reply, and computed together
  // with the next one. The reply is the same for any number, 0 to 7.
  std::int64_t draft_tokens = 7;
  bool to_be_continued = false;  // keep the possible start of a character or of a stop string in the session
  bool ends_session = false;     // the session is not used again: a decoder may compute a token too many
  std::function<void(std::string_view)> on_text = {};  // called for each piece of text; every piece is UTF-8
  std::function<bool()> interrupted = {};              // called before every step and every 16384 tokens of a prompt
};

// Throws Error that names the option.
void validate(const ReplyOptions& options);

enum class ReplyEnd { max_tokens, end_of_text, stop_string, interrupted };
std::string_view name_of(ReplyEnd end);

struct Reply {
  std::string text;
  std::vector<std::int32_t> ids;  // the ids drawn, including the end of the text
  ReplyEnd end = ReplyEnd::max_tokens;
  std::int64_t prefill_tokens = 0, decode_tokens = 0;  // tokens of the prompt and of the reply that the state has seen
  std::int64_t drafted_tokens = 0, accepted_tokens = 0;  // tokens of drafts: all, and drawn by the reply
  double prefill_ms = 0.0, decode_ms = 0.0;
};

class Advance;

class Generator {
 public:
  // All arguments must outlive the generator. `inference` and `decoder`, if given, must be made from the model, the
  // decoder for the tokenizer's ids; the generator then computes with them. Throws Error if the tokenizer has ids that
  // the model does not have.
  Generator(const nn::LanguageModel& model, const data::Tokenizer& tokenizer, nn::InferenceModel* inference = nullptr,
            const nn::GpuDecoder* decoder = nullptr);

  // Returns the ids of a prompt, with the id that starts a text before them if `bos` and the session is empty. Throws
  // Error if the prompt is not UTF-8 or there is no such id.
  std::vector<std::int32_t> encode(const Session& session, std::string_view prompt, bool bos) const;

  // Continues the session's text, after a prompt if one is given. Throws Error for invalid options and if there is
  // neither a prompt nor a text to continue.
  Reply reply(Session& session, std::span<const std::int32_t> prompt, const ReplyOptions& options) const;

  // Returns whether `replies` can continue texts: it needs a decoder.
  bool continues_together() const { return decoder_ != nullptr; }
  // Continues several sessions' texts, each after its prompt, one token of every text per step. Only the texts are
  // continued: the sessions' states stay those after the prompts. The time of a step is divided among its texts. Calls
  // complete(i, reply) in the order of the texts, as soon as text i and all texts before it are complete. If an error
  // ends the other texts, throws it after the calls for all complete texts.
  void replies(std::span<Session> sessions, std::span<const std::vector<std::int32_t>> prompts,
               const ReplyOptions& options, const std::function<void(std::size_t, const Reply&)>& complete) const;

 private:
  class Progress;
  class Writer;
  void continue_alone(Session& session, Progress& progress, const ReplyOptions& options, std::int64_t count) const;
  std::int64_t continue_draft(Advance& advance, Session& session, Progress& progress,
                              std::span<const std::int32_t> draft, const ReplyOptions& options) const;
  void prefill_packed(std::span<Session> sessions, std::span<const std::unique_ptr<Progress>> all,
                      const ReplyOptions& options) const;
  void continue_together(std::span<Session> sessions, std::span<const std::unique_ptr<Progress>> all,
                         const ReplyOptions& options, const std::function<void()>& end_complete) const;
  void prefill(Advance& advance, Session& session, const ReplyOptions& options, Reply& reply) const;

  const nn::LanguageModel& model_;
  const data::Tokenizer& tokenizer_;
  nn::InferenceModel* inference_;
  const nn::GpuDecoder* decoder_;
  std::int64_t bos_;  // the tokenizer's, otherwise the model's; −1: none
  std::vector<std::int32_t> ends_;
};

}  // namespace efla::generate
