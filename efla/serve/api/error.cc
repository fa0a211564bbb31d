#include "efla/serve/api/error.h"

#include <new>

#include "efla/base/error.h"
#include "efla/base/printable.h"
#include "efla/engine/engine.h"
#include "efla/io/json_text.h"
#include "efla/serve/api/context.h"

namespace efla::serve {
namespace {

JsonText text_or_null(const std::string& text) { return text.empty() ? JsonText() : JsonText(text); }

const char* type_of(int status) {
  if (status >= 500) return "server_error";
  return status == 429 ? "rate_limit_error" : "invalid_request_error";
}

const char* anthropic_type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

}  // namespace

std::string to_json(const ApiError& error, ErrorShape shape) {
  if (shape == ErrorShape::anthropic) {
    JsonText inner{{"type", anthropic_type_of(error.status)}, {"message", error.message}};
    if (!error.code.empty()) inner.add("details", {{"error_code", error.code}});
    return JsonText{{"type", "error"}, {"error", inner}}.text();
  }
  const JsonText inner{{"message", error.message},
                       {"type", type_of(error.status)},
                       {"param", text_or_null(error.param)},
                       {"code", text_or_null(error.code)}};
  return JsonText{{"error", inner}}.text();
}

HttpReply to_reply(const ApiError& error, ErrorShape shape) {
  HttpReply reply{.status = error.status, .body = to_json(error, shape)};
  if (error.status == 429 || error.status == 503) reply.fields.emplace_back("Retry-After: 1");
  // OpenAI's and Anthropic's clients send a request with status 500 again, although it may have advanced its session.
  if (error.status == 500) reply.fields.emplace_back("x-should-retry: false");
  if (!error.allow.empty()) reply.fields.emplace_back("Allow: " + error.allow);
  if (error.status == 401) reply.fields.emplace_back("WWW-Authenticate: Bearer");
  return reply;
}

ApiError current_error(const std::string& client) {
  const auto of_client = [&](std::string text) {
    const std::string owned = engine_name(client, "");
    for (std::size_t at; !owned.empty() && (at = text.find(owned)) != std::string::npos;) text.erase(at, owned.size());
    return printable(text, 1000);
  };
  const auto sentence = [&](const Error& error) {
    return of_client(error.argument() + ": got " + error.got() + ", expected " + error.expected());
  };
  try {
    throw;
  } catch (const ApiError& error) {
    return error;
  } catch (const NoRequestMemory& error) {
    return {error.alone ? 413 : 503, error.sentence(), "", "no_memory"};
  } catch (const RequestGone&) {
    return {503, "the server is stopping"};
  } catch (const engine::QueueFull&) {
    return {429, "the queue is full: too many requests wait already", "", "queue_full"};
  } catch (const engine::NoSuchSession& error) {
    return {404, sentence(error), error.argument(), "session_not_found"};
  } catch (const engine::SessionInUse& error) {
    return {409, sentence(error), "session", "session_in_use"};
  } catch (const engine::NoRoom& error) {
    return {503,
            "no room for one more state: " + sentence(error) +
                "; whoever runs the server sets a larger --session-memory, or a folder with --swap",
            "session_memory", "no_room"};
  } catch (const Error& error) {
    return {400, sentence(error), error.argument()};
  } catch (const IoError& error) {
    const bool content = error.kind() == IoError::Kind::content;
    return {content ? 400 : 500, of_client(error.what())};
  } catch (const std::bad_alloc&) {
    return {503, "not enough memory"};
  } catch (const std::exception& error) {
    return {500, of_client(error.what())};
  }
}

}  // namespace efla::serve
