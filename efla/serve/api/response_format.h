// The object of /v1/responses, and the events of its stream.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/engine/engine.h"
#include "efla/serve/api/formats.h"
#include "efla/serve/api/requests.h"
#include "efla/serve/chat/reply_parser.h"

namespace efla::serve {

class ResponseFormat {
 public:
  ResponseFormat(ReplyHead head, const GenerationRequest& request);

  // Returns the first events of a stream.
  std::string first_events();
  // Adds pieces of the reply to the items of the output. Returns the events of a stream about them. calls: of the reply
  // so far.
  std::string push(std::span<const ReplyDelta> deltas, std::span<const ToolCall> calls);
  // Adds the end of the reply. Returns the last events of a stream; object() is complete then.
  std::string finish(const Choice& choice, const engine::Usage& usage);
  std::string error_event(const std::string& message);

  JsonText object() const;

 private:
  // An item of the output: reasoning, a message or a call.
  struct Item {
    ReplyDelta::Kind kind;
    std::string id;
    std::string text = {};  // of a call its arguments
    ToolCall call = {};
    const char* status = "in_progress";
  };

  std::string event(const std::string& type, const JsonText& fields);
  // Begins an item. Returns the events about it, and about the end of the item before.
  std::string open(ReplyDelta::Kind kind, const ToolCall& call);
  std::string close(const char* status);
  std::string text_event(std::string_view text);
  JsonText item_json(const Item& item, bool with_text) const;
  // Returns the fields of an event about the last item.
  JsonText last_fields() const;
  static JsonText part_json(const Item& item, std::string_view text);

  ReplyHead head_;
  std::string id_;  // of the response, without its prefix
  JsonText options_;
  std::vector<Item> items_;
  const char* status_ = "in_progress";
  JsonText incomplete_details_, usage_;
  int sequence_ = 0;
};

}  // namespace efla::serve
