// A request to continue a text, and what its listener gets.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/engine/constraint.h"
#include "efla/engine/sampler.h"

namespace efla::engine {

using RequestId = std::uint64_t;
using Clock = std::chrono::steady_clock;

// How the next token is drawn from the logits z. First logit_bias[i] is added to z_i. Then tokens that occurred in the
// session's text, the prompt or the reply get the repetition penalty (a division if z_i is positive, otherwise a
// multiplication). Then tokens that occurred n_i > 0 times in this reply get z_i −= presence_penalty +
// frequency_penalty · n_i. Temperature, top_k and top_p follow as in sampler.h.
struct RequestSampling : SamplingOptions {
  RequestSampling() { temperature = 1.0; }

  double presence_penalty = 0.0, frequency_penalty = 0.0;  // in [−2, 2]
  std::map<std::int32_t, double> logit_bias = {};          // in [−100, 100]; −100 excludes the token
  std::uint64_t seed = 0;   // the random numbers of token n of a reply depend on the seed and draws + n alone
  std::uint64_t draws = 0;  // tokens that were drawn with this seed before, for a reply that goes on with its numbers
};

// A text with its state that is not a session, as long as somebody holds it: of a file's bytes (Engine::read), or after
// a reply (Finish::state).
struct HeldText {
  std::shared_ptr<const void> text = {};  // what the engine knows of it; null: none
  std::int64_t pending = 0;               // as SessionInfo::pending
};

struct Request {
  std::vector<std::int32_t> prompt;  // ids; empty only where a text is continued or rewound
  std::string session = {};          // name of the session whose text the prompt continues; empty: an empty text
  HeldText state = {};               // instead of a session
  // Name under which the state after the reply is stored, in place of an older one; empty: the state is dropped. The
  // name in `session` advances that session; a request that is cancelled or fails then leaves it as it was.
  std::string save_as = {};
  bool return_state = false;  // instead of save_as: Finish has the state after the reply
  // Rolls the text of `session` back by this number of tokens, at most SessionInfo::rewindable, and stores it under
  // save_as. The state then has the same bits as it had before these tokens. 0: no rewind. The request has no prompt
  // and draws no token.
  std::int64_t rewind = 0;
  // With save_as or return_state: the stored text ends with this text, in place of the stop string or the id that ended
  // the reply. With `stop` the request takes two slots.
  std::optional<std::string> end_turn = {};
  // With save_as: text that is held back at the end, because it may begin a stop string or a character, stays in the
  // session. The next request without a prompt continues it.
  bool to_be_continued = false;
  bool disposable = false;  // the stored session may be dropped where room is needed, the longest unused first, and
                            // cannot be rewound
  // Numbers of prompt tokens after which a state is worth room in the prefix cache. For each of them the cache keeps
  // the state after the largest number of tokens up to it at which the model may cut a prompt, such as a multiple
  // of 64.
  std::vector<std::int64_t> cache_after = {};
  std::int64_t max_tokens = 16;  // of the reply; 0: the prompt is only prefilled (and scored)
  RequestSampling sampling = {};
  // What every reply may be, before its first token; null: anything. Applies to the logits before `sampling` does.
  std::shared_ptr<const Constraint> constraint = {};
  // UTF-8, none empty; the text ends before the first of them. The text of a special token counts as its id, and is
  // found within a longer text too.
  std::vector<std::string> stop = {};
  std::vector<std::int32_t> stop_token_ids = {};  // besides EngineInfo::ends
  std::int64_t logprobs = -1;                     // alternatives per token, 0 to kMaxLogprobs; −1: no logprob at all
  bool echo = false;                              // score the prompt: Listener::prompt
  // The engine treats clients alike, however many requests each has. They share no states of the prefix cache.
  std::string client = {};
  std::int64_t places = 1;  // in the queue, at most EngineOptions::max_queue, for this request and for requests that
                            // follow it with 0 places, which a full queue does not refuse
  std::optional<Clock::time_point> deadline = {};  // afterwards the reply ends with FinishReason::deadline

  bool stores() const { return return_state || !save_as.empty(); }
};

inline constexpr std::int64_t kMaxLogprobs = 20;

// log p(id) of the model's own distribution: the softmax of the logits before any option of RequestSampling.
struct ScoredId {
  std::int32_t id = 0;
  float logprob = 0.0F;
};

struct Token {
  ScoredId drawn;                           // logprob is NaN unless Request::logprobs ≥ 0
  std::string_view bytes = {};              // of this token alone, often only a part of a character
  std::string text = {};                    // UTF-8 that is certain now: tokens' bytes, held back while a character is
                                            // unfinished or a stop string may begin
  std::vector<ScoredId> alternatives = {};  // the most probable ids, in falling order; Request::logprobs of them
};

// A token of the prompt with echo. The first token of a text has no probability: its logprob is NaN.
struct PromptToken {
  ScoredId token;
  std::vector<ScoredId> alternatives = {};  // none for the first token
};

enum class FinishReason {
  stop,         // an id that ends a text, a stop string or a stop id
  length,       // max_tokens
  interrupted,  // Engine::interrupt
  cancelled,    // Engine::cancel, or the engine ends
  deadline,
  error,
};

constexpr std::string_view name_of(FinishReason reason) {
  constexpr std::string_view kNames[] = {"stop", "length", "interrupted", "cancelled", "deadline", "error"};
  return kNames[static_cast<std::size_t>(reason)];
}

// Returns whether a request with this end stores its session.
constexpr bool is_whole(FinishReason reason) {
  return reason == FinishReason::stop || reason == FinishReason::length || reason == FinishReason::interrupted;
}

struct Usage {
  std::int64_t prompt_tokens = 0;      // of Request::prompt
  std::int64_t cached_tokens = 0;      // of these, found in the prefix cache
  std::int64_t completion_tokens = 0;  // drawn, with the one that ended the reply
  std::int64_t prefilled_tokens = 0;   // before the reply that the state has seen, without cached ones
  std::int64_t decoded_tokens = 0;     // of the reply that the state has seen
  std::int64_t drafted_tokens = 0, accepted_tokens = 0;  // of drafts: all, and the drawn ones
};

struct Finish {
  FinishReason reason = FinishReason::stop;
  std::string text = {};      // the last of the reply's text, which Token::text had held back
  std::string stop = {};      // the stop string that ended the reply
  std::int32_t stop_id = -1;  // the id that ended the reply; −1: none
  std::string error = {};     // one sentence where reason is error
  bool no_memory = false;     // reason is error for lack of memory: the same request may succeed later
  Usage usage = {};
  HeldText state = {};          // with Request::return_state, where is_whole(reason)
  std::size_t state_bytes = 0;  // of the text at the end; 0 for a request that has not begun
  double queue_ms = 0.0, first_token_ms = 0.0, total_ms = 0.0;  // since submit; first_token_ms 0 without a token
};

// Receives a reply. Threads of the engine call the functions, one call after the other, never inside submit or cancel;
// finish is the last call and comes exactly once. The functions must return at once and may call Engine::cancel and
// interrupt only. An exception from them ends the request as an error.
class Listener {
 public:
  virtual ~Listener() = default;

  // With echo: the next tokens of the prompt, before the first token of the reply.
  virtual void prompt(std::span<const PromptToken> tokens) { static_cast<void>(tokens); }
  virtual void token(const Token& token) = 0;
  virtual void finish(const Finish& finish) = 0;
};

}  // namespace efla::engine
