// The JSON of replies, in the shapes of OpenAI's API.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/engine.h"
#include "efla/io/json_text.h"
#include "efla/serve/api/requests.h"

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
};

// What all messages about a reply have in common.
struct ReplyHead {
  std::string id, model;
  std::int64_t created = 0;  // seconds since 1970
  Shape shape = Shape::completion;
};

std::string finish_reason(const engine::Finish& finish);
JsonText usage_json(const engine::Usage& usage);

// Returns the object "logprobs" of a completion or a chat for some tokens; null for none.
JsonText logprobs_json(Shape shape, const std::vector<ScoredToken>& tokens, const data::Tokenizer& tokenizer);

// Returns the whole reply of a completion or a chat.
JsonText reply_json(const ReplyHead& head, const std::vector<Choice>& choices, const engine::Usage& usage,
                    const data::Tokenizer& tokenizer);

// Returns server-sent events. `logprobs` is JSON.
std::string event(std::string_view json);
std::string chunk_event(const ReplyHead& head, std::size_t index, std::string_view text, std::string_view logprobs);
std::string first_event(const ReplyHead& head, std::size_t index);  // the role, in a chat; otherwise nothing
std::string last_event(const ReplyHead& head, std::size_t index, const engine::Finish& finish);
// An event without choices that has more fields.
std::string extra_event(const ReplyHead& head, const JsonText& fields);
inline constexpr std::string_view kDone = "data: [DONE]\n\n";

// The object of /v1/responses, and the events of its stream.
class ResponseFormat {
 public:
  ResponseFormat(ReplyHead head, const GenerationRequest& request);

  // Returns the object; without `choice`, in progress.
  JsonText object(const Choice* choice, const engine::Usage& usage) const;

  std::string first_events();
  std::string text_event(std::string_view text);
  std::string last_events(const Choice& choice, const engine::Usage& usage);
  std::string error_event(const std::string& message);

 private:
  std::string event(const std::string& type, const JsonText& fields);
  JsonText item(const Choice* choice) const;

  ReplyHead head_;
  JsonText options_;
  std::string item_id_, text_prefix_;
  int sequence_ = 0;
};

// Returns a text as JSON; bytes that are not UTF-8 become U+FFFD.
std::string json_text(std::string_view text);

}  // namespace efla::serve
