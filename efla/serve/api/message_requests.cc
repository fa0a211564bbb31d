// The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens.
#include <algorithm>
#include <string_view>
#include <utility>

#include "efla/io/json_text.h"
#include "efla/serve/api/defaults.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/fields.h"
#include "efla/serve/api/request_fields.h"
#include "efla/serve/api/requests.h"
#include "efla/serve/chat/json_slices.h"

namespace efla::serve {
namespace {

using io::Fields;
using io::JsonText;

// Refuses a block of another type by its name.
[[noreturn]] void refuse_block(const Fields& block, const std::string& expected) {
  block.refuse("type", expected + ", because this server reads text alone");
}

// Calls f(block, type, text) for the blocks of a list. written: the object around the list as the client wrote it.
// text: the block as the client wrote it.
template <class F>
void for_each_block(const Fields& fields, const std::string& name, std::string_view written, const F& f) {
  const auto* content = fields.find(name);
  if (content == nullptr || !content->is_array()) fields.refuse(name, "a text or a list of blocks");
  const auto slices = json_elements(json_member(written, name));
  for_each_object(fields, name, *content, [&](const Fields& block, std::size_t i) {
    f(block, block.find<std::string>("type").value_or(""), slices.at(i));
    accept_defaults(block, Place::anthropic_block);
    refuse_others(block);
  });
}

// Reads a block of text, and what marks it for the prefix cache.
void read_text_block(const Fields& block, ChatMessage& into) {
  into.content += block.get<std::string>("text");
  into.cached = read_cache_control(block) || into.cached;
}

// Reads a field that is a text or a list of blocks of text.
void read_texts(const Fields& fields, const std::string& name, std::string_view written, ChatMessage& into) {
  if (const auto* text = fields.find(name); text != nullptr && text->is_string()) {
    into.content = text->get<std::string>();
    return;
  }
  for_each_block(fields, name, written, [&](const Fields& block, const std::string& type, std::string_view) {
    if (type != "text") refuse_block(block, "\"text\"");
    read_text_block(block, into);
  });
}

// Reads the result of a call as a message of its own.
ChatMessage read_result(const Fields& block, std::string_view written, const std::string& field) {
  ChatMessage result{.role = "tool", .field = field};
  result.tool_call_id = block.get<std::string>("tool_use_id");
  if (block.find("content") != nullptr) read_texts(block, "content", written, result);
  result.cached = read_cache_control(block) || result.cached;
  block.find<bool>("is_error");  // the content says what is wrong
  return result;
}

// Reads a message of a user. The results of calls are messages of their own, in the order of the blocks.
void read_user(const Fields& message, std::string_view written, const std::string& field,
               std::vector<ChatMessage>& chat) {
  bool in_text = false, has_block = false;
  const auto user = [&]() -> ChatMessage& {
    if (!std::exchange(in_text, true)) chat.push_back({.role = "user", .field = field});
    return chat.back();
  };
  for_each_block(message, "content", written, [&](const Fields& block, const std::string& type, std::string_view text) {
    has_block = true;
    if (type == "text") {
      read_text_block(block, user());
    } else if (type == "tool_result") {
      chat.push_back(read_result(block, text, field));
      in_text = false;
    } else {
      refuse_block(block, "text or tool_result");
    }
  });
  if (!has_block) user();
}

// Reads a call. Its arguments are what the client wrote, so that a template shows the text that the model wrote.
ToolCall read_use(const Fields& block, std::string_view written) {
  ToolCall call;
  call.id = block.get<std::string>("id");
  call.name = block.get<std::string>("name");
  block.object("input");
  call.arguments = json_member(written, "input");
  if (!is_json_object(call.arguments)) block.refuse("input", "an object of at most 256 levels");
  return call;
}

ChatMessage read_assistant(const Fields& message, std::string_view written, const std::string& field) {
  ChatMessage assistant{.role = "assistant", .field = field};
  for_each_block(message, "content", written, [&](const Fields& block, const std::string& type, std::string_view text) {
    if (type == "text") {
      read_text_block(block, assistant);
    } else if (type == "thinking") {
      assistant.reasoning += block.get<std::string>("thinking");
      block.find<std::string>("signature");
    } else if (type == "tool_use") {
      assistant.tool_calls.push_back(read_use(block, text));
      assistant.cached = read_cache_control(block) || assistant.cached;
    } else {
      refuse_block(block, "text, thinking or tool_use");
    }
  });
  return assistant;
}

void read_turn(const Fields& message, std::string_view written, const std::string& field,
               std::vector<ChatMessage>& chat) {
  const auto role = message.find<std::string>("role").value_or("");
  if (role != "user" && role != "assistant" && role != "system") message.refuse("role", "user, assistant or system");
  const auto* content = message.find("content");
  if (role == "system" || (content != nullptr && content->is_string())) {
    chat.push_back({.role = role, .field = field});
    read_texts(message, "content", written, chat.back());
  } else if (role == "user") {
    read_user(message, written, field, chat);
  } else {
    chat.push_back(read_assistant(message, written, field));
  }
  refuse_others(message);
}

void read_turns(const Fields& fields, std::string_view written, Chat& chat) {
  const std::string name = "messages";
  if (fields.find("system") != nullptr) {
    chat.messages.push_back({.role = "system", .field = "system"});
    read_texts(fields, "system", written, chat.messages.back());
  }
  const auto* list = find_list(fields, name, "a list of messages");
  if (list == nullptr || list->empty()) fields.refuse(name, "at least one message");
  const auto slices = json_elements(json_member(written, name));
  for_each_object(fields, name, *list, [&](const Fields& message, std::size_t i) {
    read_turn(message, slices.at(i), place(name, i) + ".role", chat.messages);
  });
  if (read_cache_control(fields)) chat.messages.back().cached = true;
  require_few_marks(chat.messages, name);
  chat.continues_last = chat.messages.back().role == "assistant";
}

// Reads a tool. Returns it as a tool of OpenAI's API, which chat templates show. written: as the client wrote it.
JsonText read_custom_tool(const Fields& fields, std::string_view written, GenerationRequest& request) {
  const auto type = fields.find<std::string>("type").value_or("custom");
  if (type != "custom") fields.refuse("type", "\"custom\", because this server has no tools of its own");
  const auto schema = fields.object("input_schema");
  fields.find<std::string>("description");
  read_cache_control(fields);  // a tool stands before the messages, where the prefix cache keeps states by itself
  accept_defaults(fields, Place::anthropic_tool);
  auto tool = make_tool(fields.get<std::string>("name"), schema.content());
  read_strict(fields, written, "input_schema", tool, request);
  request.tools.push_back(std::move(tool));
  refuse_others(fields);
  JsonText function = JsonText::object();
  for (const auto& [theirs, ours] :
       {std::pair{"name", "name"}, std::pair{"description", "description"}, std::pair{"input_schema", "parameters"}}) {
    const auto value = json_member(written, theirs);
    if (!value.empty()) function.add(ours, JsonText::json(std::string(value)));
  }
  return {{"type", "function"}, {"function", function}};
}

// Reads which tools the reply may or must call. Returns whether it may call any.
bool read_tool_choice(const Fields& fields, GenerationRequest& request) {
  if (fields.find("tool_choice") == nullptr) return true;
  const auto choice = fields.object("tool_choice");
  const auto type = choice.find<std::string>("type").value_or("");
  if (type != "auto" && type != "none" && type != "any" && type != "tool") {
    choice.refuse("type", "auto, none, any or tool");
  }
  request.must_call = type == "any" || type == "tool";
  if (type == "tool") request.called = choice.get<std::string>("name");
  request.one_call = choice.find<bool>("disable_parallel_tool_use").value_or(false);
  refuse_others(choice);
  return type != "none";
}

void read_custom_tools(const Fields& fields, std::string_view written, GenerationRequest& request) {
  const bool may_call = read_tool_choice(fields, request);
  const auto* list = find_list(fields, "tools", "a list of tools");
  if (list != nullptr && !list->empty()) {
    const auto slices = json_elements(json_member(written, "tools"));
    JsonText tools = JsonText::array();
    for_each_object(fields, "tools", *list, [&](const Fields& tool, std::size_t i) {
      tools.push_back(read_custom_tool(tool, slices.at(i), request));
    });
    request.chat.tools = std::move(tools).text();
  }
  require_called(request);
  if (may_call) return;
  request.tools.clear();
  request.chat.tools.clear();
}

// Reads whether the reply may reason: a variable of the chat template.
void read_thinking(const Fields& fields, GenerationRequest& request) {
  if (fields.find("thinking") == nullptr) return;
  const auto thinking = fields.object("thinking");
  const auto type = thinking.find<std::string>("type").value_or("");
  if (type != "enabled" && type != "disabled" && type != "adaptive") {
    thinking.refuse("type", "enabled, disabled or adaptive");
  }
  request.max_reasoning_tokens = thinking.find<std::int64_t>("budget_tokens", 1, kMost);
  const auto display = thinking.find<std::string>("display").value_or("summarized");
  if (display != "summarized") thinking.refuse("display", "\"summarized\"");
  refuse_others(thinking);
  request.chat.variables = JsonText{{"enable_thinking", type != "disabled"}}.text();
}

// Refuses a conversation that the server is to keep, with the code after which clients send the whole conversation.
void refuse_thread(const Fields& fields) {
  if (fields.find("thread") == nullptr) return;
  throw ApiError(400, "thread: got some, expected none, because this server keeps no conversation of this API",
                 "thread", "thread_unsupported_request");
}

GenerationRequest read_conversation(const Fields& fields, std::string_view text) {
  GenerationRequest request;
  request.shape = Shape::message;
  read_turns(fields, text, request.chat);
  read_custom_tools(fields, text, request);
  read_thinking(fields, request);
  read_output_config(fields, text, request);
  refuse_thread(fields);
  return request;
}

}  // namespace

GenerationRequest parse_message(const nlohmann::json& body, std::string_view text) {
  const auto fields = fields_of(body);
  auto request = read_conversation(fields, text);
  read_common(fields, request, "stop_sequences");
  request.max_tokens = fields.find<std::int64_t>("max_tokens", 0, kMost);
  accept_defaults(fields, Place::anthropic_request);
  refuse_others(fields);
  return request;
}

GenerationRequest parse_message_count(const nlohmann::json& body, std::string_view text) {
  const auto fields = fields_of(body);
  auto request = read_conversation(fields, text);
  request.model = fields.find<std::string>("model").value_or("");
  accept_defaults(fields, Place::anthropic_request);
  refuse_others(fields);
  return request;
}

}  // namespace efla::serve
