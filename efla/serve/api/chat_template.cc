#include "efla/serve/api/chat_template.h"

#include <filesystem>
#include <string_view>
#include <system_error>

#include "efla/base/error.h"
#include "efla/io/fields.h"
#include "efla/io/toml.h"
#include "efla/serve/api/error.h"

namespace efla::serve {
namespace {

constexpr std::string_view kContent = "{content}";

std::string filled(const std::string& text, std::string_view content) {
  const auto at = text.find(kContent);
  return text.substr(0, at) + std::string(content) + text.substr(at + kContent.size());
}

// Returns an assistant's content without the blanks that its text has between the beginning of a reply and {content}:
// a reply begins with these blanks itself, and its client sends them back.
std::string_view without_blanks(const std::string& text, const std::string& reply, std::string_view content) {
  const auto before = std::string_view(text).substr(0, text.find(kContent));
  if (!before.starts_with(reply)) return content;
  const auto blanks = before.substr(reply.size());
  const bool repeated = blanks.find_first_not_of(" \t\n") == std::string_view::npos && content.starts_with(blanks);
  return repeated ? content.substr(blanks.size()) : content;
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

}  // namespace

std::string ChatTemplate::render_messages(std::span<const ChatMessage> chat) const {
  std::string text;
  for (const auto& message : chat) {
    const auto found = messages.find(message.role);
    if (found == messages.end()) {
      std::string roles;
      for (const auto& [role, ignored] : messages) roles += (roles.empty() ? "" : ", ") + role;
      throw ApiError(400, message.field + ": got " + io::brief(message.role) + ", expected one of " + roles,
                     message.field);
    }
    const bool reply_sent_back = message.role == "assistant";
    text += filled(found->second,
                   reply_sent_back ? without_blanks(found->second, reply, message.content) : message.content);
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
  if (std::error_code none; !std::filesystem::exists(name, none)) {
    throw Error("serve", "chat_template", "'" + name + "'", "plain, chatml or a TOML file that exists");
  }
  ChatTemplate made;
  const auto table = io::read_toml(name);
  const io::Fields fields(table, io::refuse_in_file(name));
  fields.read("reply", made.reply);
  fields.read("stop", made.stop);
  for (const auto& stop : made.stop) {
    if (stop.empty()) fields.refuse("stop", "texts of at least one character");
  }
  for (const auto& [field, value] : table.items()) {
    if (field == "reply" || field == "stop") continue;
    made.messages[field] = fields.get<std::string>(field);
    if (made.messages[field].find(kContent) == std::string::npos) {
      fields.refuse(field, "a text with {content} (or \"reply\", \"stop\")");
    }
  }
  for (const char* role : {"user", "assistant"}) {
    if (!made.messages.contains(role)) fields.refuse(role, "a text with {content}");
  }
  return made;
}

}  // namespace efla::serve
