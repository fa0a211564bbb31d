// What clients ask for: the JSON of requests, checked and converted. Knows neither the engine's state nor HTTP.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "efla/engine/engine.h"
#include "efla/serve/chat/message.h"
#include "efla/serve/chat/tool.h"
#include "efla/serve/grammar/grammar.h"

namespace efla::serve {

using Prompt = std::variant<std::string, std::vector<std::int32_t>>;

// The shape of the reply.
enum class Shape { completion, chat, response, message };

struct GenerationRequest {
  Shape shape = Shape::completion;
  std::string model;                // empty: not said
  std::vector<Prompt> prompts;      // of a completion
  Chat chat = {};                   // otherwise
  std::vector<Tool> tools = {};     // that the reply may call
  bool one_call = false;            // the reply may call one tool at most
  bool must_call = false;           // it calls a tool
  std::string called = {};          // of this name; empty: any
  bool strict_calls = false;        // a tool has a schema that its calls follow
  std::string response_tools = {};  // of a response, as the client wrote them
  std::string response_text = {};   // the field `text`, as the client wrote it
  bool one_prompt = true;           // the prompt was not a list of prompts
  std::int64_t n = 1;               // replies per prompt
  std::optional<std::int64_t> max_tokens;
  const char* max_tokens_field = "max_tokens";  // the field that gave max_tokens
  engine::RequestSampling sampling;
  bool seeded = false;  // the client chose sampling.seed
  std::vector<std::string> stop;
  std::vector<std::int32_t> stop_token_ids;
  std::optional<GrammarSource> grammar = {};  // that every reply follows, behind its reasoning
  std::string grammar_field = {};             // of the request that has it
  std::optional<std::int64_t> max_reasoning_tokens = {};
  std::int64_t logprobs = -1;
  std::int64_t cache_tokens = 0;  // of every prompt of a completion: Request::cache_after
  bool echo = false, stream = false, include_usage = false;
  std::optional<bool> bos;           // whether a text begins with the bos token
  std::string session, save_as;      // names of sessions
  bool disposable = false;           // the stored state may be dropped
  std::optional<std::string> state;  // bytes of a session to continue
  bool return_state = false;
  std::string previous_response;  // of a response
  bool store = false;             // under the response's id
};

// Parse the bodies of the endpoints. Throw ApiError with status 400. text: what the body was parsed from, because chat
// templates and grammars have the members of objects in the client's order.
GenerationRequest parse_completion(const nlohmann::json& body, std::string_view text);
GenerationRequest parse_chat(const nlohmann::json& body, std::string_view text);
GenerationRequest parse_response(const nlohmann::json& body, std::string_view text);
GenerationRequest parse_message(const nlohmann::json& body, std::string_view text);
GenerationRequest parse_message_count(const nlohmann::json& body, std::string_view text);  // the conversation alone

struct TokenizeRequest {
  std::string text;
  std::optional<bool> bos;
};
TokenizeRequest parse_tokenize(const nlohmann::json& body);
std::vector<std::int32_t> parse_detokenize(const nlohmann::json& body);

struct CreateSessionRequest {
  std::string name;  // empty: the server chooses one
  std::optional<Prompt> prompt;
  std::string parent;
  std::optional<bool> bos;
};
CreateSessionRequest parse_create_session(const nlohmann::json& body);
std::string parse_fork(const nlohmann::json& body);  // the copy's name, or ""
std::int64_t parse_rewind(const nlohmann::json& body);

// Throws ApiError unless a session may have this name: 1 to 100 letters, digits and "._-", first a letter or digit.
void check_session_name(const std::string& name, const std::string& field);

}  // namespace efla::serve
