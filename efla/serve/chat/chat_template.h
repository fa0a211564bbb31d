// Turns the messages of a chat into the text that a model continues.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "efla/serve/chat/message.h"

namespace efla::serve {

// A chat that a template does not take. status: of HTTP. field: of the request; empty: none.
struct TemplateError : std::exception {
  TemplateError(int status, std::string message, std::string field = {})
      : status(status), message(std::move(message)), field(std::move(field)) {}
  const char* what() const noexcept override { return message.c_str(); }

  int status;
  std::string message, field;
};

// A text in pieces: the template's text, the text of a special token that a client wrote, the template's text, and so
// on in turns. Special tokens are found in the template's text alone.
using ChatText = std::vector<std::string>;

struct RenderedChat {
  ChatText text;
  std::vector<ChatText> beginnings = {};  // up to the end of each message with ChatMessage::cached, where the text
                                          // begins with the beginning
};

// A chat template. Its functions may be called by several threads at once; they throw TemplateError.
class ChatTemplate {
 public:
  virtual ~ChatTemplate() = default;

  virtual RenderedChat render(const Chat& chat) const = 0;
  // Returns the text of messages that follow the end of a reply's turn.
  virtual ChatText continuation(const Chat& chat) const = 0;
  // Returns the text between a reply and the next message; nothing where the template has none.
  virtual std::optional<std::string> end_turn() const = 0;
  // Returns the texts that end a reply.
  virtual std::vector<std::string> stop() const = 0;
  // Returns whether the template writes the bos token itself, where its model has one.
  virtual bool writes_bos() const = 0;
  // Returns the template's source for requests with or without tools.
  virtual std::string_view source(bool tools) const = 0;
};

// Loads "plain" ("User: …", "Assistant: …" on a line each), "chatml" (<|im_start|>role … <|im_end|>), or a TOML file
// with a text per role ("system", "user", "assistant"), "reply" and "stop". special: the texts of special tokens.
// Throws Error where there is no such file, and IoError.
std::shared_ptr<const ChatTemplate> load_chat_template(const std::string& name, std::vector<std::string> special = {});

}  // namespace efla::serve
