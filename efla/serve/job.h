// A request in progress.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/generate/batch_sampler.h"
#include "efla/generate/prompt_lookup.h"
#include "efla/generate/reply_text.h"
#include "efla/generate/sampler.h"
#include "efla/serve/engine.h"
#include "efla/serve/sampling.h"
#include "efla/serve/session_store.h"

namespace efla::serve {

// What one row of logits gave: the token that was drawn and what was scored.
struct Outcome {
  ScoredId id;
  std::vector<ScoredId> alternatives;
  std::string error = {};  // instead of a token
  bool no_memory = false;  // the cause of the error

  // Makes this the outcome of an exception.
  void fail(const std::exception& failure) noexcept;
};

// Returns the record of a text after more ids: which ids occurred, and which were the last.
generate::SessionRecord extended(generate::SessionRecord record, std::span<const std::int32_t> ids,
                                 const data::Tokenizer& tokenizer);

// Returns how many slots a request needs: two if its stored text ends before a stop string of the reply, because a stop
// string may begin several tokens before it is complete. The second slot has the state before its first token.
inline std::int64_t slots_of(const Request& request) {
  return request.end_turn && !request.save_as.empty() && !request.stop.empty() ? 2 : 1;
}

// How the ids that a rewind computes again were first computed: the first ones were prefilled, the next ones decoded,
// and the others prefilled.
struct Replay {
  std::size_t prefilled = 0, decoded = 0;
  std::uint64_t drawn = 0;  // the stored record's counter
};

class Job {
 public:
  // from: the text that the prompt continues, or null. replay: of a rewind, whose prompt is ids to compute again.
  Job(RequestId id, Request request, std::shared_ptr<Listener> listener, std::shared_ptr<const StoredText> from,
      const std::optional<Replay>& replay, const data::Tokenizer& tokenizer, std::int64_t vocab_size);

  const RequestId id;
  Request request;  // without the prompt, which ids() has
  const Clock::time_point submitted = Clock::now();

  // Returns the ids before the reply that the state has not seen at the start: pending ids, then the prompt. All are
  // prefilled, except that a pending id without a prompt is decoded, and that without a reply the last id stays
  // pending. A rewind decodes the ids that were drawn. After close() returns the ids at the end of the stored text that
  // the state has not seen; the last one stays pending.
  const std::vector<std::int32_t>& ids() const { return ids_; }
  const std::shared_ptr<const StoredText>& from() const { return from_; }

  // What the schedule knows; for the engine's thread only.
  std::int64_t slot = -1;                // −1: in the queue
  std::int64_t kept_slot = -1;           // of a request with two slots, for the state before a token of the reply
  std::size_t ids_fed = 0;               // ids that the state has seen
  std::uint64_t last_served = 0;         // when its last piece was scheduled
  std::vector<std::string> beginnings;   // names of the prompt's beginnings (prefix_cache.h)
  std::vector<std::size_t> store_after;  // beginnings whose states go to the cache
  std::int64_t cached_tokens = 0;        // of the prompt, found in the cache
  bool begun = false;                    // whether a GPU decodes the token that was drawn last
  std::optional<FinishReason> ended;
  std::string error;
  bool no_memory = false;  // the cause of the error

  bool closing() const { return closing_; }
  bool draws() const { return request.max_tokens > 0 && !closing_; }
  bool decodes() const { return ids_fed >= prefill_size(); }
  std::size_t prefill_size() const;  // of ids that are prefilled
  std::size_t prefill_end() const;   // where the ids end that can be prefilled together
  bool replays() const;              // whether the next of ids() is decoded, because it was drawn
  std::int32_t next_id() const { return replays() ? ids_[ids_fed] : reply_.empty() ? ids_.back() : reply_.back(); }
  std::int64_t state_tokens() const;  // tokens of the text that the state has seen
  void count_decoded(std::int64_t tokens);

  // Drafts at most `most` tokens to follow next_id(), by prompt lookup.
  std::span<const std::int32_t> draft(std::int64_t most);
  // Returns whether the tokens drawn in this step are the draft's first tokens, so that one more may be drawn.
  bool follows_draft() const;
  bool drafting() const { return drafting_; }
  // Ends the draft before the token that was drawn last, so that the state before this token can be kept.
  void cut_draft() { lookup_.cut(drawn_ - 1); }
  // Returns how many tokens were drawn in this step, and adapts the length of later drafts to this number.
  std::int64_t end_draft();

  // Returns the token whose logprob the row of logits after ids()[index] gives with echo, or nothing.
  std::optional<std::int32_t> echoed(std::size_t index) const;

  // Returns what decides the next token besides its logits; nothing if the request needs the logits themselves: for
  // log-probabilities, a bias, or penalties for tokens of the reply.
  std::optional<generate::Draw> plain_draw() const;
  // Returns whether the next token is the last one that the request allows.
  bool draws_last() const { return std::ssize(reply_) + 1 >= request.max_tokens; }
  // Draws the next token, or scores a token of the prompt. An exception becomes the outcome. Not for several threads at
  // once.
  Outcome outcome_of(std::span<float> logits, std::int64_t drawable, std::optional<std::int32_t> scored) noexcept;

  // Passes results on to the listener, and sets `ended`.
  void begin_echo();
  void take_echo(const Outcome& outcome);
  void flush_echo();
  void take(const Outcome& outcome, std::span<const std::int32_t> ends);
  // Returns whether a stop string may begin in the token drawn last, so that the state before this token must be kept.
  bool must_keep_state() const;
  // Says that the state before the token drawn last is kept.
  void note_kept_state();

  // Returns whether the reply has ended and the stored text does not end yet as Request::end_turn says.
  bool must_close() const;
  // Makes ids() the end of the stored text, and unsets `ended` if any of them must be prefilled. Returns which state is
  // before these ids.
  enum class Before { current, kept, from };  // `from`: the state after from(), or zeros
  Before close();
  // Returns the reason for the end of a request whose ids are prefilled.
  FinishReason reason() const { return reason_; }

  // These functions end the request because of an error.
  void fail(const std::exception& failure) noexcept;
  void fail(const Outcome& outcome);

  // Calls the listener's finish. Without memory for the call, the listener is only destroyed.
  void finish();

  // Returns the text after the reply with this state.
  std::shared_ptr<StoredText> stored(std::shared_ptr<StoredState> state) const;
  // Returns the bytes of memory that stored() will take besides the state, without the ids of the reply.
  std::size_t record_bytes() const;

  Usage usage() const;
  double queue_ms = 0.0, first_token_ms = 0.0;
  std::optional<Clock::time_point> last_token = {};

 private:
  std::span<const std::int32_t> remembered(std::span<const std::int32_t> ids);
  Outcome draw(std::span<float> logits, std::int64_t drawable);
  Outcome score(std::span<const float> logits, std::int64_t drawable, std::int32_t id) const;
  std::size_t kept_reply(std::string& rest) const;
  template <class F>
  void call(F&& f);

  std::shared_ptr<Listener> listener_;
  std::shared_ptr<const StoredText> from_;
  const std::optional<Replay> replay_;
  const data::Tokenizer& tokenizer_;
  std::size_t prompt_tokens_;
  std::vector<std::int32_t> ids_, reply_;
  std::size_t decoded_ = 0;  // ids that the state has seen by decoding
  generate::PromptLookup lookup_;
  std::size_t drawn_ = 0;  // tokens drawn in this step
  bool drafting_ = false;
  bool kept_ = false;        // whether a state is kept
  std::size_t kept_at_ = 0;  // ids of the reply that this state has seen
  FinishReason reason_ = FinishReason::length;
  bool closing_ = false;
  // After close(): the ids of the stored text that follow `from`, how many of them are before ids(), and how many were
  // prefilled before the reply.
  std::vector<std::int32_t> since_;
  std::size_t before_ = 0, prefilled_ = 0;
  generate::SeenIds seen_;
  IdCounts counts_;
  std::vector<std::int32_t> last_ids_;
  generate::ReplyText text_;
  std::string tail_;
  std::vector<PromptToken> echo_;
};

}  // namespace efla::serve
