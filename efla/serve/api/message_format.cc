#include "efla/serve/api/message_format.h"

#include <algorithm>
#include <utility>

#include "efla/serve/chat/json_slices.h"

namespace efla::serve {
namespace {

using Kind = ReplyDelta::Kind;

std::string named_event(std::string_view type, const JsonText& fields) {
  JsonText all{{"type", type}};
  all.add_all(fields);
  return "event: " + std::string(type) + "\ndata: " + all.text() + "\n\n";
}

// Returns an object of the members that are complete in a call's arguments, which may be cut off.
JsonText input_json(const std::string& arguments) {
  if (is_json_object(arguments)) return JsonText::json(arguments);
  JsonText input = JsonText::object();
  for (const auto& [name, value, whole] : json_members(arguments)) {
    const bool closes = value.ends_with('"') || value.ends_with('}') || value.ends_with(']');
    if ((whole || closes) && is_json(value)) input.add(name, JsonText::json(std::string(value)));
  }
  return input;
}

// Returns the usage of a message. `input_tokens` are the tokens that no cached state has.
JsonText usage_of(const engine::Usage& usage) {
  return {{"input_tokens", usage.prompt_tokens - usage.cached_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", usage.cached_tokens},
          {"output_tokens", usage.completion_tokens}};
}

}  // namespace

MessageFormat::MessageFormat(ReplyHead head, const GenerationRequest& request)
    : head_(std::move(head)), stop_sequences_(request.stop), usage_(usage_of({})) {}

JsonText MessageFormat::block_json(const Block& block, const std::string& text) {
  switch (block.kind) {
    case Kind::reasoning:
      return {{"type", "thinking"}, {"thinking", text}, {"signature", ""}};
    case Kind::content:
      return {{"type", "text"}, {"text", text}};
    default:
      return {{"type", "tool_use"}, {"id", block.call.id}, {"name", block.call.name}, {"input", input_json(text)}};
  }
}

JsonText MessageFormat::object() const {
  JsonText content = JsonText::array();
  for (const auto& block : blocks_) content.push_back(block_json(block, block.text));
  return {{"id", head_.id},
          {"type", "message"},
          {"role", "assistant"},
          {"model", head_.model},
          {"content", content},
          {"stop_reason", stop_reason_},
          {"stop_sequence", stop_sequence_},
          {"usage", usage_}};
}

std::string MessageFormat::first_events(std::int64_t prompt_tokens) {
  usage_ = usage_of({.prompt_tokens = prompt_tokens});
  return named_event("message_start", {{"message", object()}}) + named_event("ping", JsonText::object());
}

std::string MessageFormat::block_event(std::string_view type, const JsonText& field) const {
  JsonText fields{{"index", blocks_.size() - 1}};
  fields.add_all(field);
  return named_event(type, fields);
}

std::string MessageFormat::open(Kind kind, const ToolCall& call) {
  auto events = close();
  blocks_.push_back({.kind = kind, .call = call});
  return events + block_event("content_block_start", {{"content_block", block_json(blocks_.back(), "")}});
}

std::string MessageFormat::close() const {
  if (blocks_.empty()) return {};
  std::string events;
  if (blocks_.back().kind == Kind::reasoning) {  // clients wait for a signature before they send the block back
    events = block_event("content_block_delta", {{"delta", {{"type", "signature_delta"}, {"signature", ""}}}});
  }
  return events + block_event("content_block_stop", JsonText::object());
}

std::string MessageFormat::push(std::span<const ReplyDelta> deltas, std::span<const ToolCall> calls) {
  std::string events;
  for (const auto& delta : deltas) {
    if (delta.kind == Kind::call) {
      events += open(Kind::call, calls[delta.call]);
      continue;
    }
    const bool continues = !blocks_.empty() && (blocks_.back().kind == delta.kind || delta.kind == Kind::arguments);
    if (!continues) events += open(delta.kind, {});
    blocks_.back().text += delta.text;
    const char* type = delta.kind == Kind::reasoning ? "thinking_delta"
                       : delta.kind == Kind::content ? "text_delta"
                                                     : "input_json_delta";
    const char* field = delta.kind == Kind::reasoning ? "thinking"
                        : delta.kind == Kind::content ? "text"
                                                      : "partial_json";
    events += block_event("content_block_delta", {{"delta", {{"type", type}, {field, delta.text}}}});
  }
  return events;
}

void MessageFormat::set_stop_reason(const Choice& choice) {
  const auto& finish = *choice.finish;
  if (finish.reason != engine::FinishReason::stop) {
    stop_reason_ = "max_tokens";  // a deadline has no reason of its own in Anthropic's API
  } else if (!finish.stop.empty() && std::ranges::find(stop_sequences_, finish.stop) != stop_sequences_.end()) {
    stop_reason_ = "stop_sequence";
    stop_sequence_ = finish.stop;
  } else {
    stop_reason_ = choice.parser->calls().empty() ? "end_turn" : "tool_use";
  }
}

std::string MessageFormat::finish(const Choice& choice, const engine::Usage& usage) {
  auto events = close();
  set_stop_reason(choice);
  usage_ = usage_of(usage);
  if (choice.reasoning_tokens > 0) {
    usage_.add("output_tokens_details", {{"thinking_tokens", choice.reasoning_tokens}});
  }
  events += named_event("message_delta", {{"delta", {{"stop_reason", stop_reason_}, {"stop_sequence", stop_sequence_}}},
                                          {"usage", usage_}});
  return events + named_event("message_stop", JsonText::object());
}

std::string MessageFormat::error_event(const ApiError& error) {
  return "event: error\ndata: " + to_json(error, ErrorShape::anthropic) + "\n\n";
}

}  // namespace efla::serve
