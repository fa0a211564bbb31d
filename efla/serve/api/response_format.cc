#include "efla/serve/api/response_format.h"

#include <utility>

namespace efla::serve {
namespace {

using Kind = ReplyDelta::Kind;

// Returns tool_choice as OpenAI's API shows it.
JsonText tool_choice(const GenerationRequest& request) {
  if (!request.called.empty()) return {{"type", "function"}, {"name", request.called}};
  return request.must_call ? "required" : request.response_tools.empty() ? "none" : "auto";
}

JsonText or_null(const std::string& text) { return text.empty() ? JsonText() : JsonText(text); }

}  // namespace

ResponseFormat::ResponseFormat(ReplyHead head, const GenerationRequest& request)
    : head_(std::move(head)), id_(head_.id.substr(head_.id.find('_') + 1)) {
  const auto& messages = request.chat.messages;
  const bool instructed = !messages.empty() && messages.front().field == "instructions";
  const bool tools = !request.response_tools.empty();
  options_ = {{"instructions", instructed ? JsonText(messages.front().content) : JsonText()},
              {"max_output_tokens", request.max_tokens ? JsonText(*request.max_tokens) : JsonText()},
              {"model", head_.model},
              {"parallel_tool_calls", tools && !request.one_call},
              {"previous_response_id", or_null(request.previous_response)},
              {"store", request.store},
              {"temperature", request.sampling.temperature},
              {"text", request.response_text.empty() ? JsonText{{"format", {{"type", "text"}}}}
                                                     : JsonText::json(request.response_text)},
              {"tool_choice", tool_choice(request)},
              {"tools", tools ? JsonText::json(request.response_tools) : JsonText::array()},
              {"top_p", request.sampling.top_p}};
}

JsonText ResponseFormat::part_json(const Item& item, std::string_view text) {
  if (item.kind == Kind::reasoning) return {{"type", "reasoning_text"}, {"text", text}};
  return {{"type", "output_text"}, {"text", text}, {"annotations", JsonText::array()}};
}

JsonText ResponseFormat::item_json(const Item& item, bool with_text) const {
  if (item.kind == Kind::call) {
    return {{"type", "function_call"},
            {"id", item.id},
            {"call_id", item.call.id},
            {"name", item.call.name},
            {"arguments", with_text ? item.text : ""},
            {"status", item.status}};
  }
  JsonText content = JsonText::array();
  if (with_text) content.push_back(part_json(item, item.text));
  if (item.kind == Kind::reasoning) {
    return {{"type", "reasoning"},
            {"id", item.id},
            {"summary", JsonText::array()},
            {"content", content},
            {"status", item.status}};
  }
  return {{"type", "message"}, {"id", item.id}, {"status", item.status}, {"role", "assistant"}, {"content", content}};
}

JsonText ResponseFormat::object() const {
  JsonText object{{"id", head_.id},    {"object", "response"}, {"created_at", head_.created},
                  {"status", status_}, {"error", nullptr},     {"incomplete_details", incomplete_details_}};
  object.add_all(options_);
  JsonText output = JsonText::array();
  for (const auto& item : items_) output.push_back(item_json(item, /*with_text=*/true));
  object.add("output", output);
  object.add("usage", usage_);
  return object;
}

std::string ResponseFormat::event(const std::string& type, const JsonText& fields) {
  JsonText all{{"type", type}, {"sequence_number", sequence_++}};
  all.add_all(fields);
  return "event: " + type + "\ndata: " + all.text() + "\n\n";
}

std::string ResponseFormat::first_events(std::int64_t /*prompt_tokens*/) {
  auto events = event("response.created", {{"response", object()}});
  events += event("response.in_progress", {{"response", object()}});
  return events;
}

JsonText ResponseFormat::last_fields() const {
  JsonText fields{{"item_id", items_.back().id}, {"output_index", items_.size() - 1}};
  if (items_.back().kind != Kind::call) fields.add("content_index", 0);
  return fields;
}

std::string ResponseFormat::open(Kind kind, const ToolCall& call) {
  auto events = items_.empty() ? std::string() : close("completed");
  const char* prefix = kind == Kind::reasoning ? "rs_" : kind == Kind::call ? "fc_" : "msg_";
  const auto number = items_.empty() ? std::string() : "_" + std::to_string(items_.size());
  items_.push_back({.kind = kind, .id = prefix + id_ + number, .call = call});
  const auto& item = items_.back();
  events +=
      event("response.output_item.added", {{"output_index", items_.size() - 1}, {"item", item_json(item, false)}});
  if (kind == Kind::call) return events;
  auto fields = last_fields();
  fields.add("part", part_json(item, ""));
  return events + event("response.content_part.added", fields);
}

// Returns the event of a piece of the last item's text.
std::string ResponseFormat::text_event(std::string_view text) {
  const auto kind = items_.back().kind;
  const char* type = kind == Kind::reasoning ? "response.reasoning_text.delta"
                     : kind == Kind::call    ? "response.function_call_arguments.delta"
                                             : "response.output_text.delta";
  auto fields = last_fields();
  fields.add("delta", text);
  if (kind == Kind::content) fields.add("logprobs", JsonText::array());
  return event(type, fields);
}

std::string ResponseFormat::close(const char* status) {
  auto& item = items_.back();
  item.status = status;
  auto fields = last_fields();
  if (item.kind == Kind::call) {
    fields.add("name", item.call.name);
    fields.add("arguments", item.text);
  } else {
    fields.add("text", item.text);
  }
  if (item.kind == Kind::content) fields.add("logprobs", JsonText::array());
  auto events = event(item.kind == Kind::reasoning ? "response.reasoning_text.done"
                      : item.kind == Kind::call    ? "response.function_call_arguments.done"
                                                   : "response.output_text.done",
                      fields);
  if (item.kind != Kind::call) {
    auto part = last_fields();
    part.add("part", part_json(item, item.text));
    events += event("response.content_part.done", part);
  }
  return events +
         event("response.output_item.done", {{"output_index", items_.size() - 1}, {"item", item_json(item, true)}});
}

std::string ResponseFormat::push(std::span<const ReplyDelta> deltas, std::span<const ToolCall> calls) {
  std::string events;
  for (const auto& delta : deltas) {
    if (delta.kind == Kind::call) {
      events += open(Kind::call, calls[delta.call]);
      continue;
    }
    const bool continues = !items_.empty() && (items_.back().kind == delta.kind || delta.kind == Kind::arguments);
    if (!continues) events += open(delta.kind, {});
    items_.back().text += delta.text;
    events += text_event(delta.text);
  }
  return events;
}

std::string ResponseFormat::finish(const Choice& choice, const engine::Usage& usage) {
  const bool whole = choice.finish->reason == engine::FinishReason::stop;
  const char* status = whole ? "completed" : "incomplete";
  auto events = items_.empty() ? open(Kind::content, {}) : std::string();
  events += close(status);
  status_ = status;
  if (!whole) {
    const bool length = choice.finish->reason == engine::FinishReason::length;
    incomplete_details_ = {{"reason", length ? "max_output_tokens" : finish_reason(choice)}};
  }
  usage_ = {{"input_tokens", usage.prompt_tokens},
            {"input_tokens_details", {{"cached_tokens", usage.cached_tokens}}},
            {"output_tokens", usage.completion_tokens},
            {"output_tokens_details", {{"reasoning_tokens", choice.reasoning_tokens}}},
            {"total_tokens", usage.prompt_tokens + usage.completion_tokens}};
  return events + event(whole ? "response.completed" : "response.incomplete", {{"response", object()}});
}

std::string ResponseFormat::error_event(const ApiError& error) {
  return event("error", {{"code", "server_error"}, {"message", error.message}, {"param", nullptr}});
}

}  // namespace efla::serve
