#include "efla/serve/api/chat_template.h"

#include "efla/base/error.h"
#include "efla/io/toml.h"
#include "efla/serve/api/error.h"

namespace efla::serve {
namespace {

constexpr std::string_view kContent = "{content}";

std::string filled(const std::string& text, const std::string& content) {
  const auto at = text.find(kContent);
  return text.substr(0, at) + content + text.substr(at + kContent.size());
}

ChatTemplate plain() {
  return {
      .messages = {{"system", "{content}\n\n"}, {"user", "User: {content}\n"}, {"assistant", "Assistant: {content}\n"}},
      .reply = "Assistant:",
      .stop = {"\nUser:"}};
}

ChatTemplate chatml() {
  ChatTemplate made{.messages = {}, .reply = "<|im_start|>assistant\n", .stop = {"<|im_end|>"}};
  for (const std::string role : {"system", "user", "assistant"}) {
    made.messages[role] = "<|im_start|>" + role + "\n{content}<|im_end|>\n";
  }
  return made;
}

[[noreturn]] void refuse(const std::string& path, const std::string& field, const std::string& got,
                         const std::string& expected) {
  throw Error("serve", "--chat-template", path + " with " + field + ": " + got, expected);
}

std::string text_of(const nlohmann::json& value, const std::string& path, const std::string& field) {
  if (!value.is_string()) refuse(path, field, value.dump(), "a text");
  return value.get<std::string>();
}

}  // namespace

std::string ChatTemplate::render_messages(std::span<const ChatMessage> chat) const {
  std::string text;
  for (const auto& message : chat) {
    const auto found = messages.find(message.role);
    if (found == messages.end()) {
      std::string roles;
      for (const auto& [role, ignored] : messages) roles += (roles.empty() ? "" : ", ") + role;
      throw ApiError(400, "messages: got the role \"" + message.role + "\", expected one of " + roles, "messages");
    }
    text += filled(found->second, message.content);
  }
  return text;
}

std::string ChatTemplate::after_reply() const {
  const auto& assistant = messages.at("assistant");
  return assistant.substr(assistant.find(kContent) + kContent.size());
}

ChatTemplate load_chat_template(const std::string& name) {
  if (name == "plain") return plain();
  if (name == "chatml") return chatml();
  ChatTemplate made;
  const auto table = io::read_toml(name);
  for (const auto& [field, value] : table.items()) {
    if (field == "reply") {
      made.reply = text_of(value, name, field);
    } else if (field == "stop") {
      if (!value.is_array()) refuse(name, field, value.dump(), "a list of texts");
      for (const auto& stop : value) {
        made.stop.push_back(text_of(stop, name, field));
        if (made.stop.back().empty()) refuse(name, field, "an empty text", "texts of at least one character");
      }
    } else {
      made.messages[field] = text_of(value, name, field);
      if (made.messages[field].find(kContent) == std::string::npos) {
        refuse(name, field, value.dump(), "a text with {content} (or \"reply\", \"stop\")");
      }
    }
  }
  for (const char* role : {"user", "assistant"}) {
    if (!made.messages.contains(role)) refuse(name, role, "nothing", "a text with {content}");
  }
  return made;
}

}  // namespace efla::serve
