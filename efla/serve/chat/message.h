// The messages of a chat, as clients send them.
#pragma once

#include <string>
#include <vector>

namespace efla::serve {

// A call of a tool by the model. arguments: a JSON object as text; of a call that was cut off, the beginning of one.
struct ToolCall {
  std::string id, name, arguments;

  bool operator==(const ToolCall&) const = default;
};

struct ChatMessage {
  std::string role = {}, content = {};
  bool cached = false;     // the client asks for a cached state after this message
  std::string field = {};  // of the request that has the role, as in "messages[1].role"
  std::string reasoning = {};
  std::vector<ToolCall> tool_calls = {};
  std::string tool_call_id = {}, name = {};  // of the call that the message has the result of
};

// What a chat template renders. tools, documents: lists in JSON. variables: an object in JSON, whose members a Jinja
// template sees by name. An empty text: none.
struct Chat {
  std::vector<ChatMessage> messages;
  std::string tools = {}, documents = {}, variables = {};
  bool begins_reply = true;     // the text ends with the beginning of a reply
  bool continues_last = false;  // the text ends with the last message's content, which the reply continues
};

}  // namespace efla::serve
