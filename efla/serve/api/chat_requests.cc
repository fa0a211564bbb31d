// The bodies of chat completions and of responses.
#include <algorithm>
#include <map>
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

// Reads a text, or a list of parts of one of the types.
void read_text(const Fields& fields, const std::string& name, const std::vector<std::string>& types,
               ChatMessage& message) {
  const auto* content = fields.find(name);
  if (content == nullptr) fields.refuse(name, "a text");
  if (content->is_string()) {
    message.content = content->get<std::string>();
    return;
  }
  if (!content->is_array()) fields.refuse(name, "a text or a list of texts");
  for_each_object(fields, name, *content, [&](const Fields& part, std::size_t) {
    const auto type = part.find<std::string>("type").value_or("");
    if (std::ranges::find(types, type) == types.end()) part.refuse("type", "\"" + types.front() + "\"");
    message.content += part.find<std::string>("text").value_or("");
    message.cached = read_cache_control(part) || message.cached;
    accept_defaults(part, Place::content_part);
    refuse_others(part);
  });
}

// Reads name and arguments of a call. Some clients send no text for a call without arguments.
void read_call(const Fields& fields, ToolCall& call) {
  call.name = fields.get<std::string>("name");
  call.arguments = fields.find<std::string>("arguments").value_or("");
  if (call.arguments.empty()) call.arguments = "{}";
  if (!is_json_object(call.arguments)) fields.refuse("arguments", "a JSON object as text");
}

void read_calls(const Fields& message, ChatMessage& into) {
  const auto* list = find_list(message, "tool_calls", "a list of calls");
  if (list == nullptr) return;
  for_each_object(message, "tool_calls", *list, [&](const Fields& fields, std::size_t) {
    auto& call = into.tool_calls.emplace_back();
    call.id = fields.find<std::string>("id").value_or("");
    if (fields.find<std::string>("type").value_or("function") != "function") fields.refuse("type", "\"function\"");
    fields.find<std::int64_t>("index");  // of the events of a stream
    const auto function = fields.object("function");
    read_call(function, call);
    refuse_others(function);
    refuse_others(fields);
  });
}

// Reads a message of either endpoint. types: of the parts of its content.
ChatMessage read_message(const Fields& fields, const std::vector<std::string>& types, std::string field) {
  ChatMessage message{.role = fields.find<std::string>("role").value_or(""), .field = std::move(field)};
  if (message.role == "developer") message.role = "system";
  if (message.role == "assistant") {
    read_calls(fields, message);
    for (const char* name : {"reasoning_content", "reasoning"}) {
      if (const auto text = fields.find<std::string>(name)) message.reasoning = *text;
    }
  }
  const bool empty = fields.find("content") == nullptr;
  if (!empty || message.tool_calls.empty()) read_text(fields, "content", types, message);
  message.tool_call_id = fields.find<std::string>("tool_call_id").value_or("");
  message.name = fields.find<std::string>("name").value_or("");
  for (const char* ignored : {"type", "id", "status"}) {
    fields.find<std::string>(ignored);  // of a reply that the client sends back
  }
  accept_defaults(fields, Place::message);
  refuse_others(fields);
  return message;
}

// Returns the assistant's message that a reasoning, a message or a call of a response's output belongs to.
ChatMessage& assistant(std::vector<ChatMessage>& chat, const std::string& field) {
  if (chat.empty() || chat.back().role != "assistant") chat.push_back({.role = "assistant", .field = field});
  return chat.back();
}

void read_reasoning(const Fields& fields, ChatMessage& into) {
  for (const char* list : {"summary", "content"}) {
    const auto* parts = find_list(fields, list, "a list of texts");
    if (parts == nullptr) continue;
    for_each_object(fields, list, *parts, [&](const Fields& part, std::size_t) {
      part.find<std::string>("type");
      const auto text = part.get<std::string>("text");
      if (list == std::string_view("content")) into.reasoning += text;
      refuse_others(part);
    });
  }
}

// Reads an item of a response's input. Returns false for a message, which it leaves to the caller.
bool read_item(const Fields& fields, const std::string& field, std::vector<ChatMessage>& chat) {
  const auto type = fields.find<std::string>("type").value_or("message");
  if (type == "reasoning") {
    read_reasoning(fields, assistant(chat, field));
    fields.find("encrypted_content");
  } else if (type == "function_call") {
    auto& call = assistant(chat, field).tool_calls.emplace_back();
    call.id = fields.get<std::string>("call_id");
    read_call(fields, call);
  } else if (type == "function_call_output") {
    auto& message = chat.emplace_back(ChatMessage{.role = "tool", .field = field});
    message.tool_call_id = fields.get<std::string>("call_id");
    read_text(fields, "output", {"input_text", "output_text"}, message);
  } else if (type == "message") {
    return false;
  } else {
    fields.refuse("type", "message, reasoning, function_call or function_call_output");
  }
  for (const char* ignored : {"id", "status"}) fields.find<std::string>(ignored);
  refuse_others(fields);
  return true;
}

// Adds a message of a response's input. The reply's items before it belong to the same message.
void add_message(ChatMessage message, std::vector<ChatMessage>& chat) {
  const bool joins = message.role == "assistant" && !chat.empty() && chat.back().role == "assistant" &&
                     chat.back().content.empty() && chat.back().tool_calls.empty();
  if (!joins) return chat.push_back(std::move(message));
  message.reasoning.insert(0, chat.back().reasoning);
  message.field = std::move(chat.back().field);
  chat.back() = std::move(message);
}

void read_messages(const Fields& fields, const std::string& name, bool items, std::vector<ChatMessage>& chat) {
  const auto* list = fields.find(name);
  if (list == nullptr || !list->is_array()) fields.refuse(name, "a list of messages");
  if (list->empty()) fields.refuse(name, "at least one message");
  const std::vector<std::string> types =
      items ? std::vector<std::string>{"input_text", "output_text"} : std::vector<std::string>{"text"};
  for_each_object(fields, name, *list, [&](const Fields& message, std::size_t i) {
    const auto field = place(name, i) + ".role";
    if (items && read_item(message, field, chat)) return;
    auto read = read_message(message, types, field);
    items ? add_message(std::move(read), chat) : chat.push_back(std::move(read));
  });
  require_few_marks(chat, name);
}

// Reads name, schema and other fields of a tool. written: the object as the client wrote it.
void read_tool(const Fields& fields, std::string_view written, GenerationRequest& request) {
  const auto* schema = fields.find("parameters");
  if (schema != nullptr && !schema->is_object()) fields.refuse("parameters", "a JSON schema");
  fields.find<std::string>("description");
  auto tool = make_tool(fields.get<std::string>("name"), schema == nullptr ? nlohmann::json() : *schema);
  read_strict(fields, written, "parameters", tool, request);
  request.tools.push_back(std::move(tool));
  refuse_others(fields);
}

// Reads which tools the reply may or must call. Returns whether it may call any.
bool read_tool_choice(const Fields& fields, GenerationRequest& request) {
  const auto* choice = fields.find("tool_choice");
  if (choice == nullptr || *choice == "auto") return true;
  if (*choice == "none") return false;
  request.must_call = true;
  if (*choice == "required") return true;
  if (!choice->is_object()) fields.refuse("tool_choice", "auto, none, required, or a function");
  const auto named = fields.object("tool_choice");
  if (named.find<std::string>("type") != "function") named.refuse("type", "\"function\"");
  const bool chat = request.shape == Shape::chat;
  request.called = chat ? named.object("function").get<std::string>("name") : named.get<std::string>("name");
  refuse_others(named);
  return true;
}

// Returns a tool of a response as a tool of a chat. text: the tool as the client wrote it.
JsonText chat_tool(std::string_view text) {
  JsonText function = JsonText::object();
  for (const char* name : {"name", "description", "parameters"}) {
    const auto value = json_member(text, name);
    if (!value.empty()) function.add(name, JsonText::json(std::string(value)));
  }
  return {{"type", "function"}, {"function", function}};
}

// Reads the tools, and what the client says about their use.
void read_tools(const Fields& fields, std::string_view text, GenerationRequest& request) {
  request.one_call = !fields.find<bool>("parallel_tool_calls").value_or(true);
  const bool may_call = read_tool_choice(fields, request);
  const auto* list = find_list(fields, "tools", "a list of tools");
  if (list == nullptr || list->empty() || !may_call) return require_called(request);
  const bool chat = request.shape == Shape::chat;
  const auto written = json_member(text, "tools");
  const auto slices = json_elements(written);
  if (!chat) request.response_tools = written;
  JsonText tools = JsonText::array();
  for_each_object(fields, "tools", *list, [&](const Fields& tool, std::size_t i) {
    if (tool.find<std::string>("type") != "function") tool.refuse("type", "\"function\"");
    chat ? read_tool(tool.object("function"), json_member(slices.at(i), "function"), request)
         : read_tool(tool, slices.at(i), request);
    if (chat) refuse_others(tool);
    tools.push_back(chat ? JsonText::json(std::string(slices.at(i))) : chat_tool(slices.at(i)));
  });
  request.chat.tools = std::move(tools).text();
  require_called(request);
}

// Reads the variables of the chat template.
void read_variables(const Fields& fields, std::string_view text, Chat& chat) {
  JsonText variables = JsonText::object();
  if (fields.find("chat_template_kwargs") != nullptr) {
    const auto given = fields.object("chat_template_kwargs");
    for (const char* name : {"messages", "tools", "documents", "add_generation_prompt"}) {
      if (given.find(name) != nullptr) given.refuse(name, "no variable that the request has a field for");
    }
    std::map<std::string, std::string_view> values;  // of a name that is given twice the last one
    for (const auto& member : json_members(json_member(text, "chat_template_kwargs"))) {
      if (member.value != "null") values[member.name] = member.value;
    }
    for (const auto& [name, value] : values) variables.add(name, JsonText::json(std::string(value)));
    if (given.find("enable_thinking") != nullptr && fields.find("enable_thinking") != nullptr) {
      fields.refuse("enable_thinking", "it in chat_template_kwargs or beside it, but not in both places");
    }
  }
  if (const auto thinking = fields.find<bool>("enable_thinking")) variables.add("enable_thinking", *thinking);
  if (!variables.is_empty()) chat.variables = std::move(variables).text();
  if (const auto* documents = find_list(fields, "documents", "a list of objects"); documents != nullptr) {
    for (const auto& document : *documents) {
      if (!document.is_object()) fields.refuse("documents", "a list of objects");
    }
    chat.documents = json_member(text, "documents");
  }
}

void read_budget(const Fields& fields, GenerationRequest& request) {
  request.max_reasoning_tokens = fields.find<std::int64_t>("max_reasoning_tokens", 0, kMost);
}

void read_ends(const Fields& fields, Chat& chat) {
  chat.begins_reply = fields.find<bool>("add_generation_prompt").value_or(true);
  chat.continues_last = fields.find<bool>("continue_final_message").value_or(false);
  if (chat.continues_last && fields.find<bool>("add_generation_prompt").value_or(false)) {
    fields.refuse("continue_final_message", "false with \"add_generation_prompt\": true");
  }
}

}  // namespace

const nlohmann::json* find_list(const Fields& fields, const std::string& name, const std::string& expected) {
  const auto* list = fields.find(name);
  if (list != nullptr && !list->is_array()) fields.refuse(name, expected);
  return list;
}

bool read_cache_control(const Fields& fields) {
  if (fields.find("cache_control") == nullptr) return false;
  const auto control = fields.object("cache_control");
  if (control.find<std::string>("type") != "ephemeral") control.refuse("type", "\"ephemeral\"");
  const auto time = control.find<std::string>("ttl").value_or("5m");  // cached states have no time of their own
  if (time != "5m" && time != "1h") control.refuse("ttl", "\"5m\" or \"1h\"");
  refuse_others(control);
  return true;
}

void require_few_marks(const std::vector<ChatMessage>& chat, const std::string& name) {
  constexpr std::size_t kMostCached = 4;
  const auto cached = std::ranges::count_if(chat, &ChatMessage::cached);
  if (std::cmp_less_equal(cached, kMostCached)) return;
  throw ApiError(400,
                 name + ": got " + std::to_string(cached) + " messages with cache_control, expected at most " +
                     std::to_string(kMostCached),
                 name);
}

GenerationRequest parse_chat(const nlohmann::json& body, std::string_view text) {
  const auto fields = fields_of(body);
  GenerationRequest request;
  request.shape = Shape::chat;
  read_messages(fields, "messages", /*items=*/false, request.chat.messages);
  read_tools(fields, text, request);
  read_structured_output(fields, text, request);
  read_budget(fields, request);
  read_variables(fields, text, request.chat);
  read_ends(fields, request.chat);
  read_common(fields, request);
  read_stream_options(fields, request);
  read_state(fields, request);
  read_n(fields, request);
  request.max_tokens = fields.find<std::int64_t>("max_tokens", 0, kMost);
  if (const auto most = fields.find<std::int64_t>("max_completion_tokens", 0, kMost)) {
    request.max_tokens = most;
    request.max_tokens_field = "max_completion_tokens";
  }
  const bool scored = fields.find<bool>("logprobs").value_or(false);
  const auto top = fields.find<std::int64_t>("top_logprobs", 0, engine::kMaxLogprobs);
  if (top.value_or(0) > 0 && !scored) fields.refuse("top_logprobs", "only with \"logprobs\": true");
  if (scored) request.logprobs = top.value_or(0);
  accept_defaults(fields, Place::generation);
  refuse_others(fields);
  require_one_reply(request);
  return request;
}

GenerationRequest parse_response(const nlohmann::json& body, std::string_view text) {
  const auto fields = fields_of(body);
  GenerationRequest request;
  request.shape = Shape::response;
  read_common(fields, request);
  request.max_tokens_field = "max_output_tokens";
  request.max_tokens = fields.find<std::int64_t>(request.max_tokens_field, 0, kMost);
  read_session_name(fields, "previous_response_id", request.previous_response);
  request.store = request.disposable = fields.find<bool>("store").value_or(true);
  auto& messages = request.chat.messages;
  if (const auto instructions = fields.find<std::string>("instructions"))
    messages.push_back({.role = "system", .content = *instructions, .field = "instructions"});
  const auto* input = fields.find("input");
  if (input == nullptr) fields.refuse("input", "a text or a list of messages");
  if (input->is_string()) {
    messages.push_back({.role = "user", .content = input->get<std::string>(), .field = "input"});
  } else {
    read_messages(fields, "input", /*items=*/true, messages);
  }
  read_tools(fields, text, request);
  read_structured_output(fields, text, request);
  read_budget(fields, request);
  read_variables(fields, text, request.chat);
  accept_defaults(fields, Place::generation);
  refuse_others(fields);
  return request;
}

}  // namespace efla::serve
