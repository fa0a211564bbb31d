#include "efla/serve/api/formats.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "efla/base/utf8.h"

namespace efla::serve {
namespace {

constexpr float kLeastLogprob = -9999.0F;  // JSON has no infinity

JsonText logprob_json(float value) {
  if (std::isnan(value)) return nullptr;
  return std::max(value, kLeastLogprob);
}

JsonText chat_token(std::int32_t id, float logprob, const data::Tokenizer& tokenizer) {
  JsonText bytes = JsonText::array();
  for (const char c : tokenizer.bytes_of(id)) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", token_text(id, tokenizer)}, {"logprob", logprob_json(logprob)}, {"bytes", bytes}};
}

JsonText chat_logprobs(const std::vector<ScoredToken>& tokens, const data::Tokenizer& tokenizer) {
  JsonText content = JsonText::array();
  for (const auto& token : tokens) {
    auto entry = chat_token(token.id, token.logprob, tokenizer);
    JsonText top = JsonText::array();
    for (const auto& other : token.alternatives) top.push_back(chat_token(other.id, other.logprob, tokenizer));
    entry.add("top_logprobs", top);
    content.push_back(entry);
  }
  return {{"content", content}};
}

JsonText completion_logprobs(const std::vector<ScoredToken>& tokens, const data::Tokenizer& tokenizer) {
  JsonText texts = JsonText::array(), values = JsonText::array(), tops = JsonText::array(), offsets = JsonText::array();
  for (const auto& token : tokens) {
    texts.push_back(token_text(token.id, tokenizer));
    values.push_back(logprob_json(token.logprob));
    offsets.push_back(token.offset);
    if (std::isnan(token.logprob)) {
      tops.push_back(nullptr);
      continue;
    }
    JsonText top = JsonText::object();
    std::set<std::string> names;  // of equal texts the most probable
    for (const auto& other : token.alternatives) {
      const auto [name, added] = names.insert(token_text(other.id, tokenizer));
      if (added) top.add(*name, std::max(other.logprob, kLeastLogprob));
    }
    tops.push_back(top);
  }
  return {{"tokens", texts}, {"token_logprobs", values}, {"top_logprobs", tops}, {"text_offset", offsets}};
}

std::string chunk_start(const ReplyHead& head) {
  const bool chat = head.shape == Shape::chat;
  return "data: {\"id\":\"" + head.id + "\",\"object\":\"" + (chat ? "chat.completion.chunk" : "text_completion") +
         "\",\"created\":" + std::to_string(head.created) + ",\"model\":" + json_text(head.model) + ",\"choices\":[";
}

std::string choice_event(const ReplyHead& head, std::size_t index, const std::string& content,
                         std::string_view logprobs, const std::string& reason) {
  std::string text = chunk_start(head);
  text += "{\"index\":" + std::to_string(index);
  text += content;
  text += ",\"logprobs\":";
  text += logprobs;
  text += ",\"finish_reason\":";
  text += reason;
  text += "}]}\n\n";
  return text;
}

}  // namespace

std::string json_text(std::string_view text) { return JsonText(text).text(); }

std::string token_text(std::int32_t id, const data::Tokenizer& tokenizer) {
  const auto special = tokenizer.special_texts().find(id);
  if (special != tokenizer.special_texts().end()) return special->second;
  const auto bytes = tokenizer.bytes_of(id);
  if (bytes.empty()) return "<" + std::to_string(id) + ">";
  if (utf8_prefix(bytes) == bytes.size()) return std::string(bytes);
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string text = "bytes:";
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
  }
  return text;
}

std::size_t CharacterCount::push(std::string_view bytes, const data::Tokenizer& tokenizer) {
  const auto before = held_.size();
  held_ += bytes;
  std::size_t at = 0, offset = characters_;
  for (; at < held_.size(); ++characters_) {
    const auto rest = std::string_view(held_).substr(at);
    const int size = utf8_character(rest);
    if (at < before) ++offset;
    if (size < 0) break;
    at += size > 0 ? static_cast<std::size_t>(size) : tokenizer.replaced_size(rest);
  }
  held_.erase(0, at);
  return offset;
}

std::string finish_reason(const engine::Finish& finish) { return std::string(name_of(finish.reason)); }

JsonText usage_json(const engine::Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
}

JsonText logprobs_json(Shape shape, const std::vector<ScoredToken>& tokens, const data::Tokenizer& tokenizer) {
  if (tokens.empty()) return nullptr;
  return shape == Shape::chat ? chat_logprobs(tokens, tokenizer) : completion_logprobs(tokens, tokenizer);
}

JsonText reply_json(const ReplyHead& head, const std::vector<Choice>& choices, const engine::Usage& usage,
                    const data::Tokenizer& tokenizer) {
  const bool chat = head.shape == Shape::chat;
  JsonText list = JsonText::array();
  for (std::size_t i = 0; i < choices.size(); ++i) {
    JsonText entry{{"index", i}};
    if (chat) {
      entry.add("message", {{"role", "assistant"}, {"content", choices[i].text}, {"refusal", nullptr}});
    } else {
      entry.add("text", choices[i].text);
    }
    entry.add("logprobs", logprobs_json(head.shape, choices[i].scored, tokenizer));
    entry.add("finish_reason", finish_reason(*choices[i].finish));
    list.push_back(entry);
  }
  return {{"id", head.id},           {"object", chat ? "chat.completion" : "text_completion"},
          {"created", head.created}, {"model", head.model},
          {"choices", list},         {"usage", usage_json(usage)}};
}

std::string event(std::string_view json) { return "data: " + std::string(json) + "\n\n"; }

std::string chunk_event(const ReplyHead& head, std::size_t index, std::string_view text, std::string_view logprobs) {
  const bool chat = head.shape == Shape::chat;
  return choice_event(head, index,
                      (chat ? ",\"delta\":{\"content\":" : ",\"text\":") + json_text(text) + (chat ? "}" : ""),
                      logprobs, "null");
}

std::string first_event(const ReplyHead& head, std::size_t index) {
  if (head.shape != Shape::chat) return {};
  return choice_event(head, index, R"(,"delta":{"role":"assistant","content":""})", "null", "null");
}

std::string last_event(const ReplyHead& head, std::size_t index, const engine::Finish& finish) {
  return choice_event(head, index, head.shape == Shape::chat ? ",\"delta\":{}" : ",\"text\":\"\"", "null",
                      json_text(finish_reason(finish)));
}

std::string extra_event(const ReplyHead& head, const JsonText& fields) {
  const auto& members = fields.text();
  return chunk_start(head) + "]," + members.substr(1, members.size() - 2) + "}\n\n";
}

ResponseFormat::ResponseFormat(ReplyHead head, const GenerationRequest& request)
    : head_(std::move(head)), item_id_("msg_" + head_.id.substr(head_.id.find('_') + 1)) {
  const auto or_null = [](const std::string& text) { return text.empty() ? JsonText() : JsonText(text); };
  const auto& messages = request.chat.messages;
  const bool instructed = !messages.empty() && messages.front().role == "system";
  options_ = {{"instructions", instructed ? JsonText(messages.front().content) : JsonText()},
              {"max_output_tokens", request.max_tokens ? JsonText(*request.max_tokens) : JsonText()},
              {"model", head_.model},
              {"parallel_tool_calls", false},
              {"previous_response_id", or_null(request.previous_response)},
              {"store", request.store},
              {"temperature", request.sampling.temperature},
              {"text", {{"format", {{"type", "text"}}}}},
              {"tool_choice", "none"},
              {"tools", JsonText::array()},
              {"top_p", request.sampling.top_p}};
  text_prefix_ = R"("item_id":")" + item_id_ + R"(","output_index":0,"content_index":0,"delta":)";
}

JsonText ResponseFormat::item(const Choice* choice) const {
  JsonText content = JsonText::array();
  if (choice != nullptr) {
    content.push_back({{"type", "output_text"}, {"text", choice->text}, {"annotations", JsonText::array()}});
  }
  const bool whole = choice != nullptr && choice->finish && choice->finish->reason == engine::FinishReason::stop;
  return {{"type", "message"},
          {"id", item_id_},
          {"status", choice == nullptr ? "in_progress"
                     : whole           ? "completed"
                                       : "incomplete"},
          {"role", "assistant"},
          {"content", content}};
}

JsonText ResponseFormat::object(const Choice* choice, const engine::Usage& usage) const {
  JsonText object{{"id", head_.id}, {"object", "response"}, {"created_at", head_.created}};
  const bool whole = choice != nullptr && choice->finish->reason == engine::FinishReason::stop;
  object.add("status", choice == nullptr ? "in_progress" : whole ? "completed" : "incomplete");
  object.add("error", nullptr);
  JsonText details;
  if (choice != nullptr && !whole) {
    const bool length = choice->finish->reason == engine::FinishReason::length;
    details = {{"reason", length ? "max_output_tokens" : finish_reason(*choice->finish)}};
  }
  object.add("incomplete_details", details);
  object.add_all(options_);
  JsonText output = JsonText::array();
  if (choice != nullptr) output.push_back(item(choice));
  object.add("output", output);
  if (choice == nullptr) {
    object.add("usage", nullptr);
    return object;
  }
  object.add("usage", {{"input_tokens", usage.prompt_tokens},
                       {"input_tokens_details", {{"cached_tokens", usage.cached_tokens}}},
                       {"output_tokens", usage.completion_tokens},
                       {"output_tokens_details", {{"reasoning_tokens", 0}}},
                       {"total_tokens", usage.prompt_tokens + usage.completion_tokens}});
  return object;
}

std::string ResponseFormat::event(const std::string& type, const JsonText& fields) {
  JsonText all{{"type", type}, {"sequence_number", sequence_++}};
  all.add_all(fields);
  return "event: " + type + "\ndata: " + all.text() + "\n\n";
}

std::string ResponseFormat::first_events() {
  const JsonText part{{"type", "output_text"}, {"text", ""}, {"annotations", JsonText::array()}};
  auto events = event("response.created", {{"response", object(nullptr, {})}});
  events += event("response.in_progress", {{"response", object(nullptr, {})}});
  events += event("response.output_item.added", {{"output_index", 0}, {"item", item(nullptr)}});
  events += event("response.content_part.added",
                  {{"item_id", item_id_}, {"output_index", 0}, {"content_index", 0}, {"part", part}});
  return events;
}

std::string ResponseFormat::text_event(std::string_view text) {
  return R"(event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":)" +
         std::to_string(sequence_++) + "," + text_prefix_ + json_text(text) + ",\"logprobs\":[]}\n\n";
}

std::string ResponseFormat::last_events(const Choice& choice, const engine::Usage& usage) {
  const JsonText part{{"type", "output_text"}, {"text", choice.text}, {"annotations", JsonText::array()}};
  const bool whole = choice.finish->reason == engine::FinishReason::stop;
  auto events = event("response.output_text.done", {{"item_id", item_id_},
                                                    {"output_index", 0},
                                                    {"content_index", 0},
                                                    {"text", choice.text},
                                                    {"logprobs", JsonText::array()}});
  events += event("response.content_part.done",
                  {{"item_id", item_id_}, {"output_index", 0}, {"content_index", 0}, {"part", part}});
  events += event("response.output_item.done", {{"output_index", 0}, {"item", item(&choice)}});
  events += event(whole ? "response.completed" : "response.incomplete", {{"response", object(&choice, usage)}});
  return events;
}

std::string ResponseFormat::error_event(const std::string& message) {
  return event("error", {{"code", "server_error"}, {"message", message}, {"param", nullptr}});
}

}  // namespace efla::serve
