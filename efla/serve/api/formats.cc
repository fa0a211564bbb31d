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

JsonText chat_logprobs(std::span<const ScoredToken> tokens, const data::Tokenizer& tokenizer) {
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

JsonText completion_logprobs(std::span<const ScoredToken> tokens, const data::Tokenizer& tokenizer) {
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

// Returns the message of a whole reply.
JsonText message_json(const ReplyParser& reply) {
  const bool calls = !reply.calls().empty();
  JsonText message{{"role", "assistant"},
                   {"content", calls && reply.content().empty() ? JsonText() : JsonText(reply.content())},
                   {"refusal", nullptr}};
  if (!reply.reasoning().empty()) message.add("reasoning_content", reply.reasoning());
  if (!calls) return message;
  JsonText list = JsonText::array();
  for (const auto& call : reply.calls()) {
    list.push_back(
        {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  message.add("tool_calls", list);
  return message;
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

std::string finish_reason(const Choice& choice) {
  const auto reason = choice.finish->reason;
  const bool calls = choice.parser && !choice.parser->calls().empty();
  return calls && reason == engine::FinishReason::stop ? "tool_calls" : std::string(name_of(reason));
}

JsonText usage_json(const engine::Usage& usage, const std::vector<Choice>& choices) {
  JsonText json{{"prompt_tokens", usage.prompt_tokens},
                {"completion_tokens", usage.completion_tokens},
                {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
                {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
  std::int64_t reasoning = 0;
  for (const auto& choice : choices) reasoning += choice.reasoning_tokens;
  if (reasoning > 0) json.add("completion_tokens_details", {{"reasoning_tokens", reasoning}});
  return json;
}

JsonText logprobs_json(Shape shape, std::span<const ScoredToken> tokens, const data::Tokenizer& tokenizer) {
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
      entry.add("message", message_json(*choices[i].parser));
    } else {
      entry.add("text", choices[i].text);
    }
    entry.add("logprobs", logprobs_json(head.shape, choices[i].scored, tokenizer));
    entry.add("finish_reason", finish_reason(choices[i]));
    list.push_back(entry);
  }
  return {{"id", head.id},           {"object", chat ? "chat.completion" : "text_completion"},
          {"created", head.created}, {"model", head.model},
          {"choices", list},         {"usage", usage_json(usage, choices)}};
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

std::string delta_event(const ReplyHead& head, std::size_t index, const ReplyDelta& delta,
                        const std::vector<ToolCall>& calls, std::string_view logprobs) {
  JsonText json;
  if (delta.kind == ReplyDelta::Kind::content || delta.kind == ReplyDelta::Kind::reasoning) {
    const bool content = delta.kind == ReplyDelta::Kind::content;
    json = {{content ? "content" : "reasoning_content", delta.text}};
  } else {
    const bool begins = delta.kind == ReplyDelta::Kind::call;
    JsonText call{{"index", delta.call}};
    if (begins) call.add_all({{"id", calls[delta.call].id}, {"type", "function"}});
    call.add("function",
             begins ? JsonText{{"name", delta.text}, {"arguments", ""}} : JsonText{{"arguments", delta.text}});
    JsonText list = JsonText::array();
    list.push_back(call);
    json = {{"tool_calls", list}};
  }
  return choice_event(head, index, ",\"delta\":" + json.text(), logprobs, "null");
}

std::string last_event(const ReplyHead& head, std::size_t index, const Choice& choice) {
  return choice_event(head, index, head.shape == Shape::chat ? ",\"delta\":{}" : ",\"text\":\"\"", "null",
                      json_text(finish_reason(choice)));
}

std::string extra_event(const ReplyHead& head, const JsonText& fields) {
  const auto& members = fields.text();
  return chunk_start(head) + "]," + members.substr(1, members.size() - 2) + "}\n\n";
}

}  // namespace efla::serve
