// A request in progress.
#pragma once

#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/batch_sampler.h"
#include "efla/engine/engine.h"
#include "efla/engine/head_drafts.h"
#include "efla/engine/prompt_lookup.h"
#include "efla/engine/reply_text.h"
#include "efla/engine/request_sampling.h"
#include "efla/engine/sampler.h"
#include "efla/engine/session_store.h"

namespace efla::engine {

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
SessionRecord extended(SessionRecord record, std::span<const std::int32_t> ids, const data::Tokenizer& tokenizer);

// Returns how many slots a request needs: two if its stored text ends before a stop string of the reply, because a stop
// string may begin several tokens before it is complete. The second slot has the state before its first token.
inline std::int64_t slots_of(const Request& request) {
  return request.end_turn && request.stores() && !request.stop.empty() ? 2 : 1;
}

// How the ids that a rewind computes again were first computed: the first ones were prefilled, the next ones decoded,
// and the others prefilled.
struct Replay {
  std::size_t prefilled = 0, decoded = 0;
  std::uint64_t drawn = 0;  // the stored record's counter
};

// What the replies to one prompt start from.
struct ForkedPrompt {
  nn::TextState state;  // after the prompt
  std::vector<float> logits;
};

class Reply {
 public:
  enum class State {
    queued,      // has no slot
    prefilling,  // reads ids()
    decoding,    // draws tokens
    closing,     // has drawn all tokens, and reads the end of the stored text, which is now ids()
    ended,
  };

  // from: the text that the prompt continues, or null. replay: of a rewind, whose prompt is ids to compute again.
  // listeners: one per reply; the object is the first of these replies until `fork` makes the others.
  Reply(RequestId id, Request request, std::vector<std::shared_ptr<Listener>> listeners,
        std::shared_ptr<const StoredText> from, const std::optional<Replay>& replay, const data::Tokenizer& tokenizer,
        std::int64_t vocab_size);

  const RequestId id;
  Request request;  // without the prompt, which ids() has
  Clock::time_point submitted = Clock::now();

  // Returns the ids before the reply that the state has not seen at the start: pending ids, then the prompt. All are
  // prefilled, except that a pending id without a prompt is decoded, and that without a reply the last id stays
  // pending. A rewind decodes the ids that were drawn. After close() returns the ids at the end of the stored text that
  // the state has not seen; the last one stays pending.
  const std::vector<std::int32_t>& ids() const { return ids_; }
  const std::shared_ptr<const StoredText>& from() const { return from_; }

  // What the schedule knows; for the engine's thread only.
  std::int64_t slot = -1;                // −1: in the queue
  std::int64_t kept_slot = -1;           // of a request with two slots, for the state before a token of the reply
  SessionStore::Reservation room = {};   // for the text that the request will store
  std::int64_t pages = 0;                // reserved for the text alone
  std::vector<const void*> held_pages;   // that the text began with, and may share with others
  std::uint64_t last_served = 0;         // when its last piece was scheduled
  std::vector<std::string> beginnings;   // names of the prompt's beginnings (prefix_cache.h)
  std::vector<std::size_t> store_after;  // beginnings whose states go to the cache
  bool begun = false;                    // whether the model decodes the token that was drawn last
  double queue_ms = 0.0, first_token_ms = 0.0;
  std::optional<Clock::time_point> last_token = {};

  State state() const { return state_; }
  bool ended() const { return state_ == State::ended; }
  bool has_failed() const { return ended() && reason_ == FinishReason::error; }
  FinishReason reason() const { return reason_; }  // after the end
  bool draws() const { return request.max_tokens > 0 && !closed_; }
  // Returns whether the next id is decoded, because all others are prefilled or because it was drawn before a rewind.
  bool decodes() const { return ids_fed_ >= prefill_size() || replays(); }
  std::size_t ids_fed() const { return ids_fed_; }  // that the state has seen
  std::size_t prefill_size() const;                 // of ids that are prefilled
  std::size_t prefill_end() const;                  // where the ids end that can be prefilled together
  std::int32_t next_id() const { return replays() ? ids_[ids_fed_] : reply_.empty() ? ids_.back() : reply_.back(); }
  std::int64_t state_tokens() const;  // tokens of the text that the state has seen
  std::int64_t most_tokens() const;   // that the state may see until the end

  // Leaves the queue. cached: ids whose state the prefix cache had.
  void begin(std::size_t cached);
  // Count ids that the state has seen.
  void count_prefilled(std::int64_t tokens);
  void count_decoded(std::int64_t tokens);
  // Ends a request without a reply, and one whose stored text is complete, once their ids are prefilled.
  void end_if_read();
  // Ends the request; fail because of an error.
  void end(FinishReason reason);
  void fail(const std::exception& failure) noexcept;
  void fail(const Outcome& outcome);

  // Returns whether other replies start from the state after the prompt.
  bool forks() const { return listeners_.size() > 1; }
  // Returns how many replies the object is.
  std::int64_t replies() const { return std::ssize(listeners_); }
  // Returns the other replies, with the seeds that follow.
  std::list<std::unique_ptr<Reply>> fork(std::shared_ptr<const ForkedPrompt> prompt);
  // Returns what this reply starts from, if `fork` has made it.
  const ForkedPrompt* forked() const { return forked_.get(); }
  // Frees the memory of what it starts from.
  void forget_fork() { forked_.reset(); }

  // Drafts at most `most` tokens to follow next_id(), by prompt lookup.
  std::span<const std::int32_t> draft(std::int64_t most);
  // Returns how many tokens, at most `most`, the model's head should draft in place of the draft; 0: none. cost: of
  // DraftCost.
  std::int64_t head_drafts(std::int64_t most, double cost);
  // Takes the draft of the model's head.
  std::span<const std::int32_t> take_draft(std::vector<std::int32_t> draft);
  // Returns whether the tokens drawn in this step are the draft's first tokens, so that one more may be drawn.
  bool follows_draft() const;
  bool drafting() const { return drafting_; }
  // Ends the draft before the token that was drawn last, so that the state before this token can be kept.
  void cut_draft() { lookup_.cut(drawn_ - 1); }
  // Ends a draft of `drafted` tokens. Returns how many tokens were drawn in this step, and adapts the length of later
  // drafts to this number.
  std::int64_t end_draft(std::int64_t drafted);

  // Returns the token whose logprob the row of logits after ids()[index] gives with echo, or nothing.
  std::optional<std::int32_t> echoed(std::size_t index) const;

  // Returns what decides the next token besides its logits; nothing if the request needs the logits themselves: for
  // log-probabilities, a bias, penalties for tokens of the reply, a constraint, or other replies.
  std::optional<Draw> plain_draw() const;
  // Returns whether the next token is the last one that the request allows.
  bool draws_last() const { return std::ssize(reply_) + 1 >= request.max_tokens; }
  // Draws the next token, or scores a token of the prompt. An exception becomes the outcome. Not for several threads at
  // once.
  Outcome outcome_of(std::span<float> logits, std::int64_t drawable, std::optional<std::int32_t> scored) noexcept;

  // Pass results on to the listener.
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
  // Makes ids() the end of the stored text. Returns which state is before these ids.
  enum class Before { current, kept, from };  // `from`: the state after from(), or zeros
  Before close();

  // Calls the listener's finish. state_bytes, state: of Finish. Without memory for the call, the listener is only
  // destroyed.
  void finish(std::size_t state_bytes, const HeldText& state = {});

  // Returns the text after the reply with this state.
  std::shared_ptr<StoredText> stored(std::shared_ptr<StoredState> state) const;
  // Returns the bytes of memory that stored() will take besides the state, without the ids of the reply.
  std::size_t record_bytes() const;

  Usage usage() const;

 private:
  bool replays() const;
  bool can_be_rewound() const { return !request.disposable && !request.return_state; }
  std::span<const std::int32_t> remembered(std::span<const std::int32_t> ids);
  Outcome draw(std::span<float> logits, std::int64_t drawable);
  Outcome score(std::span<const float> logits, std::int64_t drawable, std::int32_t id) const;
  std::size_t kept_reply(std::string& rest) const;
  template <class F>
  void call(F&& f);

  std::vector<std::shared_ptr<Listener>> listeners_;
  std::shared_ptr<const StoredText> from_;
  std::shared_ptr<const ForkedPrompt> forked_;
  bool is_fork_ = false;
  const std::optional<Replay> replay_;
  const data::Tokenizer& tokenizer_;
  std::size_t prompt_tokens_;
  std::vector<std::int32_t> ids_, reply_;
  std::size_t ids_fed_ = 0;  // of ids_ that the state has seen
  std::size_t cached_ = 0;   // of these, found in the prefix cache
  std::size_t decoded_ = 0;  // of reply_ that the state has seen
  Usage usage_ = {};         // but for the counts above
  PromptLookup lookup_;
  HeadDrafts head_;
  bool by_head_ = false;   // whether the head drafted lookup_.tokens()
  std::size_t drawn_ = 0;  // tokens drawn in this step
  bool drafting_ = false;
  bool kept_ = false;        // whether a state is kept
  std::size_t kept_at_ = 0;  // ids of the reply that this state has seen
  State state_ = State::queued;
  FinishReason reason_ = FinishReason::length;
  std::string error_;
  bool no_memory_ = false;  // the cause of the error
  bool closed_ = false;
  // After close(): the ids of the stored text that follow `from`, how many of them are before ids(), and how many were
  // prefilled before the reply.
  std::vector<std::int32_t> since_;
  std::size_t before_ = 0, prefilled_ = 0;
  SeenIds seen_;
  IdCounts counts_;
  std::vector<std::int32_t> last_ids_;
  std::unique_ptr<Constraint> constraint_;  // null: none
  ReplyText text_;
  std::string tail_;  // the text after the last token's
  std::vector<PromptToken> echo_;
};

}  // namespace efla::engine
