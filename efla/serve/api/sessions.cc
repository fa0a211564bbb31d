#include "efla/serve/api/sessions.h"

#include <memory>
#include <string>
#include <utility>

#include "efla/base/error.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/fields.h"
#include "efla/serve/api/requests.h"

namespace efla::serve {
namespace {

[[noreturn]] void refuse_existing(const std::string& name) {
  throw ApiError(400, "name: got \"" + name + "\", which exists, expected a new name", "name");
}

// Returns the name that the client knows, or "" for a session of somebody else.
std::string client_name(const std::string& client, const std::string& name) {
  if (client.empty()) return name;
  return name.starts_with(client + ".") ? name.substr(client.size() + 1) : "";
}

JsonText session_json(const Call& call, const engine::SessionInfo& info) {
  return {{"name", client_name(call.client, info.name)},
          {"object", "session"},
          {"tokens", info.tokens},
          {"rewindable", info.rewindable},
          {"bytes", info.bytes},
          {"in_memory", info.in_memory},
          {"in_use", info.in_use}};
}

HttpReply session_reply(ApiContext& context, const Call& call, const std::string& name, int status = 200) {
  auto reply = json_reply(session_json(call, context.engine.session(engine_name(call.client, name))));
  reply.status = status;
  return reply;
}

// Throws ApiError where the client has a session of this name. A request that ends meanwhile may still store one.
void require_new(ApiContext& context, const Call& call, const std::string& name) {
  try {
    context.engine.session(engine_name(call.client, name));
  } catch (const engine::NoSuchSession&) {
    return;
  }
  refuse_existing(name);
}

// Copies a session of the client. Throws ApiError where the client has a session of the copy's name.
void copy_session(ApiContext& context, const Call& call, const std::string& from, const std::string& copy) {
  try {
    context.engine.fork(engine_name(call.client, from), engine_name(call.client, copy));
  } catch (const Error& error) {
    if (error.argument() != "copy") throw;
    refuse_existing(copy);
  }
}

// Submits a request that stores a session, and replies with the session.
void store(ApiContext& context, Call& call, const std::string& name, engine::Request made, int status) {
  made.client = call.client;
  const auto id = context.engine.submit(
      std::move(made),
      std::make_shared<Continuation>([&context, call, name, status,
                                      place = take_place(context, call.client)](const engine::Finish& finish) mutable {
        context.work(HttpServer::Lane::quick, [&context, call, name, status, finish, place]() mutable {
          try {
            require_success(finish);
            call.exchange->reply(session_reply(context, call, name, status));
          } catch (...) {
            call.exchange->reply(to_reply(current_error(call.client)));
          }
        });
      }));
  call.exchange->on_gone([&context, id] { context.engine.cancel(id); });
}

void begin_session(ApiContext& context, Call& call, const CreateSessionRequest& request) {
  const auto name = engine_name(call.client, request.name);
  if (!request.prompt) {
    copy_session(context, call, request.parent, request.name);
    return call.exchange->reply(session_reply(context, call, request.name, 201));
  }
  engine::Request made;
  Pending pending;
  if (!request.parent.empty()) {
    made.session = engine_name(call.client, request.parent);
    pending = context.engine.session(made.session).pending;
  }
  made.prompt = encode_prompt(context, *request.prompt, request.bos.value_or(context.options.bos), pending, "prompt",
                              *call.exchange);
  made.save_as = name;
  made.max_tokens = 0;
  store(context, call, request.name, std::move(made), 201);
}

}  // namespace

void list_sessions(ApiContext& context, Call& call) {
  JsonText list = JsonText::array();
  for (const auto& info : context.engine.sessions()) {
    if (!client_name(call.client, info.name).empty()) list.push_back(session_json(call, info));
  }
  call.exchange->reply(json_reply({{"object", "list"}, {"data", list}}));
}

void create_session(ApiContext& context, Call& call) {
  auto request = read_body(call, parse_create_session);
  if (request.name.empty()) request.name = random_name("s-");
  if (request.prompt && request.name != request.parent) require_new(context, call, request.name);
  try {
    begin_session(context, call, request);
  } catch (const engine::NoSuchSession& error) {
    throw engine::NoSuchSession(error.operation(), "parent", error.got(), error.expected());
  }
}

void show_session(ApiContext& context, Call& call) { call.exchange->reply(session_reply(context, call, call.name)); }

void delete_session(ApiContext& context, Call& call) {
  context.engine.erase(engine_name(call.client, call.name));
  call.exchange->reply(json_reply({{"id", call.name}, {"object", "session.deleted"}, {"deleted", true}}));
}

void delete_response(ApiContext& context, Call& call) {
  const auto name = engine_name(call.client, call.name);
  try {
    if (!context.engine.session(name).disposable)
      throw engine::NoSuchSession("serve", "response", call.name, "a response");
    context.engine.erase(name);
  } catch (const engine::NoSuchSession&) {
    throw ApiError(404, "response: got \"" + call.name + "\", expected a stored one", {}, "not_found");
  }
  call.exchange->reply(json_reply({{"id", call.name}, {"object", "response.deleted"}, {"deleted", true}}));
}

void fork_session(ApiContext& context, Call& call) {
  auto copy = read_body(call, parse_fork);
  if (copy.empty()) copy = random_name("s-");
  copy_session(context, call, call.name, copy);
  call.exchange->reply(session_reply(context, call, copy, 201));
}

void rewind_session(ApiContext& context, Call& call) {
  const auto tokens = read_body(call, parse_rewind);
  if (tokens == 0) return call.exchange->reply(session_reply(context, call, call.name));
  engine::Request made;
  made.session = made.save_as = engine_name(call.client, call.name);
  made.rewind = tokens;
  store(context, call, call.name, std::move(made), 200);
}

void download_state(ApiContext& context, Call& call) {
  const auto name = engine_name(call.client, call.name);
  call.exchange->hold(2 * static_cast<std::ptrdiff_t>(context.engine.session(name).bytes));
  auto state = context.engine.save(name);
  call.exchange->reply({.body = context.options.state_keys.sign(std::move(state)), .type = "application/octet-stream"});
}

void upload_state(ApiContext& context, Call& call) {
  call.exchange->hold(std::ssize(call.request.body));  // of its copy
  load_state(context, engine_name(call.client, call.name), call.request.body);
  call.exchange->reply(session_reply(context, call, call.name));
}

}  // namespace efla::serve
