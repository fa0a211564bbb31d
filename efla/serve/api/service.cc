#include "efla/serve/api/service.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "efla/base/error.h"
#include "efla/base/printable.h"
#include "efla/io/json.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/fields.h"
#include "efla/serve/api/formats.h"
#include "efla/serve/api/metrics.h"

namespace efla::serve {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kBytes = "application/octet-stream";

HttpReply json_reply(const Json& value) { return {.body = io::to_json_line(value)}; }

[[noreturn]] void refuse_existing(const std::string& name) {
  throw ApiError(400, "name: got \"" + name + "\", which exists, expected a new name", "name");
}

}  // namespace

class Service::Implementation {
 public:
  Implementation(Engine& engine, ApiOptions options, Keys keys, const HttpOptions& http)
      : keys_(std::move(keys)),
        context_{.engine = engine,
                 .info = engine.info(),
                 .options = std::move(options),
                 .work = [this](std::function<void()> task) { server_.work(std::move(task)); }},
        server_(
            http, [this](const HttpRequest& head) { return check(head); },
            [this](HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
              handle(std::move(request), std::move(exchange));
            }) {}

  const std::string& address() const { return server_.address(); }

  void run(std::chrono::milliseconds grace, bool signals) {
    if (signals) {
      server_.run([this, grace] { stop(stopping_ ? std::chrono::milliseconds(0) : grace); });
    } else {
      server_.run();
    }
    ended_ = true;
    // Requests whose clients were told to have left end with the engine's next step. One that the worker has only begun
    // is not running yet, and would outlive this object.
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      if (queued_ > 0) continue;
      const std::lock_guard lock(context_.mutex);
      if (context_.running.empty()) return;
    }
  }

  void stop(std::chrono::milliseconds grace) {
    stopping_ = true;
    server_.stop(grace);
  }

 private:
  // A request on its way to a route: NAME in the path of the route is `name`.
  struct Call {
    HttpRequest request;
    std::string client, name;
    std::shared_ptr<HttpExchange> exchange;
  };
  using Member = void (Implementation::*)(Call&);
  // quick: runs on the server's thread. open: needs no key. json: takes a body of JSON.
  struct Route {
    const char *method, *path;
    Member run;
    bool quick = false, open = false, json = false;
  };
  static const std::vector<Route>& routes();

  // Returns the route of a path, and the part of the path that its NAME stands for.
  static bool matches(const Route& route, const std::string& path, std::string& name);
  const Route& find(const HttpRequest& head, std::string& name) const;

  std::optional<HttpReply> check(const HttpRequest& head);
  void handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange);
  void run_route(const Route& route, Call& call);
  static void reply(Call& call, HttpReply reply) { call.exchange->reply(std::move(reply)); }

  void page(Call& call) {
    reply(call, {.body = context_.options.page,
                 .type = "text/html; charset=utf-8",
                 .fields = {"Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; style-src "
                            "'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                            "frame-ancestors 'none'",
                            "X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer"}});
  }
  void health(Call& call) {
    reply(call, stopping_ ? HttpReply{.status = 503, .body = R"({"status":"stopping"})", .fields = {"Retry-After: 1"}}
                          : HttpReply{.body = R"({"status":"ok"})"});
  }
  void metrics(Call& call);
  void models(Call& call) { reply(call, json_reply({{"object", "list"}, {"data", Json::array({model_json()})}})); }
  void model(Call& call) {
    check_model(context_, call.name);
    reply(call, json_reply(model_json()));
  }
  void completions(Call& call) { generate(call, parse_completion(parse_body(call.request.body))); }
  void chat(Call& call) { generate(call, parse_chat(parse_body(call.request.body))); }
  void responses(Call& call) { generate(call, parse_response(parse_body(call.request.body))); }
  void delete_response(Call& call);
  void tokenize(Call& call);
  void detokenize(Call& call);
  void tokenizer_info(Call& call);
  void list_sessions(Call& call);
  void require_new(const Call& call, const std::string& name) const;
  void copy_session(const Call& call, const std::string& from, const std::string& copy);
  void create_session(Call& call);
  void begin_session(Call& call, const CreateSessionRequest& request);
  void store(Call& call, const std::string& name, Request made, int status);
  void session(Call& call) { reply(call, session_reply(call, call.name)); }
  void delete_session(Call& call);
  void fork(Call& call);
  void rewind(Call& call);
  void download(Call& call) {
    auto state = context_.engine.save(engine_name(call.client, call.name));
    reply(call, {.body = context_.options.state_keys.sign(std::move(state)), .type = kBytes});
  }
  void upload(Call& call);
  void generate(Call& call, GenerationRequest request) {
    start_generation(context_, std::move(request), call.client, call.exchange);
  }
  Json model_json() const;
  HttpReply session_reply(const Call& call, const std::string& name, int status = 200);
  Json session_json(const Call& call, const SessionInfo& info) const;
  // Returns the name that the client knows, or "" for a session of somebody else.
  static std::string client_name(const std::string& client, const std::string& name);

  Keys keys_;
  std::int64_t started_ =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::atomic<bool> stopping_ = false, ended_ = false;
  std::atomic<std::int64_t> queued_ = 0;  // requests that wait for the worker, or that it handles
  ApiContext context_;
  HttpServer server_;
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
      {.method = "POST", .path = "/tokenize", .run = &I::tokenize, .json = true},
      {.method = "POST", .path = "/detokenize", .run = &I::detokenize, .json = true},
      {.method = "GET", .path = "/tokenizer_info", .run = &I::tokenizer_info, .quick = true},
      {.method = "GET", .path = "/v1/sessions", .run = &I::list_sessions},
      {.method = "POST", .path = "/v1/sessions", .run = &I::create_session, .json = true},
      {.method = "GET", .path = "/v1/sessions/NAME", .run = &I::session},
      {.method = "DELETE", .path = "/v1/sessions/NAME", .run = &I::delete_session},
      {.method = "POST", .path = "/v1/sessions/NAME/fork", .run = &I::fork, .json = true},
      {.method = "POST", .path = "/v1/sessions/NAME/rewind", .run = &I::rewind, .json = true},
      {.method = "GET", .path = "/v1/sessions/NAME/state", .run = &I::download},
      {.method = "PUT", .path = "/v1/sessions/NAME/state", .run = &I::upload},
  };
  return kRoutes;
}

bool Service::Implementation::matches(const Route& route, const std::string& path, std::string& name) {
  const std::string_view pattern = route.path;
  const auto at = pattern.find("NAME");
  if (at == std::string_view::npos) return path == pattern;
  const auto after = pattern.substr(at + 4);
  if (!path.starts_with(pattern.substr(0, at)) || !path.ends_with(after) || path.size() <= at + after.size())
    return false;
  const auto part = path.substr(at, path.size() - at - after.size());
  if (part.find('/') != std::string::npos) return false;
  name = part;
  return true;
}

const Service::Implementation::Route& Service::Implementation::find(const HttpRequest& head, std::string& name) const {
  const auto method = head.method == "HEAD" ? std::string("GET") : head.method;
  std::string methods;
  for (const auto& route : routes()) {
    if (!matches(route, head.path, name)) continue;
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
    if (!route.open && !keys_.client(head.authorization)) {
      throw ApiError(401, "the request needs the header \"Authorization: Bearer KEY\" with a key of this server", "",
                     "invalid_api_key");
    }
    // A page of another origin cannot send JSON without asking first, which CORS refuses.
    if (route.json && !head.content_type.starts_with("application/json")) {
      throw ApiError(415, "Content-Type: got \"" + printable(head.content_type, 100) + "\", expected application/json");
    }
    if (stopping_ && (route.json || head.method == "PUT")) throw ApiError(503, "the server is stopping");
    return std::nullopt;
  } catch (const ApiError& error) {
    return to_reply(error);
  }
}

void Service::Implementation::handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  auto call = std::make_shared<Call>();
  const auto& route = find(request, call->name);
  call->client = keys_.client(request.authorization).value_or("");
  call->request = std::move(request);
  call->exchange = std::move(exchange);
  if (route.quick) return run_route(route, *call);
  ++queued_;
  server_.work([this, &route, call] {
    if (!ended_) run_route(route, *call);
    --queued_;
  });
}

void Service::Implementation::run_route(const Route& route, Call& call) {
  try {
    if (!call.name.empty() && route.run != &Implementation::model) check_session_name(call.name, "name");
    (this->*route.run)(call);
  } catch (...) {
    reply(call, to_reply(current_error(call.client)));
  }
}

void Service::Implementation::metrics(Call& call) {
  reply(call, {.body = metrics_text(context_.engine.statistics(), server_.replies(), server_.connections(),
                                    server_.body_bytes()),
               .type = "text/plain; version=0.0.4; charset=utf-8"});
}

Json Service::Implementation::model_json() const {
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
          {"kv_bytes_per_token", context_.options.kv_bytes_per_token}};
}

void Service::Implementation::tokenize(Call& call) {
  const auto request = parse_tokenize(parse_body(call.request.body));
  const auto& tokenizer = *context_.info.tokenizer;
  std::vector<std::int32_t> ids;
  // Clients learn the ids of the special tokens from the texts that tokenizer_info has for them.
  if (request.text == kEosText && tokenizer.eos() >= 0) {
    ids = {tokenizer.eos()};
  } else if (request.text == kBosText && tokenizer.bos() >= 0) {
    ids = {tokenizer.bos()};
  } else {
    if (request.bos.value_or(context_.options.bos) && tokenizer.bos() >= 0) ids.push_back(tokenizer.bos());
    const auto encoded = tokenizer.encode(request.text);
    ids.insert(ids.end(), encoded.begin(), encoded.end());
  }
  reply(call, json_reply({{"tokens", ids}, {"count", ids.size()}}));
}

void Service::Implementation::detokenize(Call& call) {
  const auto ids = parse_detokenize(parse_body(call.request.body));
  require_ids(*context_.info.tokenizer, ids, "tokens");
  reply(call, json_reply({{"prompt", context_.info.tokenizer->decode(ids)}}));
}

void Service::Implementation::tokenizer_info(Call& call) {
  const auto& tokenizer = *context_.info.tokenizer;
  reply(call, json_reply({{"name", tokenizer.info().name},
                          {"vocab_size", tokenizer.vocab_size()},
                          {"bos_token", tokenizer.bos() >= 0 ? Json(kBosText) : Json()},
                          {"eos_token", tokenizer.eos() >= 0 ? Json(kEosText) : Json()},
                          {"bos_token_id", tokenizer.bos() >= 0 ? Json(tokenizer.bos()) : Json()},
                          {"eos_token_id", tokenizer.eos() >= 0 ? Json(tokenizer.eos()) : Json()},
                          {"chat_template", nullptr}}));
}

std::string Service::Implementation::client_name(const std::string& client, const std::string& name) {
  if (name.starts_with('_')) return "";
  if (client.empty()) return name;
  return name.starts_with(client + ".") ? name.substr(client.size() + 1) : "";
}

Json Service::Implementation::session_json(const Call& call, const SessionInfo& info) const {
  return {{"name", client_name(call.client, info.name)},
          {"object", "session"},
          {"tokens", info.tokens},
          {"rewindable", info.rewindable},
          {"bytes", info.bytes},
          {"in_memory", info.in_memory},
          {"in_use", info.in_use}};
}

HttpReply Service::Implementation::session_reply(const Call& call, const std::string& name, int status) {
  auto reply = json_reply(session_json(call, context_.engine.session(engine_name(call.client, name))));
  reply.status = status;
  return reply;
}

void Service::Implementation::list_sessions(Call& call) {
  Json list = Json::array();
  for (const auto& info : context_.engine.sessions()) {
    if (!client_name(call.client, info.name).empty()) list.push_back(session_json(call, info));
  }
  reply(call, json_reply({{"object", "list"}, {"data", std::move(list)}}));
}

// Throws ApiError where the client has a session of this name. A request that ends meanwhile may still store one.
void Service::Implementation::require_new(const Call& call, const std::string& name) const {
  try {
    context_.engine.session(engine_name(call.client, name));
  } catch (const NoSuchSession&) {
    return;
  }
  refuse_existing(name);
}

// Copies a session of the client. Throws ApiError where the client has a session of the copy's name.
void Service::Implementation::copy_session(const Call& call, const std::string& from, const std::string& copy) {
  try {
    context_.engine.fork(engine_name(call.client, from), engine_name(call.client, copy));
  } catch (const Error& error) {
    if (error.argument() != "copy") throw;
    refuse_existing(copy);
  }
}

void Service::Implementation::create_session(Call& call) {
  auto request = parse_create_session(parse_body(call.request.body));
  if (request.name.empty()) request.name = random_name("s-");
  if (request.prompt && request.name != request.parent) require_new(call, request.name);
  try {
    begin_session(call, request);
  } catch (const NoSuchSession& error) {
    throw NoSuchSession(error.operation(), "parent", error.got(), error.expected());
  }
}

void Service::Implementation::begin_session(Call& call, const CreateSessionRequest& request) {
  const auto name = engine_name(call.client, request.name);
  if (!request.prompt) {
    copy_session(call, request.parent, request.name);
    return reply(call, session_reply(call, request.name, 201));
  }
  Request made;
  if (!request.parent.empty()) made.session = engine_name(call.client, request.parent);
  made.prompt =
      encode_prompt(context_, *request.prompt, request.bos.value_or(context_.options.bos), made.session, "prompt");
  made.save_as = name;
  made.max_tokens = 0;
  call.request.body = {};
  store(call, request.name, std::move(made), 201);
}

// Submits a request that stores a session, and replies with the session.
void Service::Implementation::store(Call& call, const std::string& name, Request made, int status) {
  made.client = call.client;
  const auto id = context_.engine.submit(
      std::move(made),
      std::make_shared<Continuation>(
          [this, call, name, status, place = take_place(context_, call.client)](const Finish& finish) mutable {
            context_.work([this, call, name, status, finish, place]() mutable {
              try {
                if (finish.reason == FinishReason::error) throw ApiError(500, finish.error);
                if (finish.reason == FinishReason::cancelled) throw ApiError(503, "the request was cancelled");
                reply(call, session_reply(call, name, status));
              } catch (...) {
                reply(call, to_reply(current_error(call.client)));
              }
            });
          }));
  call.exchange->on_gone([this, id] { context_.engine.cancel(id); });
}

void Service::Implementation::delete_session(Call& call) {
  context_.engine.erase(engine_name(call.client, call.name));
  reply(call, json_reply({{"id", call.name}, {"object", "session.deleted"}, {"deleted", true}}));
}

void Service::Implementation::delete_response(Call& call) {
  const auto name = engine_name(call.client, call.name);
  try {
    if (!context_.engine.session(name).disposable) throw NoSuchSession("serve", "response", call.name, "a response");
    context_.engine.erase(name);
  } catch (const NoSuchSession&) {
    throw ApiError(404, "response: got \"" + call.name + "\", expected a stored one", {}, "not_found");
  }
  reply(call, json_reply({{"id", call.name}, {"object", "response.deleted"}, {"deleted", true}}));
}

void Service::Implementation::fork(Call& call) {
  auto copy = parse_fork(parse_body(call.request.body));
  if (copy.empty()) copy = random_name("s-");
  copy_session(call, call.name, copy);
  reply(call, session_reply(call, copy, 201));
}

void Service::Implementation::rewind(Call& call) {
  const auto tokens = parse_rewind(parse_body(call.request.body));
  if (tokens == 0) return reply(call, session_reply(call, call.name));
  Request made;
  made.session = made.save_as = engine_name(call.client, call.name);
  made.rewind = tokens;
  store(call, call.name, std::move(made), 200);
}

void Service::Implementation::upload(Call& call) {
  load_state(context_, engine_name(call.client, call.name), call.request.body);
  reply(call, session_reply(call, call.name));
}

Service::Service(Engine& engine, ApiOptions options, Keys keys, const HttpOptions& http)
    : implementation_(std::make_unique<Implementation>(engine, std::move(options), std::move(keys), http)) {}
Service::~Service() = default;
const std::string& Service::address() const { return implementation_->address(); }
void Service::run(std::chrono::milliseconds grace, bool signals) { implementation_->run(grace, signals); }
void Service::stop(std::chrono::milliseconds grace) { implementation_->stop(grace); }

}  // namespace efla::serve
