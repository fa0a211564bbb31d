// What the requests of a service share, and what several of them need.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "efla/serve/api/chat_template.h"
#include "efla/serve/api/fields.h"
#include "efla/serve/api/json_text.h"
#include "efla/serve/api/requests.h"
#include "efla/serve/api/state_keys.h"
#include "efla/serve/engine.h"
#include "efla/serve/http/http.h"

namespace efla::serve {

struct ApiOptions {
  std::string model;  // the name that clients use
  ChatTemplate chat;
  bool bos = false;                       // texts begin with the bos token unless the request says otherwise
  std::int64_t max_tokens = 4096;         // of a reply
  std::int64_t max_prompt_tokens = 0;     // 0: no limit
  std::int64_t max_requests_per_key = 0;  // that run at once; 0: no limit
  std::chrono::milliseconds deadline{0};  // of a reply; 0: none
  StateKeys state_keys = {};              // sign states that leave the server and come back
  std::int64_t kv_bytes_per_token = 0;    // KV cache of a softmax model of the same width, in 16 bits
  std::string page = {};                  // the web page
};

// What the requests of a service share.
struct ApiContext {
  Engine& engine;
  EngineInfo info;
  ApiOptions options;
  std::function<void(std::function<void()>)> work;  // calls a function on the thread for work
  std::atomic<std::uint64_t> next_name = 0;

  std::mutex mutex{};                                // guards `running`
  std::map<std::string, std::int64_t> running = {};  // requests by client
};

// A request on its way to a route. name: the part of the path that NAME stands for in the route's path.
struct Call {
  HttpRequest request;
  std::string client, name;
  std::shared_ptr<HttpExchange> exchange;
};

// Returns a reply of JSON.
HttpReply json_reply(JsonText value);

// Returns the name of a client's session inside the engine, so that clients do not see each other's sessions.
std::string engine_name(const std::string& client, const std::string& session);

// Throws ApiError about `field` unless the tokenizer has all ids.
void require_ids(const data::Tokenizer& tokenizer, const std::vector<std::int32_t>& ids, const std::string& field);

// Returns how many ids stand before the ids of a prompt that is a text: 1 if the bos token begins the text.
std::size_t bos_ids(const ApiContext& context, bool bos, const std::string& from);

// Returns the ids of a prompt. Throws ApiError about `field`. from: the engine's name of the session that the prompt
// continues; empty: the prompt begins a text, with a bos token if `bos`.
std::vector<std::int32_t> encode_prompt(const ApiContext& context, const Prompt& prompt, bool bos,
                                        const std::string& from, const std::string& field);

// Stores a state that a client sent in the field "state", under the engine's name of a session. Throws ApiError about
// the field.
void load_state(ApiContext& context, const std::string& name, std::string_view state);

// Throws ApiError unless `model` is empty or names the model that is served.
void check_model(const ApiContext& context, const std::string& model);

// Calls a function when the engine has finished a request that no client waits for token by token.
class Continuation : public Listener {
 public:
  explicit Continuation(std::function<void(const Finish&)> finished) : finished_(std::move(finished)) {}
  void token(const Token&) override {}
  void finish(const Finish& finish) override { finished_(finish); }

 private:
  std::function<void(const Finish&)> finished_;
};

// Counts a request of a client as running for as long as the result lives. Throws ApiError with status 429 where the
// client has too many already.
std::shared_ptr<void> take_place(ApiContext& context, const std::string& client);

// Returns a name that no other session of this process has.
std::string random_name(const std::string& prefix);

}  // namespace efla::serve
