// Turns the messages of a chat into the text that a model continues.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

namespace efla::serve {

struct ChatMessage {
  std::string role, content;
  bool cached = false;     // the client asks for a cached state after this message
  std::string field = {};  // of the request that has the role, as in "messages[1].role"
};

struct ChatTemplate {
  std::map<std::string, std::string> messages = {};  // by role, with {content} once
  std::string reply = {};              // what a reply begins with; the reply ends like an assistant's message
  std::vector<std::string> stop = {};  // texts that end a reply

  // Returns the text of messages. An assistant's message that a client sends back has the text that the reply had, also
  // where the reply began with the blanks that messages["assistant"] has between `reply` and {content}. Throws ApiError
  // for a role without a template.
  std::string render_messages(std::span<const ChatMessage> chat) const;
  // Returns the text of messages and the beginning of a reply.
  std::string render(const std::vector<ChatMessage>& chat) const { return render_messages(chat) + reply; }

  // Returns the text that follows a reply in a chat.
  std::string after_reply() const;
};

// Loads "plain" ("User: …", "Assistant: …" on a line each), "chatml" (<|im_start|>role … <|im_end|>), or a TOML file
// with a text per role ("system", "user", "assistant"), "reply" and "stop". Throws Error where there is no such file,
// and IoError.
ChatTemplate load_chat_template(const std::string& name);

}  // namespace efla::serve
