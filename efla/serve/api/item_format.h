// A reply as a list of items: of /v1/responses and of /v1/messages.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "efla/engine/engine.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/formats.h"
#include "efla/serve/chat/reply_parser.h"

namespace efla::serve {

class ItemFormat {
 public:
  virtual ~ItemFormat() = default;

  // Returns the first events of a stream. prompt_tokens: of the request's prompt.
  virtual std::string first_events(std::int64_t prompt_tokens) = 0;
  // Adds pieces of the reply to the items. Returns the events of a stream about them. calls: of the reply so far.
  virtual std::string push(std::span<const ReplyDelta> deltas, std::span<const ToolCall> calls) = 0;
  // Adds the end of the reply. Returns the last events of a stream; object() is complete then.
  virtual std::string finish(const Choice& choice, const engine::Usage& usage) = 0;
  virtual std::string error_event(const ApiError& error) = 0;
  // Returns the whole reply.
  virtual JsonText object() const = 0;
};

}  // namespace efla::serve
