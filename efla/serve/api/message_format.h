// The object of Anthropic's /v1/messages, and the events of its stream.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/serve/api/item_format.h"
#include "efla/serve/api/requests.h"

namespace efla::serve {

class MessageFormat : public ItemFormat {
 public:
  MessageFormat(ReplyHead head, const GenerationRequest& request);

  std::string first_events(std::int64_t prompt_tokens) override;
  std::string push(std::span<const ReplyDelta> deltas, std::span<const ToolCall> calls) override;
  std::string finish(const Choice& choice, const engine::Usage& usage) override;
  std::string error_event(const ApiError& error) override;
  JsonText object() const override;

 private:
  // A block of the content: thinking, a text or a call.
  struct Block {
    ReplyDelta::Kind kind;
    std::string text = {};  // of a call its arguments
    ToolCall call = {};
  };

  // Begins a block. Returns the events about it, and about the end of the block before.
  std::string open(ReplyDelta::Kind kind, const ToolCall& call);
  // Returns the events about the end of the last block; "" where there is none.
  std::string close() const;
  // Returns an event about the last block.
  std::string block_event(std::string_view type, const JsonText& field) const;
  // Returns a block with a text in place of its own.
  static JsonText block_json(const Block& block, const std::string& text);
  void set_stop_reason(const Choice& choice);

  ReplyHead head_;
  std::vector<std::string> stop_sequences_;
  std::vector<Block> blocks_;
  JsonText stop_reason_, stop_sequence_, usage_;
};

}  // namespace efla::serve
