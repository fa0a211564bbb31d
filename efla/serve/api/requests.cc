#include "efla/serve/api/requests.h"

#include <algorithm>

#include "efla/serve/api/base64.h"
#include "efla/serve/api/fields.h"

namespace efla::serve {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMostReplies = 128;  // n
constexpr std::size_t kMostPrompts = 2048, kMostStops = 16, kMostCached = 4;

std::int32_t token_id(const nlohmann::json& value, Fields& fields, const std::string& name) {
  if (value.is_number_integer()) {
    const auto id = value.get<std::int64_t>();
    if (id >= 0 && id <= INT32_MAX) return static_cast<std::int32_t>(id);
  }
  fields.refuse(name, "token ids, whole numbers from 0, and not " + short_text(value));
}

std::vector<std::int32_t> token_ids(const nlohmann::json& list, Fields& fields, const std::string& name) {
  std::vector<std::int32_t> ids;
  ids.reserve(list.size());
  for (const auto& value : list) ids.push_back(token_id(value, fields, name));
  return ids;
}

Prompt one_prompt(const nlohmann::json& value, Fields& fields, const std::string& name) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) return token_ids(value, fields, name);
  fields.refuse(name, "a text, a list of token ids, or a list of these");
}

void read_prompts(Fields& fields, GenerationRequest& request) {
  const auto* value = fields.find("prompt");
  if (value == nullptr) return;
  const bool list = value->is_array() && !value->empty() && !value->front().is_number();
  request.one_prompt = !list;
  if (!list) {
    request.prompts.push_back(one_prompt(*value, fields, "prompt"));
    return;
  }
  if (value->size() > kMostPrompts) fields.refuse("prompt", "at most " + std::to_string(kMostPrompts) + " prompts");
  for (const auto& prompt : *value) request.prompts.push_back(one_prompt(prompt, fields, "prompt"));
}

void read_stop(Fields& fields, GenerationRequest& request) {
  if (const auto* stop = fields.find("stop")) {
    const auto list = stop->is_array() ? *stop : nlohmann::json::array({*stop});
    for (const auto& text : list) {
      if (!text.is_string() || text.get_ref<const std::string&>().empty() || list.size() > kMostStops) {
        fields.refuse("stop", "a text or at most " + std::to_string(kMostStops) + " texts, none empty");
      }
      request.stop.push_back(text.get<std::string>());
    }
  }
  if (const auto* ids = fields.find("stop_token_ids")) {
    if (!ids->is_array() || ids->size() > kMostReplies) fields.refuse("stop_token_ids", "a list of token ids");
    request.stop_ids = token_ids(*ids, fields, "stop_token_ids");
  }
}

void read_logit_bias(Fields& fields, SamplingOptions& sampling) {
  const auto* bias = fields.find("logit_bias");
  if (bias == nullptr) return;
  const std::string expected = "an object of token ids, each with a number from -100 to 100";
  if (!bias->is_object()) fields.refuse("logit_bias", expected);
  for (const auto& [name, value] : bias->items()) {
    std::size_t digits = 0;
    while (digits < name.size() && name[digits] >= '0' && name[digits] <= '9') ++digits;
    if (digits == 0 || digits != name.size() || digits > 9 || !value.is_number()) fields.refuse("logit_bias", expected);
    const auto number = value.get<double>();
    if (!(number >= -100 && number <= 100)) fields.refuse("logit_bias", expected);
    sampling.logit_bias[static_cast<std::int32_t>(std::stol(name))] = number;
  }
}

void read_session_name(Fields& fields, const char* name, std::string& into) {
  if (const auto text = fields.text(name)) {
    check_session_name(*text, name);
    into = *text;
  }
}

// The fields that all endpoints of generation share.
void read_common(Fields& fields, GenerationRequest& request) {
  request.model = fields.text("model").value_or("");
  auto& sampling = request.sampling;
  sampling.temperature = fields.number("temperature", 0, 100).value_or(1.0);
  sampling.top_p = fields.number("top_p", 0, 1).value_or(1.0);
  if (sampling.top_p == 0) fields.refuse("top_p", "a number above 0 and at most 1");
  sampling.top_k = std::max<std::int64_t>(0, fields.integer("top_k", -1, kMost).value_or(0));
  sampling.presence_penalty = fields.number("presence_penalty", -2, 2).value_or(0.0);
  sampling.frequency_penalty = fields.number("frequency_penalty", -2, 2).value_or(0.0);
  sampling.repetition_penalty = fields.number("repetition_penalty", 0.01, 100).value_or(1.0);
  read_logit_bias(fields, sampling);
  if (const auto seed = fields.integer("seed", std::numeric_limits<std::int64_t>::min(), kMost)) {
    sampling.seed = static_cast<std::uint64_t>(*seed);
    request.seeded = true;
  }
  read_stop(fields, request);
  request.stream = fields.flag("stream", false);
  fields.text("user");  // whoever the client serves: of no use here
}

void read_stream_options(Fields& fields, GenerationRequest& request) {
  const auto* options = fields.find("stream_options");
  if (options == nullptr) return;
  if (!request.stream) fields.refuse("stream_options", "it with \"stream\": true alone");
  Fields inner(*options, "stream_options");
  request.include_usage = inner.flag("include_usage", false);
  inner.refuse_others();
}

// Sessions, and states that travel with requests.
void read_state(Fields& fields, GenerationRequest& request) {
  read_session_name(fields, "session", request.session);
  read_session_name(fields, "save_as", request.save_as);
  request.disposable = fields.flag("disposable", false);
  if (request.disposable && request.save_as.empty()) fields.refuse("disposable", "it with \"save_as\"");
  request.return_state = fields.flag("return_state", false);
  if (const auto text = fields.text("state")) {
    request.state = from_base64(*text);
    if (!request.state) fields.refuse("state", "a state in base64");
    if (!request.session.empty()) fields.refuse("state", "it without \"session\"");
  }
  if (request.return_state && !request.save_as.empty()) {
    throw ApiError(400, "save_as: got a name with return_state, expected one of the two", "save_as");
  }
}

void read_n(Fields& fields, GenerationRequest& request) {
  request.n = fields.integer("n", 1, kMostReplies).value_or(1);
}

// A state that is kept needs one reply to be the state of.
void require_one_reply(const GenerationRequest& request) {
  const bool keeps = !request.save_as.empty() || request.return_state;
  if (keeps && (request.n > 1 || request.prompts.size() > 1)) {
    throw ApiError(400, "n: got several replies with save_as or return_state, expected one", "n");
  }
}

// Reads the mark of Anthropic's API on a part of a message: {"type": "ephemeral"}.
bool read_cache_control(Fields& fields, const std::string& field) {
  const auto* control = fields.find("cache_control");
  if (control == nullptr) return false;
  Fields inner(*control, field + ".cache_control");
  const auto type = inner.text("type").value_or("");
  if (type != "ephemeral") {
    throw ApiError(400, field + ".cache_control.type: got \"" + type + "\", expected \"ephemeral\"", field);
  }
  inner.refuse_others();
  return true;
}

// Returns a message without its role.
ChatMessage content_of(const nlohmann::json& content, const std::string& field, const std::vector<std::string>& types) {
  if (content.is_string()) return {"", content.get<std::string>()};
  if (!content.is_array()) {
    throw ApiError(400, field + ": got " + short_text(content) + ", expected a text or a list of texts", field);
  }
  ChatMessage message;
  for (const auto& part : content) {
    Fields fields(part, field);
    const auto type = fields.text("type").value_or("");
    if (std::find(types.begin(), types.end(), type) == types.end()) {
      throw ApiError(400, field + ".type: got \"" + type + "\", expected \"" + types.front() + "\"", field);
    }
    message.content += fields.text("text").value_or("");
    message.cached = read_cache_control(fields, field) || message.cached;
    fields.find("annotations");  // of a reply that the client sends back
    fields.find("logprobs");
    fields.refuse_others();
  }
  return message;
}

std::vector<ChatMessage> messages(const nlohmann::json& list, const std::string& name,
                                  const std::vector<std::string>& types) {
  if (!list.is_array() || list.empty()) {
    throw ApiError(400, name + ": got " + short_text(list) + ", expected a list of messages", name);
  }
  std::vector<ChatMessage> chat;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto at = name + "[" + std::to_string(i) + "]";
    Fields fields(list[i], at);
    auto role = fields.text("role").value_or("");
    if (role == "developer") role = "system";
    const auto* content = fields.find("content");
    if (content == nullptr) throw ApiError(400, at + ".content: got nothing, expected a text", name);
    chat.push_back(content_of(*content, at + ".content", types));
    chat.back().role = role;
    for (const char* ignored : {"type", "id", "status"}) fields.text(ignored);  // of a reply that the client sends back
    fields.find("refusal");
    fields.refuse_others();
  }
  const auto cached =
      std::count_if(chat.begin(), chat.end(), [](const ChatMessage& message) { return message.cached; });
  if (std::cmp_greater(cached, kMostCached)) {
    throw ApiError(400,
                   name + ": got " + std::to_string(cached) + " messages with cache_control, expected at most " +
                       std::to_string(kMostCached),
                   name);
  }
  return chat;
}

}  // namespace

void check_session_name(const std::string& name, const std::string& field) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); };
  const bool fits =
      !name.empty() && name.size() <= 100 && letter(name.front()) &&
      std::all_of(name.begin(), name.end(), [&](char c) { return letter(c) || c == '.' || c == '_' || c == '-'; });
  if (fits) return;
  throw ApiError(400,
                 field + ": got " + short_text(name) +
                     ", expected 1 to 100 letters, digits and \"._-\" that begin with a letter or digit",
                 field);
}

GenerationRequest parse_completion(const nlohmann::json& body) {
  Fields fields(body);
  GenerationRequest request;
  read_prompts(fields, request);
  read_common(fields, request);
  read_stream_options(fields, request);
  read_state(fields, request);
  read_n(fields, request);
  request.max_tokens = fields.integer("max_tokens", 0, kMost).value_or(16);
  request.logprobs = fields.integer("logprobs", 0, kMaxLogprobs).value_or(-1);
  request.echo = fields.flag("echo", false);
  request.bos = fields.flag("add_special_tokens");
  request.cache_tokens = fields.integer("cache_tokens", 0, kMost).value_or(0);
  fields.refuse_others();
  const bool continues = !request.session.empty() || request.state.has_value();
  if (request.prompts.empty()) {
    if (!continues)
      throw ApiError(400, "prompt: got nothing, expected a text, token ids, or a list of these", "prompt");
    request.prompts.emplace_back(std::vector<std::int32_t>());
  }
  require_one_reply(request);
  return request;
}

GenerationRequest parse_chat(const nlohmann::json& body) {
  Fields fields(body);
  GenerationRequest request;
  request.shape = Shape::chat;
  const auto* list = fields.find("messages");
  request.chat = messages(list == nullptr ? nlohmann::json() : *list, "messages", {"text"});
  read_common(fields, request);
  read_stream_options(fields, request);
  read_state(fields, request);
  read_n(fields, request);
  request.max_tokens = fields.integer("max_tokens", 0, kMost);
  if (const auto most = fields.integer("max_completion_tokens", 0, kMost)) request.max_tokens = most;
  const bool scored = fields.flag("logprobs", false);
  const auto top = fields.integer("top_logprobs", 0, kMaxLogprobs);
  if (top && !scored) fields.refuse("top_logprobs", "it with \"logprobs\": true alone");
  if (scored) request.logprobs = top.value_or(0);
  fields.refuse_others();
  require_one_reply(request);
  return request;
}

GenerationRequest parse_response(const nlohmann::json& body) {
  Fields fields(body);
  GenerationRequest request;
  request.shape = Shape::response;
  read_common(fields, request);
  request.max_tokens = fields.integer("max_output_tokens", 0, kMost);
  read_session_name(fields, "previous_response_id", request.previous_response);
  request.store = request.disposable = fields.flag("store", true);
  if (const auto instructions = fields.text("instructions")) request.chat.push_back({"system", *instructions});
  const auto* input = fields.find("input");
  if (input == nullptr) throw ApiError(400, "input: got nothing, expected a text or a list of messages", "input");
  if (input->is_string()) {
    request.chat.push_back({"user", input->get<std::string>()});
  } else {
    for (auto& message : messages(*input, "input", {"input_text", "output_text"})) {
      request.chat.push_back(std::move(message));
    }
  }
  fields.refuse_others();
  return request;
}

TokenizeRequest parse_tokenize(const nlohmann::json& body) {
  Fields fields(body);
  TokenizeRequest request;
  fields.text("model");
  const auto text = fields.text("prompt");
  if (!text) throw ApiError(400, "prompt: got nothing, expected a text", "prompt");
  request.text = *text;
  request.bos = fields.flag("add_special_tokens");
  fields.refuse_others();
  return request;
}

std::vector<std::int32_t> parse_detokenize(const nlohmann::json& body) {
  Fields fields(body);
  fields.text("model");
  const auto* tokens = fields.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) {
    throw ApiError(
        400, "tokens: got " + (tokens == nullptr ? "nothing" : short_text(*tokens)) + ", expected a list of token ids",
        "tokens");
  }
  auto ids = token_ids(*tokens, fields, "tokens");
  fields.refuse_others();
  return ids;
}

CreateSessionRequest parse_create_session(const nlohmann::json& body) {
  Fields fields(body);
  CreateSessionRequest request;
  fields.text("model");
  read_session_name(fields, "name", request.name);
  read_session_name(fields, "parent", request.parent);
  if (const auto* prompt = fields.find("prompt")) request.prompt = one_prompt(*prompt, fields, "prompt");
  request.bos = fields.flag("add_special_tokens");
  fields.refuse_others();
  if (!request.prompt && request.parent.empty()) {
    throw ApiError(400, "prompt: got nothing, expected a text or token ids, or a parent to copy", "prompt");
  }
  return request;
}

std::string parse_fork(const nlohmann::json& body) {
  Fields fields(body);
  std::string name;
  read_session_name(fields, "name", name);
  fields.refuse_others();
  return name;
}

std::int64_t parse_rewind(const nlohmann::json& body) {
  Fields fields(body);
  const auto tokens = fields.integer("tokens", 0, kMost);
  fields.refuse_others();
  if (!tokens) throw ApiError(400, "tokens: got nothing, expected the number of tokens to roll back", "tokens");
  return *tokens;
}

}  // namespace efla::serve
