// The JSON of replies, in the shapes of OpenAI's API.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/engine.h"
#include "efla/io/json_text.h"
#include "efla/serve/api/requests.h"
#include "efla/serve/chat/reply_parser.h"

namespace efla::serve {

using io::JsonText;

// Returns a token as text: a special token as its text, a part of a character as its bytes, as in "bytes:\xe2\x80".
std::string token_text(std::int32_t id, const data::Tokenizer& tokenizer);

// A token with its log-probability (NaN if it has none) and the alternatives to it.
struct ScoredToken {
  std::int32_t id = 0;
  float logprob = 0.0F;
  std::vector<engine::ScoredId> alternatives = {};
  std::size_t offset = 0;  // characters of the reply's text before the token
};

// Counts the characters of a text whose tokens come one by one. As in the text that clients get, bytes that belong to
// no character count as U+FFFD.
class CharacterCount {
 public:
  explicit CharacterCount(std::size_t before = 0) : characters_(before) {}

  // Counts the bytes of a token. Returns the number of characters that begin before the token. A character that is
  // unfinished after the token counts as one.
  std::size_t push(std::string_view bytes, const data::Tokenizer& tokenizer);
  // Returns the number of characters that are complete.
  std::size_t characters() const { return characters_; }

 private:
  std::size_t characters_;  // before held_
  std::string held_;        // the bytes of an unfinished character
};

// One reply, as far as it has come.
struct Choice {
  std::string text;                 // UTF-8
  std::vector<ScoredToken> scored;  // with logprobs: the prompt with echo, then the reply
  bool begun = false;               // a token has come
  CharacterCount characters;        // of the text, with logprobs
  std::optional<engine::Finish> finish;
  std::optional<ReplyParser> parser = {};  // of a chat and a response, in place of `text`
  std::int64_t reasoning_tokens = 0;
};

// What all messages about a reply have in common.
struct ReplyHead {
  std::string id, model;
  std::int64_t created = 0;  // seconds since 1970
  Shape shape = Shape::completion;
};

std::string finish_reason(const Choice& choice);
JsonText usage_json(const engine::Usage& usage, const std::vector<Choice>& choices);

// Returns the object "logprobs" of a completion or a chat for some tokens; null for none.
JsonText logprobs_json(Shape shape, std::span<const ScoredToken> tokens, const data::Tokenizer& tokenizer);

// Returns the whole reply of a completion or a chat.
JsonText reply_json(const ReplyHead& head, const std::vector<Choice>& choices, const engine::Usage& usage,
                    const data::Tokenizer& tokenizer);

// Returns server-sent events. `logprobs` is JSON.
std::string event(std::string_view json);
std::string chunk_event(const ReplyHead& head, std::size_t index, std::string_view text, std::string_view logprobs);
std::string first_event(const ReplyHead& head, std::size_t index);  // the role, in a chat; otherwise nothing
// The piece of a chat's reply.
std::string delta_event(const ReplyHead& head, std::size_t index, const ReplyDelta& delta,
                        const std::vector<ToolCall>& calls, std::string_view logprobs);
std::string last_event(const ReplyHead& head, std::size_t index, const Choice& choice);
// An event without choices that has more fields.
std::string extra_event(const ReplyHead& head, const JsonText& fields);
inline constexpr std::string_view kDone = "data: [DONE]\n\n";

// Returns a text as JSON; bytes that are not UTF-8 become U+FFFD.
std::string json_text(std::string_view text);

}  // namespace efla::serve
