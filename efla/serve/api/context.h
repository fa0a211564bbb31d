// What the requests of a service share, and what several of them need.
#pragma once

#include <chrono>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "efla/engine/engine.h"
#include "efla/io/json_text.h"
#include "efla/serve/api/fields.h"
#include "efla/serve/api/requests.h"
#include "efla/serve/api/state_keys.h"
#include "efla/serve/chat/chat_template.h"
#include "efla/serve/chat/reply_parser.h"
#include "efla/serve/grammar/grammar.h"
#include "efla/serve/grammar/reply_constraint.h"
#include "efla/serve/http/http.h"

namespace efla::serve {

using io::JsonText;

struct ApiOptions {
  std::string model;  // the name that clients use
  std::shared_ptr<const ChatTemplate> chat;
  std::optional<ToolFormat> tool_format = {};  // nothing: what the chat template describes
  bool bos = false;                            // texts begin with the bos token unless the request says otherwise
  std::int64_t max_tokens = 4096;              // of a reply
  std::int64_t max_prompt_tokens = 0;          // 0: no limit
  std::int64_t max_requests_per_key = 0;       // that run at once; 0: no limit
  std::chrono::milliseconds deadline{0};       // of a reply; 0: none
  StateKeys state_keys = {};                   // sign states that leave the server and come back
  std::int64_t kv_bytes_per_token = 0;         // KV cache of a softmax model of the same width, in 16 bits
  std::string page = {};                       // the web page
};

// What the requests of a service share.
struct ApiContext {
  engine::Engine& engine;
  engine::EngineInfo info;
  ApiOptions options;
  std::function<void(HttpServer::Lane, std::function<void()>)> work;  // HttpServer::work
  GrammarCompiler* grammars = nullptr;

  std::mutex mutex{};                                            // guards the members that follow
  std::map<std::string, std::int64_t> running = {};              // requests by client
  std::shared_ptr<const ReasoningTokens> reasoning_tokens = {};  // null: not needed yet
};

// Memory that an exchange holds as long as the object lives. Throws what HttpExchange::hold throws.
class HeldBytes {
 public:
  HeldBytes(HttpExchange& exchange, std::ptrdiff_t bytes) : exchange_(exchange), bytes_(bytes) { exchange.hold(bytes); }
  ~HeldBytes() { exchange_.hold(-bytes_); }
  HeldBytes(const HeldBytes&) = delete;
  HeldBytes& operator=(const HeldBytes&) = delete;

 private:
  HttpExchange& exchange_;
  const std::ptrdiff_t bytes_;
};

// A request on its way to a route. name: the part of the path that NAME stands for in the route's path.
struct Call {
  HttpRequest request;
  std::string client, name;
  std::shared_ptr<HttpExchange> exchange;
};

// Parses a call's body as JSON, frees the body, and returns parse(JSON), or before the body is freed parse(JSON, body).
// The exchange holds the memory of the JSON.
template <class Parse>
auto read_body(Call& call, const Parse& parse) {
  auto& exchange = *call.exchange;
  const auto document = parse_body(call.request.body, [&](std::ptrdiff_t bytes) { exchange.hold(bytes); });
  const auto body = std::ssize(call.request.body);
  const auto free_body = [&] {
    std::string().swap(call.request.body);
    exchange.hold(-body);
  };
  if constexpr (std::is_invocable_v<Parse, const nlohmann::json&>) {
    free_body();
    const HeldBytes request(exchange, document.bytes());  // the request takes at most as much as its JSON
    return parse(document);
  } else {
    const HeldBytes request(exchange, document.bytes());
    auto parsed = parse(document, call.request.body);
    free_body();
    return parsed;
  }
}

// Encodes a text in pieces and calls f with the ids of each piece, in order. All ids together are the ids of the text.
// Between the pieces a request can notice that its client has left. begins: no other text comes before it.
template <class F>
void encode_in_pieces(const data::Tokenizer& tokenizer, std::string_view text, const F& f, bool begins = true) {
  constexpr std::size_t kPiece = 1 << 20;
  while (text.size() > kPiece) {
    std::size_t cut = 0;
    for (std::size_t size = kPiece; cut == 0 && size < text.size(); size *= 2) {
      auto end = size;
      while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // between two characters
      cut = tokenizer.last_cut(text.substr(0, end));
    }
    if (cut == 0) break;
    f(tokenizer.encode_part(text.substr(0, cut), begins));
    begins = false;
    text.remove_prefix(cut);
  }
  f(tokenizer.encode_part(text, begins));
}

// Returns a reply of JSON.
HttpReply json_reply(JsonText value);

// Returns the name of a client's session inside the engine, so that clients do not see each other's sessions.
std::string engine_name(const std::string& client, const std::string& session);

// Throws ApiError about `field` unless the tokenizer has all ids.
void require_ids(const data::Tokenizer& tokenizer, const std::vector<std::int32_t>& ids, const std::string& field);

// The text that a prompt continues: as SessionInfo::pending; nothing: the prompt begins a text.
using Pending = std::optional<std::int64_t>;

// Returns the number of ids that are added before the ids of a prompt that is a text: 1 for the bos token, otherwise 0.
std::size_t bos_ids(const ApiContext& context, bool bos, const Pending& from);

// Returns the ids of a prompt, with a bos token if `bos` and the prompt begins a text. Throws ApiError about `field`.
// The exchange holds the memory of the ids.
std::vector<std::int32_t> encode_prompt(const ApiContext& context, const Prompt& prompt, bool bos, const Pending& from,
                                        const std::string& field, HttpExchange& exchange);

// Returns the ids of a text in the pieces of ChatText: finds special tokens in the template's text alone. Otherwise as
// above.
std::vector<std::int32_t> encode_chat(const ApiContext& context, std::span<const std::string> text, bool bos,
                                      const Pending& from, const std::string& field, HttpExchange& exchange);

// Take a state that a client sent in the field "state", the first one as a session with this name of the engine's.
// Throw ApiError about the field.
void load_state(ApiContext& context, const std::string& name, std::string_view state);
engine::HeldText read_state(ApiContext& context, std::string_view state);

// Throws ApiError unless `model` is empty or names the model that is served.
void check_model(const ApiContext& context, const std::string& model);

// Throws ApiError for a request of the engine that ended with an error, or that the server's stop has cancelled.
void require_success(const engine::Finish& finish);

// Calls a function when the engine has finished a request that no client waits for token by token.
class Continuation : public engine::Listener {
 public:
  explicit Continuation(std::function<void(const engine::Finish&)> finished) : finished_(std::move(finished)) {}
  void token(const engine::Token&) override {}
  void finish(const engine::Finish& finish) override { finished_(finish); }

 private:
  std::function<void(const engine::Finish&)> finished_;
};

// Counts a request of a client as running for as long as the result lives. Throws ApiError with status 429 where the
// client has too many already.
std::shared_ptr<void> take_place(ApiContext& context, const std::string& client);

// Returns the tokenizer's tokens that matter to the tags of reasoning.
std::shared_ptr<const ReasoningTokens> reasoning_tokens(ApiContext& context);

// Returns a name that no other session of this process has.
std::string random_name(const std::string& prefix);

}  // namespace efla::serve
