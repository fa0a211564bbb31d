#include "efla/serve/api/service.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <span>
#include <thread>
#include <variant>
#include <vector>

#include "efla/base/printable.h"
#include "efla/base/utf8.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/fields.h"
#include "efla/serve/api/formats.h"
#include "efla/serve/api/metrics.h"
#include "efla/serve/api/sessions.h"
#include "efla/serve/http/syntax.h"

namespace efla::serve {
namespace {

constexpr std::size_t kQuickBody = 64 << 10;  // bytes; a request with a larger body keeps no other one waiting
constexpr std::chrono::milliseconds kLongestEnd{2'000};  // for the work of requests that the stop has cancelled

// Returns the decoded parts of a path, which each follow a "/". Throws ApiError with status 400.
std::vector<std::string> decoded_parts(std::string_view path) {
  std::vector<std::string> parts;
  while (path.starts_with('/')) {
    const auto end = std::min(path.find('/', 1), path.size());
    const auto part = percent_decoded(path.substr(1, end - 1));
    if (!part || utf8_prefix(*part) != part->size()) {
      throw ApiError(400, "the path " + printable(path, 100) + " is not percent-encoded UTF-8");
    }
    parts.push_back(*part);
    path.remove_prefix(end);
  }
  return parts;
}

// Returns whether a path has a route's pattern. Sets `name` to the part of the path that NAME stands for.
bool matches(std::string_view pattern, const std::vector<std::string>& parts, std::string& name) {
  for (const auto& part : parts) {
    if (pattern.empty()) return false;
    const auto end = std::min(pattern.find('/', 1), pattern.size());
    const auto expected = pattern.substr(1, end - 1);
    if (expected == "NAME" ? part.empty() : part != expected) return false;
    if (expected == "NAME") name = part;
    pattern.remove_prefix(end);
  }
  return pattern.empty();
}

// Returns the bytes of a chat, and of the texts that its template makes of them: the whole one and its beginnings.
std::size_t bytes_of(const Chat& chat) {
  std::size_t copies = 2, bytes = 0, texts = chat.tools.size() + chat.documents.size() + chat.variables.size();
  for (const auto& message : chat.messages) {
    copies += message.cached ? 1 : 0;
    bytes += sizeof(message) + message.tool_calls.size() * sizeof(ToolCall);
    texts += message.content.size() + message.reasoning.size() + message.name.size() + message.tool_call_id.size();
    for (const auto& call : message.tool_calls) texts += call.id.size() + call.name.size() + call.arguments.size();
  }
  return bytes + copies * texts;
}

// Returns the bytes of a request: its texts and ids, and what each of its replies needs in order to find the stop
// strings and to change the logits.
std::size_t bytes_of(const GenerationRequest& request) {
  constexpr std::size_t kStopCopies = 4, kStopTable = 10, kBiasNode = 64;
  const auto replies = static_cast<std::size_t>(request.n) * std::max<std::size_t>(1, request.prompts.size());
  std::size_t bytes = request.state ? request.state->size() : 0;
  for (const auto& prompt : request.prompts) {
    const auto* text = std::get_if<std::string>(&prompt);
    bytes += text != nullptr ? text->size() : sizeof(std::int32_t) * std::get<1>(prompt).size();
  }
  bytes += bytes_of(request.chat) + request.response_tools.size() + request.response_text.size();
  if (request.grammar) bytes += request.grammar->text.size();
  for (const auto& text : request.stop) bytes += (kStopCopies + kStopTable * replies) * text.size();
  return bytes + kBiasNode * (1 + replies) * request.sampling.logit_bias.size();
}

bool is_json_type(std::string_view content_type) {
  auto type = content_type.substr(0, content_type.find(';'));
  while (type.ends_with(' ') || type.ends_with('\t')) type.remove_suffix(1);
  return lowercase(type) == "application/json";
}

// Returns the shape of errors at a path.
ErrorShape error_shape(std::string_view path) {
  return path.starts_with("/v1/messages") ? ErrorShape::anthropic : ErrorShape::openai;
}

}  // namespace

class Service::Implementation {
 public:
  Implementation(engine::Engine& engine, ApiOptions options, Keys keys, const HttpOptions& http)
      : keys_(std::move(keys)),
        context_{
            .engine = engine,
            .info = engine.info(),
            .options = std::move(options),
            .work = [this](HttpServer::Lane lane, std::function<void()> task) { server_.work(lane, std::move(task)); }},
        server_(
            http, [this](const HttpRequest& head) { return check(head); },
            [this](HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
              handle(std::move(request), std::move(exchange));
            }),
        grammars_(*context_.info.tokenizer) {
    context_.grammars = &grammars_;
  }

  const std::string& address() const { return server_.address(); }

  bool run(std::chrono::milliseconds grace, bool signals) {
    if (signals) {
      server_.run([this, grace] { stop(stopping_ ? std::chrono::milliseconds(0) : grace); });
    } else {
      server_.run();
    }
    ended_ = true;
    // Requests that the stop has cancelled end with the engine's next step. A request that the worker has only begun is
    // not counted as running yet, and would outlive this object.
    const auto late = engine::Clock::now() + kLongestEnd;
    while (!idle()) {
      if (engine::Clock::now() > late) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  void stop(std::chrono::milliseconds grace) {
    stopping_ = true;
    server_.stop(grace);
  }

 private:
  using Member = void (Implementation::*)(Call&);
  // quick: runs on the server's thread. open: needs no key. json: takes a body of JSON.
  struct Route {
    const char *method, *path;
    Member run;
    bool quick = false, open = false, json = false;
  };
  static const std::vector<Route>& routes();

  // Returns the route of a request. Sets `name` to the part of the path that NAME stands for. Throws ApiError with
  // status 400, 404 or 405.
  const Route& find(const HttpRequest& head, std::string& name) const;

  // Returns the name of the request's client; nothing for a wrong key.
  std::optional<std::string> client_of(const HttpRequest& head) const {
    const bool alone = head.authorization.empty() && !head.api_key.empty();
    return alone ? keys_.client_of_key(head.api_key) : keys_.client(head.authorization);
  }
  std::optional<HttpReply> check(const HttpRequest& head);
  void handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange);
  void run_route(const Route& route, Call& call);

  void page(Call& call) {
    call.exchange->reply(
        {.body = context_.options.page,
         .type = "text/html; charset=utf-8",
         .fields = {"Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; style-src "
                    "'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                    "frame-ancestors 'none'",
                    "X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer"}});
  }
  void health(Call& call) {
    call.exchange->reply(
        stopping_ ? HttpReply{.status = 503, .body = R"({"status":"stopping"})", .fields = {"Retry-After: 1"}}
                  : HttpReply{.body = R"({"status":"ok"})"});
  }
  void metrics(Call& call);
  void models(Call& call) {
    JsonText list = JsonText::array();
    list.push_back(model_json());
    call.exchange->reply(json_reply({{"object", "list"}, {"data", list}}));
  }
  void model(Call& call) {
    check_model(context_, call.name);
    call.exchange->reply(json_reply(model_json()));
  }
  void completions(Call& call) { generate(call, read_body(call, parse_completion)); }
  void chat(Call& call) { generate(call, read_body(call, parse_chat)); }
  void responses(Call& call) { generate(call, read_body(call, parse_response)); }
  void messages(Call& call) { generate(call, read_body(call, parse_message)); }
  void count_message(Call& call) {
    auto request = read_body(call, parse_message_count);
    call.exchange->hold(static_cast<std::ptrdiff_t>(bytes_of(request)));
    call.exchange->reply(json_reply({{"input_tokens", count_prompt(context_, std::move(request), *call.exchange)}}));
  }
  void delete_response(Call& call) { serve::delete_response(context_, call); }
  void tokenize(Call& call);
  void detokenize(Call& call);
  void tokenizer_info(Call& call);
  void list_sessions(Call& call) { serve::list_sessions(context_, call); }
  void create_session(Call& call) { serve::create_session(context_, call); }
  void show_session(Call& call) { serve::show_session(context_, call); }
  void delete_session(Call& call) { serve::delete_session(context_, call); }
  void fork_session(Call& call) { serve::fork_session(context_, call); }
  void rewind_session(Call& call) { serve::rewind_session(context_, call); }
  void download_state(Call& call) { serve::download_state(context_, call); }
  void upload_state(Call& call) { serve::upload_state(context_, call); }
  void generate(Call& call, GenerationRequest request) {
    call.exchange->hold(static_cast<std::ptrdiff_t>(bytes_of(request)));
    start_generation(context_, std::move(request), call.client, call.exchange);
  }
  bool idle() {
    const std::lock_guard lock(context_.mutex);
    return queued_ == 0 && context_.running.empty();
  }
  JsonText model_json() const;

  Keys keys_;
  std::int64_t started_ =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::atomic<bool> stopping_ = false, ended_ = false;
  std::atomic<std::int64_t> queued_ = 0;  // requests that wait for a worker, or that one handles
  ApiContext context_;
  HttpServer server_;
  GrammarCompiler grammars_;  // its thread gives the server work
};

const std::vector<Service::Implementation::Route>& Service::Implementation::routes() {
  using I = Implementation;
  static const std::vector<Route> kRoutes{
      {.method = "GET", .path = "/", .run = &I::page, .quick = true, .open = true},
      {.method = "GET", .path = "/health", .run = &I::health, .quick = true, .open = true},
      {.method = "GET", .path = "/metrics", .run = &I::metrics, .quick = true},
      {.method = "GET", .path = "/v1/models", .run = &I::models, .quick = true},
      {.method = "GET", .path = "/v1/models/NAME", .run = &I::model, .quick = true},
      {.method = "POST", .path = "/v1/completions", .run = &I::completions, .json = true},
      {.method = "POST", .path = "/v1/chat/completions", .run = &I::chat, .json = true},
      {.method = "POST", .path = "/v1/responses", .run = &I::responses, .json = true},
      {.method = "DELETE", .path = "/v1/responses/NAME", .run = &I::delete_response},
      {.method = "POST", .path = "/v1/messages", .run = &I::messages, .json = true},
      {.method = "POST", .path = "/v1/messages/count_tokens", .run = &I::count_message, .json = true},
      {.method = "POST", .path = "/tokenize", .run = &I::tokenize, .json = true},
      {.method = "POST", .path = "/detokenize", .run = &I::detokenize, .json = true},
      {.method = "GET", .path = "/tokenizer_info", .run = &I::tokenizer_info, .quick = true},
      {.method = "GET", .path = "/v1/sessions", .run = &I::list_sessions},
      {.method = "POST", .path = "/v1/sessions", .run = &I::create_session, .json = true},
      {.method = "GET", .path = "/v1/sessions/NAME", .run = &I::show_session},
      {.method = "DELETE", .path = "/v1/sessions/NAME", .run = &I::delete_session},
      {.method = "POST", .path = "/v1/sessions/NAME/fork", .run = &I::fork_session, .json = true},
      {.method = "POST", .path = "/v1/sessions/NAME/rewind", .run = &I::rewind_session, .json = true},
      {.method = "GET", .path = "/v1/sessions/NAME/state", .run = &I::download_state},
      {.method = "PUT", .path = "/v1/sessions/NAME/state", .run = &I::upload_state},
  };
  return kRoutes;
}

const Service::Implementation::Route& Service::Implementation::find(const HttpRequest& head, std::string& name) const {
  const auto method = head.method == "HEAD" ? std::string("GET") : head.method;
  const auto parts = decoded_parts(head.path);
  std::string methods;
  for (const auto& route : routes()) {
    if (!matches(route.path, parts, name)) continue;
    if (route.method == method) return route;
    methods += (methods.empty() ? "" : ", ") + std::string(route.method);
    if (methods.ends_with("GET")) methods += ", HEAD";
  }
  const auto path = printable(head.path, 100);
  if (methods.empty()) throw ApiError(404, "there is no " + path, "", "not_found");
  ApiError error(405, path + " has no method " + printable(head.method, 20) + ", expected " + methods);
  error.allow = methods;
  throw error;
}

std::optional<HttpReply> Service::Implementation::check(const HttpRequest& head) {
  try {
    std::string name;
    const auto& route = find(head, name);
    if (!route.open && !client_of(head)) {
      throw ApiError(401,
                     "the request needs the header \"Authorization: Bearer KEY\" or \"x-api-key: KEY\" with a key of "
                     "this server",
                     "", "invalid_api_key");
    }
    // A browser sends no JSON from a page of another origin unless the server allows the origin (CORS).
    if (!head.content_encoding.empty() && lowercase(head.content_encoding) != "identity") {
      throw ApiError(415, "Content-Encoding: got \"" + printable(head.content_encoding, 100) + "\", expected none");
    }
    if (route.json && !is_json_type(head.content_type)) {
      throw ApiError(415, "Content-Type: got \"" + printable(head.content_type, 100) + "\", expected application/json");
    }
    if (stopping_ && (route.json || head.method == "PUT")) throw ApiError(503, "the server is stopping");
    return std::nullopt;
  } catch (const ApiError& error) {
    return to_reply(error, error_shape(head.path));
  }
}

void Service::Implementation::handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  auto call = std::make_shared<Call>();
  const auto& route = find(request, call->name);
  call->client = client_of(request).value_or("");
  call->request = std::move(request);
  call->exchange = std::move(exchange);
  if (route.quick) return run_route(route, *call);
  ++queued_;
  const auto counted = std::shared_ptr<void>(nullptr, [this](void*) { --queued_; });
  const auto lane = call->request.body.size() > kQuickBody ? HttpServer::Lane::slow : HttpServer::Lane::quick;
  server_.work(lane, [this, &route, call, counted] {
    if (!ended_ && !call->exchange->gone()) run_route(route, *call);
  });
}

void Service::Implementation::run_route(const Route& route, Call& call) {
  try {
    if (!call.name.empty() && route.run != &Implementation::model) check_session_name(call.name, "name");
    (this->*route.run)(call);
  } catch (...) {
    call.exchange->reply(to_reply(current_error(call.client), error_shape(call.request.path)));
  }
}

void Service::Implementation::metrics(Call& call) {
  call.exchange->reply({.body = metrics_text(context_.engine.statistics(), server_.replies(), server_.connections(),
                                             server_.request_bytes()),
                        .type = "text/plain; version=0.0.4; charset=utf-8"});
}

JsonText Service::Implementation::model_json() const {
  const auto& info = context_.info;
  return {{"id", context_.options.model},
          {"object", "model"},
          {"created", started_},
          {"owned_by", "efla"},
          {"parameters", info.parameters},
          {"vocab_size", info.vocab_size},
          {"weights", info.weights},
          {"sha256", info.model_sha256},
          {"session_bytes", info.session_bytes},
          {"session_bytes_per_token", info.token_bytes},
          {"kv_bytes_per_token", context_.options.kv_bytes_per_token}};
}

// Writes the ids while it computes them, because they may take several times the memory of their text.
void Service::Implementation::tokenize(Call& call) {
  const auto request = read_body(call, parse_tokenize);
  auto& exchange = *call.exchange;
  exchange.hold(std::ssize(request.text));
  const auto& tokenizer = *context_.info.tokenizer;
  std::string body = R"({"tokens":[)";
  std::size_t count = 0;
  const auto add = [&](std::span<const std::int32_t> ids) {
    const auto before = std::ssize(body);
    for (const auto id : ids) body += (count++ > 0 ? "," : "") + std::to_string(id);
    exchange.hold(std::ssize(body) - before);
  };
  const auto add_one = [&](std::int32_t id) { add({&id, 1}); };
  // Clients tokenize the texts that tokenizer_info has for the special tokens, in order to learn their ids.
  const auto is_text_of = [&](std::int32_t id) { return id >= 0 && request.text == token_text(id, tokenizer); };
  if (is_text_of(tokenizer.eos())) {
    add_one(tokenizer.eos());
  } else if (is_text_of(tokenizer.bos())) {
    add_one(tokenizer.bos());
  } else {
    if (bos_ids(context_, request.bos.value_or(context_.options.bos), {}) > 0) add_one(tokenizer.bos());
    encode_in_pieces(tokenizer, request.text, add);
  }
  body += "],\"count\":" + std::to_string(count) + "}";
  exchange.reply({.body = std::move(body)});
}

void Service::Implementation::detokenize(Call& call) {
  const auto ids = read_body(call, parse_detokenize);
  call.exchange->hold(static_cast<std::ptrdiff_t>(ids.size() * sizeof(ids[0])));
  require_ids(*context_.info.tokenizer, ids, "tokens");
  call.exchange->reply(json_reply({{"prompt", context_.info.tokenizer->decode(ids)}}));
}

void Service::Implementation::tokenizer_info(Call& call) {
  const auto& tokenizer = *context_.info.tokenizer;
  const auto text_of = [&](std::int32_t id) { return id >= 0 ? JsonText(token_text(id, tokenizer)) : JsonText(); };
  const auto chat_template = context_.options.chat->source(/*tools=*/false);
  call.exchange->reply(json_reply({{"name", tokenizer.info().name},
                                   {"vocab_size", tokenizer.vocab_size()},
                                   {"bos_token", text_of(tokenizer.bos())},
                                   {"eos_token", text_of(tokenizer.eos())},
                                   {"bos_token_id", tokenizer.bos() >= 0 ? JsonText(tokenizer.bos()) : JsonText()},
                                   {"eos_token_id", tokenizer.eos() >= 0 ? JsonText(tokenizer.eos()) : JsonText()},
                                   {"chat_template", chat_template.empty() ? JsonText() : JsonText(chat_template)}}));
}

Service::Service(engine::Engine& engine, ApiOptions options, Keys keys, const HttpOptions& http)
    : implementation_(std::make_unique<Implementation>(engine, std::move(options), std::move(keys), http)) {}
Service::~Service() = default;
const std::string& Service::address() const { return implementation_->address(); }
bool Service::run(std::chrono::milliseconds grace, bool signals) { return implementation_->run(grace, signals); }
void Service::stop(std::chrono::milliseconds grace) { implementation_->stop(grace); }

}  // namespace efla::serve
