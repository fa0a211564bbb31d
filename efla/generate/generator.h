// Text from a language model: prompts are taken in by chunks, then token after token with a state of constant size.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/data/tokenizer.h"
#include "efla/generate/sampler.h"
#include "efla/generate/session.h"
#include "efla/nn/models/language_model.h"

namespace efla::generate {

// Takes in the session's pending ids and draws the next, in [0, limit), which is pending then. Throws Error where
// nothing is pending.
std::int64_t next_id(const nn::LanguageModel& model, Session& session, const SamplingOptions& options,
                     std::int64_t limit);

struct ReplyOptions {
  SamplingOptions sampling = {};
  std::int64_t max_tokens = 0;
  std::vector<std::string> stop = {};  // UTF-8; the text goes up to the first of them and no further
  bool to_be_continued = false;  // what could be the start of a character or of a stop string stays in the session
  std::function<void(std::string_view)> on_text = {};  // gets the text piece by piece, each of them UTF-8
  std::function<bool()> interrupted = {};              // asked before every token and every 16384 tokens of a prompt
};

// Throws Error, naming the option as the command line does.
void validate(const ReplyOptions& options);

enum class ReplyEnd { max_tokens, end_of_text, stop_string, interrupted };
std::string_view name_of(ReplyEnd end);

struct Reply {
  std::string text;
  std::vector<std::int32_t> ids;  // drawn, an end of the text included
  ReplyEnd end = ReplyEnd::max_tokens;
  std::int64_t prefill_tokens = 0, decode_tokens = 0;  // taken in: of the prompt, and of the reply
  double prefill_ms = 0.0, decode_ms = 0.0;
};

class Generator {
 public:
  // Both must outlive it. Throws Error where the tokenizer has ids that the model has not.
  Generator(const nn::LanguageModel& model, const data::Tokenizer& tokenizer);

  // The ids of a prompt, with bos behind the id that begins a text where the session holds none. Throws Error for a
  // prompt that is not UTF-8, and where there is no such id.
  std::vector<std::int32_t> encode(const Session& session, std::string_view prompt, bool bos) const;

  // Goes on with the session's text, after a prompt where one is given. Throws Error for options that do not fit and
  // where there is neither a prompt nor a text to go on with.
  Reply reply(Session& session, std::span<const std::int32_t> prompt, const ReplyOptions& options) const;

 private:
  void prefill(Session& session, const ReplyOptions& options, Reply& reply) const;

  const nn::LanguageModel& model_;
  const data::Tokenizer& tokenizer_;
  std::int64_t bos_, eos_;  // the tokenizer's, or else the model's; −1: none
};

}  // namespace efla::generate
