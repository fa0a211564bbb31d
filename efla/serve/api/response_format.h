// The object of /v1/responses, and the events of its stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/serve/api/item_format.h"
#include "efla/serve/api/requests.h"

namespace efla::serve {

class ResponseFormat : public ItemFormat {
 public:
  ResponseFormat(ReplyHead head, const GenerationRequest& request);

  std::string first_events(std::int64_t prompt_tokens) override;
  std::string push(std::span<const ReplyDelta> deltas, std::span<const ToolCall> calls) override;
  std::string finish(const Choice& choice, const engine::Usage& usage) override;
  std::string error_event(const ApiError& error) override;
  JsonText object() const override;

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
